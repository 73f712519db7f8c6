"""A stand-in for the image's environment: torch, triton and torchvision of the public index.

They are the real wheels for aarch64. Their torch has no sm_75 code, which the adapter must notice.
CUDA's libraries are left out (2 GB): empty libraries with the symbols that torch needs take their
place, except for the runtime, which is the real one. Without a GPU nothing else is ever called.
"""

from __future__ import annotations

import subprocess
import sys
import zipfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection, GNUVerSymSection
from elftools.elf.sections import SymbolTableSection

from sm75 import fetch
from sm75.lockfile import Artifact, ReleaseLock
from sm75.progress import make_reporter
from sm75.store import Store

_TRITON = "triton-3.7.0-cp311-cp311-manylinux_2_27_aarch64.manylinux_2_28_aarch64.whl"
_TORCHVISION = "torchvision-0.27.0-cp311-cp311-manylinux_2_28_aarch64.whl"
WHEELS = (
    ("torch", "2.12.0", "torch-2.12.0-cp311-cp311-manylinux_2_28_aarch64.whl", 426362932,
     "c12592630aef72feaf18bd3f197ef587bbfa21131b31c38b23ab2e55fce92e36"),
    ("torchvision", "0.27.0", _TORCHVISION, 7831148,
     "9bb9251f64b854124efed95d02953a89f7e2726c3ca662d7ea0151129157297f"),
    ("triton", "3.7.0", _TRITON, 188480277,
     "a9e71fc392675fac364e0ecf4ef3f76f85b7f5433a16f4c3c5fe5f05a52c85fe"),
)  # fmt: skip
RUNTIME = "nvidia/cu13/lib/libcudart.so.13"
GCC = "aarch64-linux-gnu-gcc"
_CUDA = ("cu", "CU", "nccl", "nvshmem", "nvrtc", "nvJitLink", "nvtx")
# What vllm-sm75's extensions take besides.
_NAMED: dict[str, tuple[str, ...]] = {"libcublas.so.13": ("cublasHgemm",)}
# The driver's: see standindriver.
_DRIVER = ("libcuda.so.1", "libnvidia-ml.so.1")
_SYSTEM = ("libc.", "libm.", "libgcc_s.", "libstdc++.", "libpthread.", "libdl.", "librt.",
           "ld-linux", "libgomp.", "libz.")  # fmt: skip


def artifacts() -> list[Artifact]:
    """The wheels, pinned."""
    return [
        Artifact(
            id=project, project=project, version=version, filename=filename, sha256=sha256,
            size=size, role="target", platforms=("any",),
        )
        for project, version, filename, size, sha256 in WHEELS
    ]  # fmt: skip


def make(place: Path, store: Store, lock: ReleaseLock) -> Path:
    """Make the environment below ``place``, once. Fetches the wheels where the store lacks them.

    Args:
        place: Its root, to be given as DLAMI_TORCH_PATH.
        store: The store.
        lock: Has the CUDA runtime's wheel.
    """
    site = place / "lib" / "python3.11" / "site-packages"
    done = place / "complete"
    if done.exists():
        return place
    wanted = fetch.plan_artifacts(artifacts(), store)
    with make_reporter(sys.stderr) as reporter:
        fetch.fetch(wanted, store, reporter)
    site.mkdir(parents=True, exist_ok=True)
    for artifact in artifacts():
        with zipfile.ZipFile(store.get(artifact)) as wheel:
            wheel.extractall(site)
    with zipfile.ZipFile(store.get(lock.artifact("cuda-cudart"))) as wheel:
        (site / RUNTIME).parent.mkdir(parents=True)
        (site / RUNTIME).write_bytes(wheel.read(RUNTIME))
    _stub(site)
    done.touch()
    return place


def _stub(site: Path) -> None:
    """Give torch's libraries the CUDA libraries that they name, with the symbols and versions."""
    libraries = sorted((site / "torch" / "lib").glob("*.so*"))
    needed: set[str] = set()
    # by library and version; what names no version may be anyone's
    wanted: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    loose: set[str] = set()
    defined: set[str] = set()
    for path in [*libraries, site / RUNTIME]:
        with path.open("rb") as raw:
            elf = ELFFile(raw)
            for section in elf.iter_sections():
                if isinstance(section, DynamicSection):
                    tags = section.iter_tags("DT_NEEDED")
                    needed |= {str(tag.needed) for tag in tags}  # type: ignore[attr-defined]
            for name, library, version in _symbols(elf):
                if library is None:
                    defined.add(name)
                elif library:
                    wanted[library][version].add(name)
                else:
                    loose.add(name)
    here = {p.name for p in libraries} | {Path(RUNTIME).name}
    missing = sorted(n for n in needed - here if not n.startswith((*_SYSTEM, *_DRIVER)))
    unversioned = sorted(s for s in loose - defined if s.startswith(_CUDA))
    taken: set[str] = set()
    for number, name in enumerate(missing):
        source, script = site / "nvidia" / "stub.c", site / "nvidia" / "stub.map"
        symbols = {s for names in wanted[name].values() for s in names}
        symbols |= set(unversioned if number == 0 else ())
        symbols |= set(_NAMED.get(name, ()))
        symbols -= taken
        taken |= symbols
        source.write_text("".join(f"int {s}(void) {{ return 100; }}\n" for s in sorted(symbols)))
        script.write_text("".join(
            f"{version} {{ global: {' '.join(f'{s};' for s in sorted(names))} }};\n"
            for version, names in sorted(wanted[name].items())
        ))  # fmt: skip
        versioned = [f"-Wl,--version-script={script}"] if wanted[name] else []
        target = site / "nvidia" / "cu13" / "lib" / name
        subprocess.run(
            [GCC, "-shared", "-nostdlib", "-fPIC", "-w", f"-Wl,-soname,{name}", *versioned,
             "-o", str(target), str(source)],
            check=True,
        )  # fmt: skip


def _symbols(elf: ELFFile) -> Iterator[tuple[str, str | None, str]]:
    """Symbols with the library (``None``: defined here; empty: anyone's) and version they name."""
    table = elf.get_section_by_name(".dynsym")
    numbers = elf.get_section_by_name(".gnu.version")
    needs = elf.get_section_by_name(".gnu.version_r")
    assert isinstance(table, SymbolTableSection)
    for place, symbol in enumerate(table.iter_symbols()):
        if not symbol.name:
            continue
        if symbol["st_shndx"] != "SHN_UNDEF":
            yield symbol.name, None, ""
            continue
        number = numbers.get_symbol(place)["ndx"] if isinstance(numbers, GNUVerSymSection) else 0
        found = (
            needs.get_version(number)
            if isinstance(needs, GNUVerNeedSection) and isinstance(number, int)
            else None
        )
        yield symbol.name, found[0].name if found else "", found[1].name if found else ""
