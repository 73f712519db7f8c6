"""Write a target contract on a box: what its image's torch is, without needing a GPU.

A fact that cannot be found is written as unknown; nothing is guessed.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import tomlkit

from sm75.atomic import write_bytes
from sm75.errors import LockError, UsageError
from sm75.lockfile import TargetContract, load_target

# Runs in the image's own Python. Each fact may fail alone; arch flags are compiled in, and need no
# GPU (torch.cuda.get_arch_list() does).
_PROBE = """
import json, sys
facts = {"torch": "", "cuda": "", "arches": [], "fault": ""}
facts["python"] = "%d.%d" % sys.version_info[:2]
try:
    import torch
    facts["torch"] = torch.__version__
    facts["cuda"] = torch.version.cuda or ""
    facts["arches"] = (torch._C._cuda_getArchFlags() or "").split()
except Exception as fault:
    facts["fault"] = "%s: %s" % (type(fault).__name__, fault)
print("\\n" + json.dumps(facts))
"""
# Importing torch from a cold disk takes long.
_TIMEOUT = 300.0


def probe(path: Path) -> TargetContract:
    """Ask a box.

    Args:
        path: The image's environment, for instance ``/opt/pytorch``.

    Returns:
        Its contract, with a name made of torch's version and the system's.

    Raises:
        UsageError: There is no Python in ``path``, or it has no torch.
    """
    python = next((p for p in (path / "bin/python3", path / "bin/python") if p.exists()), None)
    if python is None:
        raise UsageError(
            f"there is no Python environment in {path}",
            why="it has no bin/python3",
            fix="name the image's environment: --path DIR",
        )
    facts = _ask(python)
    if not facts["torch"]:
        facts |= {k: v for k, v in _static(path).items() if v}
    if not facts["torch"]:
        raise UsageError(
            f"the environment in {path} has no torch that can be imported",
            why=str(facts["fault"]),
            fix="run it on the image whose torch is to be used",
        )
    system = _os_release()
    torch = ".".join(facts["torch"].partition("+")[0].split(".")[:2])
    label = f"{system.get('ID', '')}{system.get('VERSION_ID', '')}" or "linux"
    sources = ["asked on the machine: doctor --write-contract"]
    if facts["fault"]:
        sources.append("torch's own files; importing it failed")
    return TargetContract(
        name=f"dlami-pytorch-{torch}-{label}",
        torch=facts["torch"],
        torch_arches=tuple(facts["arches"]),
        cuda=facts["cuda"] or "none",
        python=(facts["python"],) if facts["python"] else (),
        glibc=_glibc(),
        driver=_driver(),
        path=str(path),
        standing="seen",
        sources=tuple(sources),
    )


def dump(contract: TargetContract) -> str:
    """Write a contract as TOML; unknown facts carry a comment that says so."""
    document = tomlkit.document()
    document.add(tomlkit.comment("Facts of one machine; commit it to build for that image."))
    for key, value in msgspec.to_builtins(contract).items():
        item = tomlkit.item(value)
        if not value:
            item.comment("unknown")
        document.add(key, item)
    return tomlkit.dumps(document)


def write(root: Path, contract: TargetContract, *, name: str = "", replace: bool = False) -> Path:
    """Write ``lock/targets/<name>.toml``.

    Args:
        root: The project's directory.
        contract: What :func:`probe` found.
        name: Another name.
        replace: Whether to overwrite an existing contract.

    Returns:
        The file.

    Raises:
        UsageError: There is one of that name, or the name is no file name.
        LockError: What was written cannot be read back.
        DiskError: It cannot be written.
    """
    if name:
        contract = msgspec.structs.replace(contract, name=name)
    if not re.fullmatch(r"[a-z0-9][a-z0-9.+_-]*", contract.name):
        raise UsageError(f"'{contract.name}' cannot name a contract", fix="--name NAME")
    path = root / "lock" / "targets" / f"{contract.name}.toml"
    if path.exists() and not replace:
        raise UsageError(
            f"there is a contract {contract.name} already",
            why=str(path),
            fix="give another name (--name), or remove that file",
        )
    write_bytes(path, dump(contract).encode())
    if load_target(root, contract.name) != contract:
        raise LockError(f"{path} does not say what was found")
    return path


def _ask(python: Path) -> dict[str, Any]:
    facts: dict[str, Any] = {"python": "", "torch": "", "cuda": "", "arches": [], "fault": ""}
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "LD_"))}
    try:
        done = subprocess.run(
            [str(python), "-I", "-c", _PROBE],
            check=False, capture_output=True, text=True, timeout=_TIMEOUT, env=environment,
        )  # fmt: skip
        facts |= json.loads(done.stdout.strip().rpartition("\n")[2] or "{}")
        facts["fault"] = facts["fault"] or (done.stderr[-300:] if done.returncode else "")
    except (OSError, ValueError, subprocess.SubprocessError) as err:
        facts["fault"] = str(err)
    return facts


def _static(path: Path) -> dict[str, str]:
    """Read what torch's files say, where it cannot be imported."""
    for version in sorted(path.glob("lib/python3.*/site-packages/torch/version.py")):
        text = version.read_text(encoding="utf-8", errors="replace")
        values = dict(re.findall(r"(?m)^(\w+)\s*(?::[^=\n]*)?=\s*'([^'\n]*)'", text))
        return {
            "torch": values.get("__version__", ""),
            "cuda": values.get("cuda", ""),
            "python": version.parts[-4].removeprefix("python"),
        }
    return {}


def _os_release() -> dict[str, str]:
    try:
        text = Path("/etc/os-release").read_text(encoding="utf-8")
    except OSError:
        return {}
    return {k: v.strip('"') for k, _, v in (line.partition("=") for line in text.splitlines()) if v}


def _glibc() -> str:
    try:
        told = os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (OSError, ValueError):
        return ""
    return told.removeprefix("glibc ").strip()


def _driver() -> str:
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    found = re.search(r"\b(\d{3}\.\d+(?:\.\d+)?)\b", text)
    return found[1] if found else ""
