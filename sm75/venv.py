"""The orchestrator's own environment. Standard library only: nothing is installed yet.

``orchestrator.py`` may be started by any python3 >= 3.11. It makes ``.venv`` beside itself from a
hash-pinned list and starts again inside it. A Python that has the tools already (pixi's) is used
as it is.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

# One import name a tool; enough to tell an environment made for us from any other.
_NEEDED = (
    "click", "httpx", "jinja2", "msgspec", "rattler", "rattler_build", "rich", "tomlkit", "unidiff",
)  # fmt: skip
_DEV_NEEDED = ("mypy", "pytest", "ruff", "hypothesis")
# What pip may take from the environment: where packages come from and how they are reached. Any
# other setting (PIP_TARGET, PIP_DRY_RUN, PIP_CONSTRAINT, ...) would change what is installed.
_PIP_SETTINGS = frozenset(
    f"PIP_{name}"
    for name in ("CACHE_DIR", "CERT", "CLIENT_CERT", "CONFIG_FILE", "DEFAULT_TIMEOUT",
                 "EXTRA_INDEX_URL", "FIND_LINKS", "INDEX_URL", "KEYRING_PROVIDER", "NO_CACHE_DIR",
                 "NO_INDEX", "PROXY", "RETRIES", "TIMEOUT", "TRUSTED_HOST")
)  # fmt: skip


def ensure(root: Path, *, dev: bool = False) -> None:
    """Return inside an environment that has the tools; otherwise make it and restart there.

    Args:
        root: The project's directory.
        dev: Whether the tools of the test suite are needed as well.
    """
    if sys.version_info < (3, 11):  # noqa: UP036 (this is where an older one is told so)
        _fail(
            f"Python {sys.version.split()[0]} is too old",
            why="the orchestrator needs 3.11 or newer",
            fix="start it with a newer python3, for instance python3.12 orchestrator.py ...",
        )
    home = root / ".venv"
    inside = Path(sys.prefix).resolve() == home.resolve()
    if not inside and _has(_NEEDED + (_DEV_NEEDED if dev else ())):
        return
    lists = [root / "lock" / "tools.txt", *([root / "lock" / "dev-tools.txt"] if dev else [])]
    done = [home / f"{path.stem}-{_key(path)}.done" for path in lists]
    whole = all(path.exists() for path in done)
    if inside and whole:
        return
    python = home / "bin" / "python"
    # Nothing is written then: services run as users who may not write to the checkout.
    if not (whole and python.exists()):
        _make(root, home, dict(zip(lists, done, strict=True)), inside=inside)
    # -I: PYTHONPATH, PYTHONHOME or packages of the user's would shadow the pinned tools.
    os.execv(python, [str(python), "-I", *sys.argv])  # noqa: S606


def _make(root: Path, home: Path, lists: dict[Path, Path], *, inside: bool) -> None:
    """Make the environment, or what it lacks; ``lists`` are the tools' with their markers."""
    try:
        root.joinpath(".sm75").mkdir(exist_ok=True)
        with (root / ".sm75" / "venv.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            first = next(iter(lists.values()))
            if not (home / "bin" / "python").exists() or (not inside and not first.exists()):
                _create(home)
            for path, marker in lists.items():
                if not marker.exists():
                    _install(home, path)
                    _check(home, path)
                    marker.touch()
    except OSError as err:
        _fail(
            f"cannot write {err.filename or root}",
            why=str(err.strerror),
            fix="free some space, or work in a checkout that you may write to",
            code=9,
        )


def _has(modules: tuple[str, ...]) -> bool:
    return all(importlib.util.find_spec(name) is not None for name in modules)


def _key(path: Path) -> str:
    version = f"{sys.version_info.major}.{sys.version_info.minor}\n".encode()
    return hashlib.sha256(version + path.read_bytes()).hexdigest()[:12]


def _create(home: Path) -> None:
    print(f"making {home.name} (first start only)", file=sys.stderr)
    shutil.rmtree(home, ignore_errors=True)
    base = getattr(sys, "_base_executable", sys.executable)
    made = subprocess.run(
        [base, "-I", "-m", "venv", str(home)], check=False, capture_output=True, text=True
    )
    if made.returncode:
        shutil.rmtree(home, ignore_errors=True)
        _fail(
            "cannot make a virtual environment",
            why=(made.stdout + made.stderr).strip().splitlines()[-1]
            if made.stdout + made.stderr
            else f"exit code {made.returncode}",
            fix="on Debian or Ubuntu: sudo apt-get install python3-venv; then run this again",
        )


def _install(home: Path, path: Path) -> None:
    print(f"installing {path.name}", file=sys.stderr)
    done = subprocess.run(
        [str(home / "bin" / "python"), "-I", "-m", "pip", "install", "--quiet", "--require-hashes",
         "--only-binary", ":all:", "--no-deps", "--disable-pip-version-check", "-r", str(path)],
        check=False,
        stdout=sys.stderr,
        env={k: v for k, v in os.environ.items()
             if not k.startswith(("PIP_", "PYTHON")) or k in _PIP_SETTINGS},
    )  # fmt: skip
    if done.returncode:
        _fail(
            f"cannot install {path.name}",
            why="pip's message is above",
            fix="make the package index reachable (PIP_INDEX_URL names another one), then run this "
            "again",
        )


def _check(home: Path, path: Path) -> None:
    """See that what pip has installed is there: its own configuration may send it elsewhere."""
    wanted = re.findall(r"(?m)^([A-Za-z0-9][^\\\n]*)", path.read_text())
    program = (
        "import importlib.metadata as m, sys\n"
        "from pip._vendor.packaging.requirements import Requirement\n"
        "for line in map(Requirement, sys.argv[1:]):\n"
        "    if line.marker is None or line.marker.evaluate(): m.version(line.name)"
    )
    done = subprocess.run(
        [str(home / "bin" / "python"), "-I", "-c", program, *wanted],
        check=False, capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode:
        _fail(
            f"pip installed {path.name} somewhere else than into {home.name}",
            why=done.stderr.strip().splitlines()[-1],
            fix="look for target, prefix, root or user in the output of: pip config list",
        )


def _fail(what: str, *, why: str, fix: str, code: int = 6) -> None:
    print(f"error: {what}\n  why:  {why}\n  next: {fix}", file=sys.stderr)
    sys.exit(code)
