"""The ``bootstrap`` toolchain: a local channel of the lock's wheels and the system's compiler.

Its packages carry the names that conda-forge uses wherever conda-forge has them, so that the recipe
does not know which provider it is built with.
"""

from __future__ import annotations

import hashlib
import json
import shlex
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from sm75 import atomic, channel
from sm75.condapkg import FileSource, write_conda
from sm75.lockfile import G5G, PROOFS, Artifact, ReleaseLock, artifacts_for
from sm75.progress import Reporter
from sm75.store import Store
from sm75.toolchain import host
from sm75.wheels import CONVERTER_VERSION, Options, convert_with

# Raise it when the same inputs would give other packages.
LAYOUT_VERSION = 2

_CU = "nvidia/cu13"
# Where a toolkit keeps what belongs to the target, with CUDA's name for the platform.
_TARGET = "targets/TRIPLET"
_TRIPLETS = {G5G: "sbsa-linux", PROOFS: "x86_64-linux"}

Rules = tuple[tuple[str, str | None], ...]


@dataclass(frozen=True, kw_only=True)
class Component:
    """How one artifact of the lock becomes a package.

    Attributes:
        name: Conda name.
        side: ``build``: runs on the build machine; ``host``: belongs to the target; ``python``: a
            Python package for the build environment.
        layout: Where the wheel's members go; see ``sm75.wheels.Options``.
        elsewhere: Other layouts, by the project that the artifact is from.
        links: Symbolic links to add, by path in the prefix.
        portable: Sources for every platform, whatever the wheel's tag says.
    """

    name: str
    side: str
    layout: Rules = ()
    elsewhere: Mapping[str, Rules] = field(default_factory=dict)
    links: Mapping[str, str] = field(default_factory=dict)
    portable: bool = False


_HEADERS: Rules = ((f"{_CU}/include/**", f"{_TARGET}/include/{{0}}"),)

# By artifact id, without the ``-<platform>`` suffix of those that depend on the build platform and
# the ``-for-<target>`` suffix of those that depend on the target.
COMPONENTS: dict[str, Component] = {
    "cmake": Component(
        name="cmake", side="build", layout=(("cmake/data/**", "{0}"), ("cmake/**", None))
    ),
    "ninja": Component(
        name="ninja",
        side="build",
        layout=(("ninja-*.data/scripts/ninja", "bin/ninja"), ("ninja/**", None)),
    ),
    "ccache": Component(
        name="ccache",
        side="build",
        layout=(("*.data/scripts/ccache", "bin/ccache"), ("*.data/data/**", "{1}")),
    ),
    "cuda-nvcc": Component(
        name="cuda-nvcc-tools", side="build", layout=((f"{_CU}/bin/**", "bin/{0}"), *_HEADERS)
    ),
    "cuda-nvvm": Component(
        name="cuda-nvvm-tools",
        side="build",
        layout=((f"{_CU}/nvvm/**", "nvvm/{0}"), (f"{_CU}/**", None)),
    ),
    "cuda-cudart": Component(
        name="cuda-cudart-dev",
        side="host",
        layout=(*_HEADERS, (f"{_CU}/lib/**", f"{_TARGET}/lib/{{0}}")),
        links={f"{_TARGET}/lib/libcudart.so": "libcudart.so.13"},
    ),
    "cuda-crt": Component(name="cuda-crt-dev", side="host", layout=_HEADERS),
    "cuda-cccl": Component(
        name="cuda-cccl", side="host", layout=(*_HEADERS, (f"{_CU}/cuda_cccl/**", None))
    ),
    "cublas-dev": Component(name="libcublas-headers", side="host", layout=_HEADERS),
    "torch-dev": Component(
        name="torch-dev", side="host", layout=(("torch/**", "share/torch-dev/torch/{0}"),)
    ),
    "cutlass": Component(
        name="cutlass-headers",
        side="host",
        layout=(("vllm/third_party/fmha_sm100/cutlass/**", "share/cutlass/{0}"),),
        elsewhere={
            "flashinfer-python": (("flashinfer/data/cutlass/**", "share/cutlass/{0}"),),
        },
        portable=True,
    ),
    "vllm-rs": Component(
        name="vllm-rs-prebuilt", side="host", layout=(("vllm/vllm-rs", "share/vllm-rs/vllm-rs"),)
    ),
    "jinja2": Component(name="jinja2", side="python"),
    "markupsafe": Component(name="markupsafe", side="python"),
    "unidiff": Component(name="unidiff", side="python"),
}


class Bootstrap:
    """The provider: what the system contributes, and the channel to make.

    Args:
        directory: Where channels are made; each is named by the digest of what it is made of.
        reporter: Shows progress.
        install: Whether a missing compiler may be installed (Debian and Ubuntu, as root).
    """

    name = "bootstrap"

    def __init__(self, directory: Path, reporter: Reporter, *, install: bool = True) -> None:
        self.directory = directory
        self.reporter = reporter
        self.install = install

    def describe(self) -> str:
        """Say in one line what it is and what it needs."""
        return "bootstrap: tools from the lock's wheels, the system's GCC and Python headers"

    def identity(
        self, lock: ReleaseLock, build_platform: str, target_platform: str
    ) -> dict[str, str]:
        """Everything that decides what is built, for the input hash and the provenance.

        Raises:
            ToolchainError: A compiler or the Python headers are missing or unsuitable.
        """
        return self._system(build_platform, target_platform).facts()

    def rust(self, lock: ReleaseLock, build_platform: str, target_platform: str) -> str:
        """Why it cannot compile the Rust frontend: no index of wheels has a Rust compiler."""
        return f"it needs Rust {lock.rust.channel}, which the bootstrap provider does not have"

    def channels(
        self, lock: ReleaseLock, store: Store, build_platform: str, target_platform: str
    ) -> list[str]:
        """Make the channel, unless it is there already.

        Args:
            lock: The release lock; its artifacts must be in the store.
            store: The store.
            build_platform: Conda subdir of this machine.
            target_platform: Conda subdir of the package.

        Returns:
            Its URL.

        Raises:
            FetchError: An artifact is not in the store.
            ToolchainError: A compiler or the Python headers are missing or unsuitable.
            ChannelError: A wheel does not have the layout that it is expected to have.
            DiskError: The channel cannot be written.
        """
        system = self._system(build_platform, target_platform)
        return [
            _channel(
                self.directory,
                self.reporter,
                store,
                system.platforms,
                system.platforms.artifacts(
                    lock, store, frozenset(c.name for c in COMPONENTS.values())
                ),
                system.facts() | system.places(),
                system.write_adapters,
            )
        ]

    def _system(self, build_platform: str, target_platform: str) -> _System:
        return _System(
            build_platform=build_platform,
            target_platform=target_platform,
            compiler=host.find_compiler(target_platform, install=self.install),
            headers=host.python_headers(install=self.install),
        )


def target_channel(
    directory: Path,
    reporter: Reporter,
    lock: ReleaseLock,
    store: Store,
    build_platform: str,
    target_platform: str,
    names: frozenset[str],
) -> str:
    """Make a channel of some of the lock's packages only, without anything of the system's.

    Args:
        directory: Where channels are made.
        reporter: Shows progress.
        lock: The release lock.
        store: The store.
        build_platform: Conda subdir of this machine.
        target_platform: Conda subdir of the package.
        names: Conda names of the packages.

    Returns:
        Its URL.

    Raises:
        FetchError: An artifact is not in the store.
        ChannelError: A wheel does not have the layout that it is expected to have.
        DiskError: The channel cannot be written.
    """
    platforms = _Platforms(build=build_platform, target=target_platform, python="")
    artifacts = platforms.artifacts(lock, store, names)
    return _channel(directory, reporter, store, platforms, artifacts, {}, lambda _: None)


def _channel(
    directory: Path,
    reporter: Reporter,
    store: Store,
    platforms: _Platforms,
    artifacts: list[Artifact],
    facts: dict[str, str],
    adapters: Callable[[Path], None],
) -> str:
    inputs = {
        "layout": f"{LAYOUT_VERSION}.{CONVERTER_VERSION}",
        "artifacts": sorted(a.stored_sha256 for a in artifacts),
        **facts,
    }
    key = hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:16]
    final = directory / key
    if final.is_dir() and (faults := channel.verify_channel(final)):
        reporter.line(f"toolchain: {faults[0]}; making it anew")
        shutil.rmtree(final)
    if not final.is_dir():
        with atomic.directory(final) as scratch:
            task = reporter.task("toolchain", len(artifacts), "packages")
            for artifact in artifacts:
                platforms.convert(artifact, store.get(artifact), scratch)
                task.advance(1)
            adapters(scratch)
            channel.index(scratch)
            task.done()
    return final.absolute().as_uri()


@dataclass(frozen=True, kw_only=True)
class _Platforms:
    """Where tools run, what is built for, and the Python minor (empty: no Python packages)."""

    build: str
    target: str
    python: str

    def artifacts(self, lock: ReleaseLock, store: Store, names: frozenset[str]) -> list[Artifact]:
        # Nobody fetches the Rust binary for a build without it.
        wanted = [
            a
            for a in artifacts_for(lock, self.build, "prebuilt", self.target)
            if a.role != "prebuilt" or store.has(a)
        ]
        return [
            a
            for a in wanted
            if (component := COMPONENTS.get(self._key(a)))
            and component.name in names
            and self._fits(a)
        ]

    def _key(self, artifact: Artifact) -> str:
        key = artifact.id.removesuffix(f"-for-{self.target}").removesuffix(f"-{self.build}")
        return "markupsafe" if key.startswith("markupsafe-") else key

    def _fits(self, artifact: Artifact) -> bool:
        """Whether an artifact is for this Python, where it is for one."""
        if not artifact.id.startswith("markupsafe-"):
            return True
        return artifact.id.startswith(f"markupsafe-cp{self.python.replace('.', '')}-")

    def convert(self, artifact: Artifact, wheel: Path, out: Path) -> None:
        component = COMPONENTS[self._key(artifact)]
        if component.side == "python":
            convert_with(wheel, out, Options(subdir=self.build, python=self.python))
            return
        layout = component.elsewhere.get(artifact.project, component.layout)
        convert_with(
            wheel,
            out,
            Options(
                subdir=self.build if component.side == "build" else self.target,
                python=None,
                name=component.name,
                version=artifact.version,
                noarch="generic" if component.portable else None,
                layout=tuple((glob, to and self._place(to)) for glob, to in layout),
                extra_files={
                    self._place(path): FileSource.symlink(to)
                    for path, to in component.links.items()
                },
            ),
        )

    def _place(self, path: str) -> str:
        """A path in the prefix, with the target's own directory."""
        return path.replace(_TARGET, f"targets/{_TRIPLETS[self.target]}")


@dataclass(frozen=True, kw_only=True)
class _System:
    """A pair of platforms, and what this machine has for it."""

    build_platform: str
    target_platform: str
    compiler: host.Compiler
    headers: host.PythonHeaders

    @property
    def platforms(self) -> _Platforms:
        return _Platforms(
            build=self.build_platform, target=self.target_platform, python=self._python
        )

    @property
    def _python(self) -> str:
        return ".".join(self.headers.version.split(".")[:2])

    def facts(self) -> dict[str, str]:
        return {
            "provider": Bootstrap.name,
            "layout": f"{LAYOUT_VERSION}.{CONVERTER_VERSION}",
            "build_platform": self.build_platform,
            "target_platform": self.target_platform,
            "compiler": f"{self.compiler.cxx.name} {self.compiler.version}",
            "compiler_digest": self.compiler.digest,
            "python_headers": self.headers.version,
            "python_headers_digest": self.headers.digest,
        }

    def places(self) -> dict[str, str]:
        """Where the adapters point: it decides which channel serves, not what is built."""
        compiler = self.compiler
        paths = {"cxx": compiler.cxx, "cc": compiler.cc, "strip": compiler.strip,
                 "interpreter": host.base_python(), **compiler.programs}  # fmt: skip
        return {name: str(path) for name, path in paths.items()}

    def write_adapters(self, out: Path) -> None:
        compiler, python = self.compiler, self._python
        activate = "".join(
            f"export {key}={shlex.quote(str(value))}\n"
            for key, value in (
                ("CC", compiler.cc),
                ("CXX", compiler.cxx),
                ("STRIP", compiler.strip),
                ("CUDAHOSTCXX", compiler.cxx),
            )
        )
        short = compiler.digest[:8]
        write_conda(
            out,
            name=f"gxx_{self.target_platform}",
            version=compiler.version,
            build=f"system_{short}",
            subdir=self.build_platform,
            files={
                f"etc/conda/activate.d/gxx_{self.target_platform}.sh": FileSource.from_bytes(
                    activate.encode()
                ),
                **{f"bin/{name}": starter(path) for name, path in compiler.programs.items()},
            },
            about={"summary": "adapter for the system's GCC"},
        )
        write_conda(
            out,
            name="cuda-nvcc",
            version=self._nvcc_version(out),
            build="0",
            subdir=self.build_platform,
            files={},
            depends=["cuda-nvcc-tools", "cuda-nvvm-tools"],
            about={"summary": "nvcc and what it runs"},
        )
        headers = {
            f"include/python{python}/{name}": FileSource.from_bytes(data)
            for name, data in self.headers.files.items()
        }
        crossing = self.target_platform != self.build_platform
        # The headers serve the stable ABI, whatever Python the package is installed with.
        for subdir, files in (
            ((self.build_platform, self._interpreter()), (self.target_platform, headers))
            if crossing
            else ((self.build_platform, {**self._interpreter(), **headers}),)
        ):
            write_conda(
                out,
                name="python",
                version=self.headers.version,
                build=f"system_{self.headers.digest[:8]}_cpython",
                subdir=subdir,
                files=files,
                about={"summary": "adapter for the system's Python"},
            )

    def _interpreter(self) -> dict[str, FileSource]:
        interpreter, python = host.base_python(), self._python
        # Started under a name inside the prefix, CPython takes pyvenv.cfg there for its own, as in
        # any virtual environment.
        wrapper = (
            f'#!/bin/bash\nexec -a "${{BASH_SOURCE[0]}}" {shlex.quote(str(interpreter))} "$@"\n'
        )
        config = f"home = {interpreter.parent}\ninclude-system-site-packages = false\n"
        return {
            f"bin/python{python}": FileSource.from_bytes(wrapper.encode(), executable=True),
            "bin/python": FileSource.symlink(f"python{python}"),
            "bin/python3": FileSource.symlink(f"python{python}"),
            "pyvenv.cfg": FileSource.from_bytes(config.encode()),
            f"lib/python{python}/site-packages/README": FileSource.from_bytes(b""),
        }

    def _nvcc_version(self, out: Path) -> str:
        package = next((out / self.build_platform).glob("cuda-nvcc-tools-*.conda"))
        return package.name.split("-")[3]


def starter(program: Path) -> FileSource:
    """Starts a program of this machine. Its hash is there for compiler caches, which read this."""
    digest = hashlib.sha256(program.read_bytes()).hexdigest()
    text = f'#!/bin/sh\n# sha256 {digest}\nexec {shlex.quote(str(program))} "$@"\n'
    return FileSource.from_bytes(text.encode(), executable=True)
