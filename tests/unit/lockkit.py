"""A project and a package index in small, to make locks in."""

from __future__ import annotations

import gzip
import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path

from sm75 import lockupdate
from sm75.progress import SilentReporter
from sm75.store import Store
from tests.unit.badserver import BadServer
from tests.unit.fetchkit import HASTY, index_of
from tests.unit.projectkit import ROOT
from tests.unit.treekit import FILES, sdist
from tests.unit.wheelkit import make_wheel

# What lockcheck asks of every release; the small tree has these.
EXTENSIONS = ("_C_stable", "spinloop")
CUTLASS = "#define CUTLASS_MAJOR 4\n#define CUTLASS_MINOR 7\n#define CUTLASS_PATCH {}\n"
REQUIRES = ("transformers<5.21.0,>=5.16.1", "torch==2.14.0", "tqdm")
POLICY = """\
schema = 1
target = "box"
rust = { modes = ["prebuilt", "none"], default = "prebuilt" }

[[artifact]]
id = "vllm-sdist"
project = "vllm"
version = "release"
pattern = "*.tar.gz"
role = "source"
why = "the sources"

[[artifact]]
id = "vllm-rs"
project = "vllm"
version = "release"
pattern = "*_aarch64.whl"
role = "prebuilt"
targets = ["linux-aarch64"]
why = "Rust"
members = ["vllm/vllm-rs"]

[[artifact]]
id = "cutlass"
project = "vllm"
version = "release"
pattern = "*_aarch64.whl"
role = "source"
why = "headers"
provides = "v4.7.1"
members = ["vllm/cutlass/**"]
declared = { CUTLASS_REVISION = "v4.7.1" }

[[artifact]]
id = "torch-dev"
project = "torch"
version = "torch"
pattern = "*_{arch}.whl"
role = "target"
each = "target"
why = "headers"
members = ["torch/include/**"]

[[artifact]]
id = "cuda-nvcc"
project = "nvidia-cuda-nvcc"
version = "toolkit"
pattern = "*_{arch}.whl"
role = "toolchain"
each = "build"
why = "nvcc"

[[artifact]]
id = "speedups-{python}"
project = "speedups"
version = ">=3,<4"
pattern = "*-{python}-{python}-*_{arch}.whl"
role = "toolchain"
each = "build"
pythons = ["cp311", "cp312"]
why = "speed"

[[substitution]]
name = "TORCH_SUPPORTED_VERSION_CUDA"
used = "{torch}"
reason = "the target's is {target_torch}"
covers = ["requirement:torch"]

[[substitution]]
name = "requirement:torchvision"
used = "left to the target"
reason = "for {target_torch}, not {declared_torch}"

[[substitution]]
name = "requirement:torchaudio"
used = "left to the target"
reason = "as torch"

[[substitution]]
name = "requirement:flashinfer-python"
used = "left out"
reason = "needs 8.0"

[[substitution]]
name = "gcc:cuda"
used = "11.3"
reason = "only deep needs more"
patch = "1.patch"

[[substitution]]
name = "external:deep"
used = "not built"
reason = "9.0 only"
covers = ["extension:vllm._deep_C", "target:_deep_C", "target:_gone_C"]
patch = "1.patch"
"""
OMISSIONS = """\
# Requirements of vLLM that the closure leaves out.
schema = 1
torch = []

[[omit]]
project = "torch"
imports = ["torch"]
provided = true
reason = "the image's"

[[omit]]
project = "gadget"
imports = ["gadget"]
reason = "only some releases require it"
"""
TARGET = """\
name = "box"
torch = "2.12.0+cu132"
torch_arches = ["sm_75"]
cuda = "13.2"
python = ["3.12"]
glibc = "2.39"
driver = "595.71.05"
path = "/opt/pytorch"
standing = "published"
sources = ["a test"]
"""
PATCH = """\
--- a/setup.py
+++ b/setup.py
@@ -1,2 +1,3 @@
 def _is_cuda():
+    # ours
     return True
"""


class World:
    """A project's directory and the index that its locks are made from.

    Attributes:
        root: The project.
        server: The index.
        store: The store.
        said: What was told while a lock was made.
    """

    def __init__(self, root: Path, server: BadServer) -> None:
        self.root = root / "project"
        self.server = server
        self.store = Store(root / "store")
        self.said: list[str] = []
        self._wheels = root / "wheels"
        self._write("lock/policy.toml", POLICY)
        self._write("lock/omissions.toml", OMISSIONS)
        self._write("lock/targets/box.toml", TARGET)
        self._write("lock/constraints.toml", (ROOT / "lock" / "constraints.toml").read_text())
        recipe = self.root / "recipes" / "vllm-sm75" / "recipe.yaml"
        recipe.parent.mkdir(parents=True)
        shutil.copyfile(ROOT / "recipes" / "vllm-sm75" / "recipe.yaml", recipe)
        for arch in ("x86_64", "aarch64"):
            for torch in ("2.12.0", "2.14.0"):
                self.wheel(
                    "torch", torch, f"cp312-cp312-manylinux_2_28_{arch}",
                    {"torch/include/x.h": b"torch"},
                    metadata='Requires-Dist: triton==3.7.0; platform_system == "Linux"',
                )  # fmt: skip
            for nvcc in ("13.2.78", "13.2.86"):
                self.wheel("nvidia-cuda-nvcc", nvcc, f"py3-none-manylinux2014_{arch}", {"x": b"x"})
            for version in ("3.0.3", "3.0.4"):
                for python in ("cp311", "cp312"):
                    tag = f"{python}-{python}-manylinux2014_{arch}"
                    self.wheel("speedups", version, tag, {"x": b"x"})
        for patch, nvcc in (("1", "13.2.78"), ("2", "13.2.86")):
            self.wheel(
                "cuda-toolkit", f"13.2.{patch}", "py3-none-any", {},
                metadata=f'Requires-Dist: nvidia-cuda-nvcc=={nvcc}.*; extra == "nvcc"',
            )  # fmt: skip
        self.release("0.33.0")
        self.patches("0.33.0")

    def _write(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def edit(self, name: str, old: str, new: str) -> None:
        """Replace text that stands once in a file of the project."""
        text = (self.root / name).read_text()
        assert text.count(old) == 1, (old, text.count(old))
        self._write(name, text.replace(old, new))

    def wheel(
        self, project: str, version: str, tag: str, files: dict[str, bytes], metadata: str = ""
    ) -> None:
        """Put a wheel on the index."""
        path = make_wheel(
            self._wheels, project=project, version=version, tag=tag, files=files, metadata=metadata
        )
        self.server.files[f"{project}/{path.name}"] = path.read_bytes()

    def release(
        self,
        version: str,
        requires: tuple[str, ...] = REQUIRES,
        edit: Callable[[dict[str, str]], None] = lambda files: None,
        cutlass_patch: str = "1",
    ) -> None:
        """Put a vLLM release on the index; ``edit`` changes its tree."""
        files = dict(FILES)
        files["PKG-INFO"] = f"Metadata-Version: 2.4\nName: vllm\nVersion: {version}\n" + "".join(
            f"Requires-Dist: {line}\n" for line in requires
        )
        edit(files)
        path = self._wheels / f"vllm-{version}.tar.gz"
        self._wheels.mkdir(exist_ok=True)
        sdist(path, files)
        # The same tree must be the same file whenever it is written.
        content = gzip.compress(gzip.decompress(path.read_bytes()), mtime=0)
        self.server.files[f"vllm/{path.name}"] = content
        headers = CUTLASS.format(cutlass_patch).encode()
        self.wheel(
            "vllm", version, "cp38-abi3-manylinux_2_28_aarch64",
            {"vllm/vllm-rs": b"rust", "vllm/cutlass/include/cutlass/version.h": headers},
        )  # fmt: skip

    def patches(self, release: str, patch: str = PATCH) -> None:
        """Give a release a series of one patch."""
        folder = self.root / "patches" / release
        folder.mkdir(parents=True)
        (folder / "1.patch").write_text(patch)
        digest = hashlib.sha256(patch.encode()).hexdigest()
        (folder / "series.toml").write_text(
            f'schema = 1\nrelease = "{release}"\n[[patch]]\nfile = "1.patch"\nsha256 = "{digest}"\n'
            'purpose = "x"\nproof = "x"\n[[patch.drop_when]]\nfile = "setup.py"\nabsent = "CUDA"\n'
        )

    def lock(self, vllm: str, **request: object) -> lockupdate.Outcome:
        """Make a lock, without the closure."""
        return lockupdate.update(
            self.root,
            lockupdate.Request(vllm=vllm, with_closure=False, **request),  # type: ignore[arg-type]
            self.store,
            SilentReporter(),
            index=index_of(self.server),
            options=HASTY,
            say=self.said.append,
        )

    def files(self) -> dict[str, bytes]:
        """Everything below lock/ and the recipe, by path."""
        paths = [*(self.root / "lock").rglob("*"), *(self.root / "recipes").rglob("*")]
        return {
            path.relative_to(self.root).as_posix(): path.read_bytes()
            for path in sorted(paths)
            if path.is_file()
        }
