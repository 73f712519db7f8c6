"""The image's environment: where it is, whether its torch will do, and its modules.

Standard library only, and Python 3.11.
"""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
import types
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dlami_torch import MODULES

CONTRACT: dict[str, str] = json.loads(Path(__file__).with_name("contract.json").read_text())
# Below the environment's prefix: the place that `--set` records.
LOCATION = Path("etc", "dlami-torch", "path")
# The stable ABI that vLLM's extensions are compiled for (TORCH_TARGET_VERSION in its CMakeLists).
FLOOR = (2, 11)
ARCH = "sm_75"
# What DLAMI_TORCH_ACCEPT can waive.
CHECKS = frozenset({"arch", "cuda", "version"})
# Seconds that the image's python may take to say where its packages are.
_PROBE_TIMEOUT = 60
_PROBE = (
    "import json, sys, sysconfig; print(json.dumps({"
    "'minor': '%d.%d' % sys.version_info[:2], "
    "'site': sorted({sysconfig.get_path('purelib'), sysconfig.get_path('platlib')})}))"
)


class ImageError(ImportError):
    """The image's torch is missing or unsuitable; the message says what to do."""


@dataclass(frozen=True)
class Image:
    """What was found.

    Attributes:
        root: The image's environment.
        site: Its directory of packages.
        python: Minor of its Python.
        torch: Version of its torch.
        cuda: CUDA of that torch; empty: none.
    """

    root: Path
    site: Path
    python: str
    torch: str
    cuda: str


_image: Image | None = None
_fault: ImageError | None = None


def configured() -> tuple[Path, str]:
    """The place to look in, and who says so.

    Raises:
        ImageError: The record of the environment is no text.
    """
    if given := os.environ.get("DLAMI_TORCH_PATH"):
        return Path(given), "DLAMI_TORCH_PATH"
    recorded = Path(sys.prefix) / LOCATION
    try:
        if text := recorded.read_text(encoding="utf-8").strip():
            return Path(text), str(recorded)
    except OSError:
        pass
    except UnicodeDecodeError as err:
        raise ImageError(
            f"dlami-torch: {recorded} does not hold a path: it is not UTF-8. Record the place "
            "anew: python -m dlami_torch --set PATH."
        ) from err
    return Path(CONTRACT["path"]), f"the contract {CONTRACT['name']}"


def locate() -> Image:
    """Find the image and check it, as far as that goes without importing torch.

    Raises:
        ImageError: It is missing or unsuitable.
    """
    return locate_in(*configured())


def locate_in(place: Path, source: str) -> Image:
    """Find the image in one place and check it.

    Args:
        place: Its environment, or its python.
        source: Who says so.

    Raises:
        ImageError: It is missing or unsuitable.
    """
    root = place
    try:
        if place.name.startswith("python") and not place.is_dir():  # its python, not its name
            root = place.parent.parent
        found = _look(root) or _ask(root)
    except (OSError, ValueError) as err:  # a name too long, or with a NUL
        why = os.strerror(err.errno) if isinstance(err, OSError) and err.errno else str(err)
        raise ImageError(
            f"dlami-torch: {_short(root)} (named by {source}) cannot be looked into: {why}. Set "
            "DLAMI_TORCH_PATH to the environment that has the image's torch."
        ) from err
    if found is None:
        raise ImageError(
            f"dlami-torch: there is no torch in {root} (named by {source}). This package uses the "
            "torch of AWS's ARM64 Deep Learning AMI (PyTorch >= 2.11): start the instance from "
            "that image, or set DLAMI_TORCH_PATH to the environment that has it."
        )
    site, minor = found
    text = _read(site / "torch" / "version.py")
    version = _value(text, "__version__")
    image = Image(root=root, site=site, python=minor, torch=version, cuda=_value(text, "cuda"))
    _check(image)
    return image


def _look(root: Path) -> tuple[Path, str] | None:
    """Find torch where environments have it, without starting anything."""
    sites = [s for s in root.glob("lib*/python3.*/site-packages") if (s / "torch").is_dir()]
    own = f"python{_minor()}"
    sites.sort(key=lambda s: (s.parent.name != own, s.as_posix()))
    return (sites[0], sites[0].parent.name.removeprefix("python")) if sites else None


def _ask(root: Path) -> tuple[Path, str] | None:
    """Ask the image's own python, for layouts of another kind."""
    program = next((p for p in (root / "bin/python", root / "bin/python3") if p.exists()), None)
    if program is None:
        return None
    try:
        done = subprocess.run(
            [str(program), "-I", "-c", _PROBE],
            check=True, capture_output=True, text=True, timeout=_PROBE_TIMEOUT,
        )  # fmt: skip
        told = json.loads(done.stdout)
    except (OSError, ValueError, RecursionError, subprocess.SubprocessError):
        return None
    minor, sites = (told.get("minor"), told.get("site")) if isinstance(told, dict) else ("", [])
    if not isinstance(minor, str) or not isinstance(sites, list):
        return None
    for site in sites:
        if isinstance(site, str) and (Path(site) / "torch").is_dir():
            return Path(site), minor
    return None


def _short(path: Path) -> str:
    text = str(path)
    return text if len(text) <= 200 else f"{text[:200]}..."


def _check(image: Image) -> None:
    _accepted()  # warns of words that mean nothing
    if image.python != _minor():
        raise ImageError(
            f"dlami-torch: the torch in {image.root} is for Python {image.python}, this "
            f"environment has {_minor()}. Make the environment with the image's Python: "
            f"python={image.python}."
        )
    if _release(image.torch) < FLOOR and not _waived("version"):
        raise ImageError(
            f"dlami-torch: {image.root} has torch {image.torch or 'of no known version'}; vLLM's "
            f"kernels need the stable ABI of {FLOOR[0]}.{FLOOR[1]} or newer. Use a newer image."
        )
    wanted = CONTRACT["cuda"].partition(".")[0]
    if image.cuda.partition(".")[0] != wanted and not _waived("cuda"):
        raise ImageError(
            f"dlami-torch: the torch in {image.root} is "
            + (f"for CUDA {image.cuda}" if image.cuda else "built without CUDA")
            + f"; vLLM's kernels are linked with the runtime of CUDA {wanted}. Use an image whose "
            f"torch is for CUDA {wanted}."
        )


def check_arch(image: Image, torch: types.ModuleType) -> None:
    """Refuse a torch without machine code for the T4G. Works without a GPU.

    Raises:
        ImageError: It has none.
    """
    flags = getattr(torch._C, "_cuda_getArchFlags", None)
    arches = ((flags() if flags else None) or "").split()
    if ARCH not in arches and not _waived("arch"):
        raise ImageError(
            f"dlami-torch: torch {image.torch} in {image.root} has no {ARCH} code (it has "
            f"{' '.join(arches) or 'none for a GPU'}), so that nothing of it runs on a T4G. Use "
            "the torch that the ARM64 Deep Learning AMI ships."
        )


def current() -> Image:
    """The image, located once; a fault is remembered, so that every import says the same.

    Raises:
        ImageError: It is missing or unsuitable.
    """
    global _image, _fault
    if _fault is not None:
        raise _fault.with_traceback(None)
    if _image is None:
        try:
            _image = locate()
        except ImageError as fault:
            _fault = fault
            raise
    return _image


class _CheckedLoader:
    """torch's own loader, and the check of its arch list at the end."""

    def __init__(self, loader: importlib.machinery.SourceFileLoader, image: Image) -> None:
        self._loader = loader
        self._image = image

    def __getattr__(self, name: str) -> object:
        return getattr(self._loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        global _fault
        self._loader.exec_module(module)
        # what torch keeps asking its loader for is the plain one's business
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        try:
            check_arch(self._image, module)
        except ImageError as fault:
            _fault = fault  # torch cannot be imported twice in one process
            raise


def find_spec(name: str) -> importlib.machinery.ModuleSpec | None:
    """Find one of the image's modules.

    Raises:
        ImageError: The image is missing or unsuitable.
    """
    image = current()
    spec = importlib.machinery.PathFinder.find_spec(name, [str(image.site)])
    if name == "torch" and spec is not None and spec.loader is not None:
        spec.loader = _CheckedLoader(spec.loader, image)  # type: ignore[assignment, arg-type]
    return spec


def find_distributions(name: str | None) -> Iterator[importlib.metadata.Distribution]:
    """Find the metadata of the image's distributions.

    Args:
        name: Of one distribution; ``None``: all of them.
    """
    wanted = [d for d in MODULES if name is None or d == re.sub(r"[-_.]+", "-", name).lower()]
    if not wanted:
        return
    try:
        image = current()
        found = [
            path
            for distribution in wanted
            for path in sorted(image.site.glob(f"{distribution}-*.dist-info"))
        ]
    except (ImportError, OSError, ValueError):
        return  # `import torch` says it; those who only list packages must not fail
    yield from map(importlib.metadata.PathDistribution, found)


def _minor() -> str:
    return f"{sys.version_info[0]}.{sys.version_info[1]}"


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _value(text: str, name: str) -> str:
    found = re.search(rf"(?m)^{name}\s*(?::[^=]*)?=\s*['\"]([^'\"]*)['\"]", text)
    return found[1] if found else ""


def _release(version: str) -> tuple[int, int]:
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _accepted() -> frozenset[str]:
    """The checks that DLAMI_TORCH_ACCEPT names; warns of words that name none."""
    words = frozenset(re.split(r"[,\s]+", os.environ.get("DLAMI_TORCH_ACCEPT", ""))) - {""}
    if unknown := sorted(words - CHECKS):
        warnings.warn(
            f"dlami-torch: DLAMI_TORCH_ACCEPT names no check with {', '.join(unknown)[:200]!r}; "
            f"there are {', '.join(sorted(CHECKS))}",
            RuntimeWarning,
            stacklevel=2,
        )
    return words & CHECKS


def _waived(check: str) -> bool:
    if check not in _accepted():
        return False
    warnings.warn(
        f"dlami-torch: the check '{check}' would fail and is waived by DLAMI_TORCH_ACCEPT; "
        "this is for tests only",
        RuntimeWarning,
        stacklevel=2,
    )
    return True
