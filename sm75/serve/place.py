"""Where things are: the program, the model, the address."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from pathlib import Path

from sm75.errors import BusyError, UsageError
from sm75.serve.flags import Given

# vLLM's own (vllm/entrypoints/openai/cli_args.py of 0.28.0, FrontendArgs.port).
_PORT = 8000
# What an id on a hub looks like (huggingface_hub, utils/_validators.py, in short).
_ID = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}")


def program(
    prefix: Path | None, environment: Mapping[str, str], *, needed: bool = True
) -> Path:  # fmt: skip
    """vLLM's program.

    Args:
        prefix: The environment; nothing: the active conda environment.
        environment: Variables.
        needed: Whether it is to be run; else, where no environment is named, its bare name does.

    Raises:
        UsageError: There is none.
    """
    active = environment.get("CONDA_PREFIX", "")
    if prefix is None and not active:
        if not needed:
            return Path("vllm")
        raise UsageError(
            "no environment is named",
            why="--prefix is not given, and no conda environment is active",
            fix="python3 orchestrator.py serve MODEL --prefix DIR, the one that install made",
        )  # fmt: skip
    found = (prefix.expanduser() if prefix else Path(active)).absolute() / "bin" / "vllm"
    if not found.is_file():
        raise UsageError(
            f"there is no {found}",
            why="vllm-sm75 is not installed there",
            fix=f"python3 orchestrator.py install --prefix {found.parents[1]}, or name another "
            "--prefix",
        )
    if not os.access(found, os.X_OK):
        raise UsageError(
            f"{found} cannot be run", why="it is not executable for this user",
            fix=f"ls -l {found}",
        )  # fmt: skip
    return found


def model(name: str, environment: Mapping[str, str]) -> Path:
    """The directory of a model.

    Args:
        name: A directory, or a hub's id whose files are in Hugging Face's cache.
        environment: Variables.

    Raises:
        UsageError: It is neither.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise UsageError(
            f"{name} is a file", why="a model is a directory with config.json",
            fix=f"name {path.parent}",
        )  # fmt: skip
    if not _ID.fullmatch(name):
        raise UsageError(f"there is no directory {name}", fix="name the model's directory")
    # huggingface_hub, constants.py and file_download.py: models--OWNER--NAME/snapshots/COMMIT.
    base = Path(environment.get("XDG_CACHE_HOME") or "~/.cache")
    home = Path(environment.get("HF_HOME") or base / "huggingface")
    cache = Path(environment.get("HF_HUB_CACHE") or home / "hub").expanduser()
    entry = cache / f"models--{name.replace('/', '--')}"
    try:
        commit = (entry / "refs" / "main").read_text(encoding="utf-8").strip()
    except OSError:
        commit = ""
    found = entry / "snapshots" / commit
    if commit and re.fullmatch(r"[0-9a-f]{40}", commit) and found.is_dir():
        return found
    raise UsageError(
        f"{name} is no directory, and not in Hugging Face's cache", why=f"looked at {entry}",
        fix=f"PREFIX/bin/hf download {name}; or name a directory",
    )  # fmt: skip


def address(given: Given) -> str:
    """The server's URL, as it is reached from this machine.

    Raises:
        UsageError: The port is none.
    """
    text = given.value("--port") or str(_PORT)
    if not text.isdigit() or not 0 < int(text) < 65_536:
        raise UsageError(f"--port {text} is no port", fix="for instance: --port 8000")
    host = given.value("--host") or "127.0.0.1"
    if host in ("0.0.0.0", "::", "*"):  # noqa: S104 (it is read, not bound)
        host = "127.0.0.1"
    scheme = "https" if given.has("--ssl-certfile") else "http"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{int(text)}"


def must_be_free(given: Given) -> None:
    """Refuse an address at which something answers already.

    Raises:
        BusyError: Something does.
    """
    if given.has("--uds"):
        return
    url = address(given)
    host, _, port = url.partition("://")[2].rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=1.0).close()
    except OSError:
        return
    raise BusyError(
        f"something answers at {url} already",
        why="two servers cannot have one port",
        fix=f"end it, or take another: -- --port {int(port) + 1}",
    )
