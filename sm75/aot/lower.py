"""Compile the manifest's kernels: record, adapt, lower with Triton 3.2, assemble with ptxas.

Variants are kept by a hash of everything that goes into them, so that a second run compiles only
what changed.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from sm75.aot import kept, sass
from sm75.aot.adapt import adapt, is_kernel
from sm75.aot.manifest import Manifest
from sm75.aot.pack import Compiled
from sm75.aot.plan import Wanted, plan
from sm75.aot.record import CAPABILITY, MODULES
from sm75.errors import BuildError, ToolchainError
from sm75.progress import Reporter
from sm75.smem.standins import ALWAYS_REAL

# As of ptxas -v.
_REGISTERS = re.compile(r"Used (\d+) registers")
_SPILLS = re.compile(r"(\d+) bytes spill stores")
SHARED_LIMIT = 65_536
"""Bytes a block of 7.5 can have: CUDA programming guide, technical specifications."""


@dataclass(frozen=True, kw_only=True)
class Tools:
    """What compiles.

    Attributes:
        python: Of an environment with Triton 3.2.
        ptxas: Of the pinned toolkit.
        disassembler: Prints SASS of a cubin named last; a command.
        triton: Version, for the index.
        toolkit: Version of ptxas, for the index.
    """

    python: Path
    ptxas: Path
    disassembler: Sequence[str]
    triton: str
    toolkit: str


def launches(root: Path, tree: Path, manifest: Manifest) -> list[dict[str, Any]]:
    """The launches that a tree's wrappers make.

    Raises:
        BuildError: A wrapper is not carried by the stand-ins.
    """
    done = subprocess.run(
        [sys.executable, "-P", "-m", "sm75.aot.record", str(tree)],
        input=msgspec.json.encode(manifest).decode(), env=_clean(root), cwd=root, check=False,
        capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode:
        said = done.stderr.strip().splitlines()
        raise BuildError(
            "the launches of the attention kernels cannot be recorded",
            why=said[-1] if said else f"exit code {done.returncode}",
            fix="see what changed in the wrapper: sm75/aot/record.py calls it",
        )
    return [json.loads(line) for line in done.stdout.splitlines()]


def _clean(root: Path) -> dict[str, str]:
    # Settings of the user's own vLLM or Triton must not change what is chosen.
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("VLLM", "TRITON", "PYTHON", "TORCH", "SM75_KERNELS"))
    }
    return kept | {
        "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1", "TRITON_DISABLE_LINE_INFO": "1",
    }  # fmt: skip


def sources(tree: Path) -> dict[str, str]:
    """sha256 of each module of the tree that kernels or their wrappers come from."""
    named = [name for name in MODULES if ".ops." in name]
    return {
        name: hashlib.sha256((tree / (name.replace(".", "/") + ".py")).read_bytes()).hexdigest()
        for name in named
    }


@contextlib.contextmanager
def adapted(tree: Path, tools: Tools) -> Iterator[tuple[Path, str]]:
    """A copy of the tree's modules as Triton 3.2 reads them, and a hash of their kernels.

    Raises:
        BuildError: ``adapt`` refuses one, or Triton cannot be asked for its names.
    """
    done = subprocess.run(
        [str(tools.python), "-I", "-c",
         "import json, triton.language as tl; print(json.dumps(dir(tl)))"],
        check=False, capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode:
        raise BuildError(
            "Triton 3.2 cannot be imported", why=done.stderr.strip()[-200:],
            fix="remove .sm75/kernel-venv, and run it again",
        )  # fmt: skip
    language = set(json.loads(done.stdout))
    digest = hashlib.sha256()
    with tempfile.TemporaryDirectory(prefix="sm75-aot-") as scratch:
        for name in (*MODULES, *ALWAYS_REAL):
            stem = name.replace(".", "/")
            place = next(
                path for path in (f"{stem}.py", f"{stem}/__init__.py") if (tree / path).is_file()
            )
            text = (tree / place).read_text(encoding="utf-8")
            if any(is_kernel(node) for node in ast.parse(text).body):
                text, _ = adapt(text, name, language)
                digest.update(f"{name}\n{text}\n".encode())
            target = Path(scratch, place)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
        yield Path(scratch), digest.hexdigest()


def compile_all(
    root: Path, tree: Path, manifest: Manifest, tools: Tools, cache: Path, reporter: Reporter,
    *, jobs: int | None = None,
) -> list[Compiled]:  # fmt: skip
    """Compile every variant that the tree's wrappers can launch for the model table.

    Args:
        root: The project's directory.
        tree: Of the patched modules.
        manifest: What is compiled.
        tools: What with.
        cache: Directory of variants that were compiled before.
        reporter: Shows the compilation.
        jobs: Processes; default: as many as cores.

    Raises:
        BuildError: A variant does not compile, or takes more shared memory than 7.5 has.
    """
    open_, made = plan(launches(root, tree, manifest), manifest), []
    with adapted(tree, tools) as (place, digest):
        # "alone": in a process of its own; what came out of a pool's is not the same.
        salt = f"{digest} {tools.triton} {tools.toolkit} alone"
        while open_:
            names = {one.identity: _name(cache, salt, one) for one in open_}
            known = {one.identity: _load(names[one.identity], one) for one in open_}
            todo = {one.identity: one for one in open_ if known[one.identity] is None}
            request = {
                "tree": str(place), "modules": list(MODULES), "capability": list(CAPABILITY),
                "jobs": min(jobs or os.cpu_count() or 1, len(todo) or 1),
                "variants": [one.request() for one in todo.values()],
            }  # fmt: skip
            if todo:
                task = reporter.task("attention kernels", len(todo), "kernels")
                for event in _work(root, tools.python, request):
                    one = todo[event["id"]]
                    _keep(names[event["id"]], one, event, tools)
                    task.message(f"{one.kernel} {dict(one.launch)}")
                    task.advance(1)
                task.done()
            held = [known[one.identity] or _load(names[one.identity], one) for one in open_]
            if None in held:
                raise BuildError(
                    "what was compiled cannot be read back", why=f"see the files in {cache}",
                    fix="run it again, on a disk that keeps what is written",
                )  # fmt: skip
            made += [one for one in held if one is not None and one.shared <= SHARED_LIMIT]
            open_ = [_smaller(one) for one in held if one is not None and one.shared > SHARED_LIMIT]
    return sorted(made, key=lambda one: one.wanted.order)


def _smaller(one: Compiled) -> Wanted:
    wanted = one.wanted.smaller()
    if wanted is None:
        raise BuildError(
            f"a variant of {one.wanted.kernel} takes {one.shared} bytes of shared memory",
            why=f"a block of 7.5 has {SHARED_LIMIT}: {dict(one.wanted.constants)}",
            fix="take smaller blocks in recipes/vllm-sm75-kernels/kernels.toml",
        )
    return wanted


def _name(cache: Path, salt: str, one: Wanted) -> Path:
    return cache / f"{hashlib.sha256(f'{salt} {one.identity}'.encode()).hexdigest()[:32]}.json"


def _work(root: Path, python: Path, request: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryFile("w+") as errors:
        worker = subprocess.Popen(
            [str(python), "-P", "-m", "sm75.aot.worker"], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=errors, text=True, env=_clean(root), cwd=root,
        )  # fmt: skip
        try:
            assert worker.stdin is not None  # noqa: S101
            assert worker.stdout is not None  # noqa: S101
            worker.stdin.write(json.dumps(request))
            worker.stdin.close()
            for line in worker.stdout:
                yield json.loads(line)
            if worker.wait():
                errors.seek(0)
                said = errors.read().strip().splitlines()
                raise BuildError(
                    "the lowering of the kernels broke off", why=said[-1] if said else "",
                    fix="run it again; what was compiled is kept",
                )  # fmt: skip
        finally:
            worker.kill()
            worker.wait()


def _keep(path: Path, one: Wanted, event: Mapping[str, Any], tools: Tools) -> None:
    where = f"{one.kernel} {dict(one.constants)}, {one.warps} warps"
    if "failed" in event:
        raise BuildError(
            f"Triton 3.2 cannot lower a variant of {one.kernel}", why=event["failed"],
            fix=f"the variant: {where}",
        )  # fmt: skip
    # What does not fit is kept as well, without machine code, so that it is compiled once.
    fits = event["shared"] <= SHARED_LIMIT
    cubin, registers, spills = assemble(event["ptx"], tools) if fits else (b"", -1, -1)
    made = {
        "entry": event["entry"], "ptx": event["ptx"], "cubin": cubin.hex(),
        "shared": event["shared"], "extra": event["extra"], "registers": registers,
        "spills": spills, "mma": tensor_cores(cubin, tools) if fits else -1,
    }  # fmt: skip
    kept.save(path, made)


def _load(path: Path, one: Wanted) -> Compiled | None:
    facts = kept.load(path)
    if facts is None:
        return None
    return Compiled(wanted=one, **(facts | {"cubin": bytes.fromhex(facts["cubin"])}))


def assemble(ptx: str, tools: Tools) -> tuple[bytes, int, int]:
    """Machine code for sm_75, registers a thread, and bytes of spill stores a thread.

    Raises:
        BuildError: ptxas refuses it.
    """
    with tempfile.TemporaryDirectory(prefix="sm75-ptx-") as scratch:
        source, made = Path(scratch, "kernel.ptx"), Path(scratch, "kernel.cubin")
        source.write_text(ptx, encoding="utf-8")
        # Names of its own: ptxas writes no path into the code.
        done = subprocess.run(
            [str(tools.ptxas), "-v", "--gpu-name=sm_75", "kernel.ptx", "-o", "kernel.cubin"],
            cwd=scratch, check=False, capture_output=True, text=True,
        )  # fmt: skip
        if done.returncode:
            raise BuildError(
                "ptxas refuses what Triton 3.2 wrote", why=done.stderr.strip()[-300:],
                fix="report it, with the release and kernels.toml",
            )  # fmt: skip
        told = done.stderr + done.stdout
        registers = max(map(int, _REGISTERS.findall(told)), default=-1)
        return made.read_bytes(), registers, max(map(int, _SPILLS.findall(told)), default=-1)


def tensor_cores(cubin: bytes, tools: Tools) -> int:
    """Tensor-core instructions (HMMA.1688) in machine code; -1 without a disassembler."""
    if not tools.disassembler:
        return -1
    try:
        return sass.disassemble(tools.disassembler, cubin).hmma
    except ToolchainError:
        return -1


def facts(one: Compiled) -> dict[str, Any]:
    """A variant's figures, for tables."""
    kept = asdict(one)
    return {name: kept[name] for name in ("shared", "registers", "spills", "mma")} | {
        "kernel": one.wanted.kernel, "launch": dict(one.wanted.launch), "warps": one.wanted.warps,
    }  # fmt: skip
