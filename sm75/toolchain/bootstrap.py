"""The ``bootstrap`` toolchain: a local channel made of the lock's wheels and of the system's compiler.

Its packages carry the names that conda-forge uses wherever conda-forge has them, so that the recipe
does not know which provider it is built with.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from sm75 import atomic, channel
from sm75.condapkg import FileSource, write_conda
from sm75.lockfile import Artifact, ReleaseLock, artifacts_for
from sm75.progress import Reporter
from sm75.store import Store
from sm75.toolchain import host
from sm75.wheels import Options, convert_with

# Raise it when the same inputs would give other packages.
LAYOUT_VERSION = 1

_CU = "nvidia/cu13"
_TARGET = "targets/sbsa-linux"

Rules = tuple[tuple[str, str | None], ...]


@dataclass(frozen=True, kw_only=True)
class Component:
    """How one artifact of the lock becomes a package.

    Attributes:
        name: Conda name.
        side: ``build``: runs on the build machine; ``host``: belongs to the target; ``python``: a
            Python package for the build environment.
        layout: Where the wheel's members go; see ``sm75.wheels.Options``.
        links: Symbolic links to add, by path in the prefix.
    """

    name: str
    side: str
    layout: Rules = ()
    links: Mapping[str, str] = field(default_factory=dict)


_HEADERS: Rules = ((f"{_CU}/include/**", f"{_TARGET}/include/{{0}}"),)

# By artifact id, without the ``-<platform>`` suffix of those that depend on the build platform.
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
    ),
    "vllm-rs": Component(
        name="vllm-rs-prebuilt", side="host", layout=(("vllm/vllm-rs", "share/vllm-rs/vllm-rs"),)
    ),
    "jinja2": Component(name="jinja2", side="python"),
    "markupsafe": Component(name="markupsafe", side="python"),
    "unidiff": Component(name="unidiff", side="python"),
}


@dataclass(frozen=True, kw_only=True)
class Bootstrap:
    """The provider: what the system contributes, and the channel to make.

    Attributes:
        build_platform: Where the tools run.
        target_platform: What they build for.
        compiler: The system's compiler for the target.
        headers: The Python headers.
    """

    build_platform: str
    target_platform: str
    compiler: host.Compiler
    headers: host.PythonHeaders

    name = "bootstrap"

    @classmethod
    def detect(
        cls, build_platform: str, target_platform: str, *, install: bool = True
    ) -> Bootstrap:
        """Look at the system.

        Raises:
            ToolchainError: A compiler or the Python headers are missing or unsuitable.
        """
        return cls(
            build_platform=build_platform,
            target_platform=target_platform,
            compiler=host.find_compiler(target_platform, install=install),
            headers=host.python_headers(install=install),
        )

    def describe(self) -> dict[str, str]:
        """Facts for provenance: what the system contributes."""
        return {
            "provider": self.name,
            "compiler": f"{self.compiler.cxx.name} {self.compiler.version}",
            "compiler_digest": self.compiler.digest,
            "python_headers": self.headers.version,
            "python_headers_digest": self.headers.digest,
        }

    def digest(self, lock: ReleaseLock) -> str:
        """sha256 over everything that the channel is made of."""
        inputs = {
            "layout": LAYOUT_VERSION,
            "build": self.build_platform,
            "target": self.target_platform,
            "artifacts": sorted(a.stored_sha256 for a in self._artifacts(lock)),
            **self.describe(),
        }
        return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()

    def _artifacts(self, lock: ReleaseLock) -> list[Artifact]:
        wanted = artifacts_for(lock, self.build_platform, "prebuilt")
        return [a for a in wanted if self._key(a) in COMPONENTS and self._fits(a)]

    def _key(self, artifact: Artifact) -> str:
        key = artifact.id.removesuffix(f"-{self.build_platform}")
        return "markupsafe" if key.startswith("markupsafe-") else key

    def _fits(self, artifact: Artifact) -> bool:
        """Whether an artifact is for this Python, where it is for one."""
        if not artifact.id.startswith("markupsafe-"):
            return True
        return artifact.id.startswith(f"markupsafe-cp{self._python.replace('.', '')}-")

    @property
    def _python(self) -> str:
        return ".".join(self.headers.version.split(".")[:2])

    def make_channel(
        self, lock: ReleaseLock, store: Store, directory: Path, reporter: Reporter
    ) -> Path:
        """Make the channel, unless it is there already.

        Args:
            lock: The release lock; its artifacts must be in the store.
            store: The store.
            directory: Where channels are made; this one gets a subdirectory named by its digest.
            reporter: Shows progress.

        Returns:
            The channel's root.

        Raises:
            FetchError: An artifact is not in the store.
            ChannelError: A wheel does not have the layout that it is expected to have.
            DiskError: The channel cannot be written.
        """
        final = directory / self.digest(lock)[:16]
        if (final / "noarch" / "repodata.json").is_file():
            return final
        with atomic.directory(final) as scratch:
            artifacts = self._artifacts(lock)
            task = reporter.task("toolchain", len(artifacts), "packages")
            for artifact in artifacts:
                self._convert(artifact, store.get(artifact), scratch)
                task.advance(1)
            self._write_adapters(scratch)
            channel.index(scratch)
            task.done()
        return final

    def _convert(self, artifact: Artifact, wheel: Path, out: Path) -> None:
        component = COMPONENTS[self._key(artifact)]
        if component.side == "python":
            convert_with(wheel, out, Options(subdir=self.build_platform, python=self._python))
            return
        convert_with(
            wheel,
            out,
            Options(
                subdir=self.build_platform if component.side == "build" else self.target_platform,
                python=None,
                name=component.name,
                version=artifact.version,
                layout=component.layout,
                extra_files={k: FileSource.symlink(v) for k, v in component.links.items()},
            ),
        )

    def _write_adapters(self, out: Path) -> None:
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
                )
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
        interpreter = host.base_python()
        # Started under a name inside the prefix, CPython takes pyvenv.cfg there for its own, as in
        # any virtual environment.
        wrapper = f'#!/bin/bash\nexec -a "${{BASH_SOURCE[0]}}" {shlex.quote(str(interpreter))} "$@"\n'
        config = f"home = {interpreter.parent}\ninclude-system-site-packages = false\n"
        write_conda(
            out,
            name="python",
            version=self.headers.version,
            build=f"system_{self.headers.digest[:8]}_cpython",
            subdir=self.build_platform,
            files={
                f"bin/python{python}": FileSource.from_bytes(wrapper.encode(), executable=True),
                "bin/python": FileSource.symlink(f"python{python}"),
                "bin/python3": FileSource.symlink(f"python{python}"),
                "pyvenv.cfg": FileSource.from_bytes(config.encode()),
                f"lib/python{python}/site-packages/README": FileSource.from_bytes(b""),
            },
            about={"summary": "adapter for the system's Python"},
        )
        if self.target_platform != self.build_platform:
            # Only its version counts: it says where Python packages go.
            write_conda(
                out,
                name="python",
                version=self.headers.version,
                build="0_cpython",
                subdir=self.target_platform,
                files={},
                about={"summary": "stands for the target's Python while cross-building"},
            )
        write_conda(
            out,
            name="python-headers",
            version=self.headers.version,
            build=self.headers.digest[:8],
            subdir=self.target_platform,
            files={
                f"include/python{python}/{name}": FileSource.from_bytes(data)
                for name, data in self.headers.files.items()
            },
            about={"summary": "C headers of Python, for extensions of the stable ABI"},
        )

    def _nvcc_version(self, out: Path) -> str:
        package = next((out / self.build_platform).glob("cuda-nvcc-tools-*.conda"))
        return package.name.split("-")[3]
