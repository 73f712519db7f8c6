"""``vllm-sm75-kernels``: the conda package of the kernels."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from sm75 import atomic, channel, condapkg, onebuild, sbom
from sm75.aot import check, lower, manifest, pack, proofs, tools
from sm75.aot.files import MODULE
from sm75.aot.pack import Compiled
from sm75.errors import ChannelError, CheckFailed
from sm75.lockfile import ReleaseLock
from sm75.progress import Reporter
from sm75.smem import trees
from sm75.store import Store, hash_file

NAME = "vllm-sm75-kernels"


@dataclass(frozen=True, kw_only=True)
class Made:
    """What was compiled.

    Attributes:
        package: The ``.conda``; None where only the files were asked for.
        packed: Variants in it.
        unknown: Variants left out, of which nothing is known.
        wrong: Variants left out, which were wrong.
        withdrawn: Packages of the channel whose place it took, as ``subdir/file``.
    """

    package: Path | None
    packed: list[Compiled]
    unknown: list[Compiled]
    wrong: list[Compiled]
    withdrawn: tuple[str, ...] = ()


@contextmanager
def patched(root: Path, lock: ReleaseLock, store: Store) -> Iterator[Path]:
    """The patched modules of a release."""
    with tempfile.TemporaryDirectory(prefix="sm75-tree-") as scratch:
        series = trees.python_series(root / "patches" / lock.vllm)
        trees.from_sdist(store.get(lock.artifact("vllm-sdist")), Path(scratch), series=series)
        yield Path(scratch)


def compile_files(
    root: Path, lock: ReleaseLock, store: Store, home: Path, reporter: Reporter, *,
    unproved: bool = False, jobs: int | None = None,
) -> Made:  # fmt: skip
    """Compile all variants, and write the files of the package.

    Args:
        root: The project's directory.
        lock: The release lock.
        store: Where sdist and toolkit are.
        home: Directory to write, of the module's name.
        reporter: Shows the compilation.
        unproved: Pack also what nothing is known of, to prove it.
        jobs: Processes; default: as many as cores.

    Raises:
        ToolchainError: This machine cannot compile them.
        BuildError: A variant does not compile.
        DiskError: There is no room.
    """
    found = tools.ensure(root, lock, store)
    with patched(root, lock, store) as tree:
        compiled = lower.compile_all(
            root, tree, manifest.load(root), found, root / ".sm75" / "kernels", reporter, jobs=jobs
        )
        sources = lower.sources(tree)
    proved, unknown, wrong = proofs.sort(compiled, proofs.load(root))
    packed = [one for one in compiled if unproved or one in proved]
    about = {
        "vllm": lock.vllm, "triton": found.triton, "ptxas": found.toolkit, "target": "sm_75",
        "proved": sum(one in proved for one in packed),
    }  # fmt: skip
    pack.write(home, packed, about, sources)
    return Made(package=None, packed=packed, unknown=unknown, wrong=wrong)


def build(
    root: Path, lock: ReleaseLock, store: Store, place: Path, reporter: Reporter,
    say: Callable[[str], None],
) -> Made:  # fmt: skip
    """Build the package of the proved variants and publish it into a channel.

    The same lock, patches, manifest and proofs give the same bytes.

    Args:
        root: The project's directory.
        lock: The release lock.
        store: Where sdist and toolkit are.
        place: The channel.
        reporter: Shows the compilation.
        say: Told that there is a wait.

    Raises:
        CheckFailed: No variant is proved.
        Sm75Error: As of ``compile_files`` and ``channel.publish``.
    """
    with tempfile.TemporaryDirectory(prefix="sm75-kernels-") as scratch:
        site = Path(scratch, "site")
        made = compile_files(root, lock, store, site / MODULE, reporter)
        if not made.packed:
            raise CheckFailed(
                f"no kernel for vLLM {lock.vllm} has been proved",
                why=f"{proofs.FILE} has none of the {len(made.unknown)} that were compiled",
                fix="prove them on any newer NVIDIA GPU: docs/turing-attention.md, ahead of time",
            )
        files = condapkg.tree(site, dest="site-packages")
        content = hashlib.sha256()
        for path in sorted(site.rglob("*")):
            if path.is_file():
                content.update(path.name.encode() + b"\0" + path.read_bytes())
        package = condapkg.write_conda(
            Path(scratch, "channel"), name=NAME, version=lock.vllm,
            build=f"h{content.hexdigest()[:12]}_0", subdir="noarch", files=files,
            depends=["python >=3.11", f"vllm-sm75 {lock.vllm}.*"], noarch="python",
            about={
                "summary": "vLLM's Triton attention kernels as machine code for sm_75, with "
                "Turing's tensor cores",
                "extra": {"kernels": len(made.packed)},
            },
            license="Apache-2.0",
            license_files={
                "LICENSE": condapkg.FileSource.from_path(root / "LICENSE", executable=False)
            },
        )  # fmt: skip
        published, withdrawn = _publish(root, lock, place, package, say)
    return replace(made, package=published, withdrawn=withdrawn)


def _publish(
    root: Path, lock: ReleaseLock, place: Path, package: Path, say: Callable[[str], None]
) -> tuple[Path, tuple[str, ...]]:
    """Publish it alone: another build of the release would be as good for a solver."""
    rivals = onebuild.Rivals(place, [package])
    (published,) = channel.publish(
        [package], place, say=say, remove=rivals,
        derived={sbom.SBOM: lambda tree: sbom.make(tree, root, lock)},
    )  # fmt: skip
    return published, rivals.found


RECORD = Path(".sm75") / "records" / "kernels.json"
# What the package hangs on beside the lock's files: series.toml pins every patch and overlay.
_READ = (
    "recipes/vllm-sm75-kernels/*", "lock/kernel-tools.txt", "LICENSE", "sm75/condapkg.py",
    "sm75/aot/*.py", "sm75/smem/*.py", "sm75/smem/*.toml",
)  # fmt: skip


def _digest(root: Path, lock: ReleaseLock) -> str:
    made = hashlib.sha256()
    for name in ("vllm-sdist", f"cuda-nvcc-{tools.PLATFORM}"):
        made.update(f"{name} {lock.artifact(name).stored_sha256}\n".encode())
    for pattern in (f"patches/{lock.vllm}/series.toml", *_READ):
        for path in sorted(root.glob(pattern)):
            if path.is_file():
                made.update(f"{path.relative_to(root)} {hash_file(path)}\n".encode())
    return made.hexdigest()


def current(root: Path, lock: ReleaseLock, place: Path) -> Path | None:
    """The channel's package, if the same inputs made it and it is as it was made; else None."""
    try:
        known = json.loads((root / RECORD).read_text(encoding="utf-8"))
        package = place / "noarch" / Path(known["package"]).name
        same = known["inputs"] == _digest(root, lock) and known["sha256"] == hash_file(package)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return package if same else None


def remember(root: Path, lock: ReleaseLock, package: Path) -> None:
    """Record what made a package, for ``current``."""
    made = {
        "package": package.name, "sha256": hash_file(package), "inputs": _digest(root, lock),
    }  # fmt: skip
    (root / RECORD).parent.mkdir(parents=True, exist_ok=True)
    atomic.write_bytes(root / RECORD, json.dumps(made, indent=1).encode() + b"\n")


def add(
    root: Path, lock: ReleaseLock, place: Path, package: Path, sha256: str,
    say: Callable[[str], None],
) -> tuple[Path, tuple[str, ...]]:  # fmt: skip
    """Take a package that was built elsewhere into a channel, by its hash.

    Args:
        root: The project's directory.
        lock: A release lock; the channel's bill of materials is renewed by it.
        place: The channel.
        package: The ``.conda``.
        sha256: What it must be.
        say: Told that there is a wait.

    Returns:
        The package in the channel, and the packages whose place it took, as ``subdir/file``.

    Raises:
        ChannelError: It is another file, or no package of kernels.
        CheckFailed: Its kernels are not what its index says, or not for sm_75.
    """
    if not package.is_file():
        raise ChannelError(f"there is no file {package}", fix="name the .conda of the kernels")
    found = hash_file(package)
    if found != sha256.lower():
        raise ChannelError(
            f"{package.name} is not the package that was meant",
            why=f"its sha256 is {found}, given was {sha256}",
            fix="copy it again, or give the hash that `kernels build` printed",
        )
    if condapkg.read_info(package)["index"].get("name") != NAME:
        raise ChannelError(f"{package.name} is no package of {NAME}", fix="name the right file")
    # Without a disassembler, which is made for x86-64: what the files themselves say.
    wrong = [one for one in check.check(package).findings if one.state == "fail"]
    if wrong:
        raise CheckFailed(
            f"{package.name} breaks {len(wrong)} of the kernels' rules",
            why="; ".join(f"{one.rule}: {one.evidence}" for one in wrong),
            fix="build it again there: python3 orchestrator.py kernels build",
        )
    return _publish(root, lock, place, package, say)
