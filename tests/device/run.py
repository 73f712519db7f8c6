"""Run the package for proofs on a newer NVIDIA GPU, as if that were a Turing one.

    .venv/bin/python -m tests.device.run PACKAGE --python PYTHON --work DIR --out EVIDENCE.json

PYTHON is an interpreter with torch (CUDA 13), transformers and what vLLM requires; ``--path`` adds
directories to its path. docs/proofs.md says what is a shim here, what is proved, and what is not.
Exit code 0: every token of every case is sound.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sm75.condapkg import iter_payload, read_info
from tests.device.compare import TOLERANCE, judge
from tests.device.fatbins import lower

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SHARED_LIMIT = 65_536
# Newest PTX version by the CUDA version that a driver is of: the PTX ISA's release notes.
PTX_OF_CUDA = {(13, 0): (9, 0), (13, 1): (9, 1), (13, 2): (9, 2)}
SHIMS = {
    "sitecustomize": "vLLM's platform answers capability 7.5; Triton compiles for sm_75 and hands "
    "its PTX to the driver",
    "capability.c": "vLLM's own extensions are told capability 7.5 and 65,536 bytes of shared "
    "memory a block",
    "fatbins": "the version directive of the extensions' PTX is lowered to the driver's; no other "
    "byte of them changes",
}
NOT_RUN = {
    "a Turing card, sm_75 machine code, aarch64": "none was at hand; this GPU runs the same PTX",
    "torch 2.12": "the machine has the torch named above",
    "sound, LoRA, sampling other than greedy": "not part of this test",
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One engine.

    Attributes:
        name: Of its files and in the evidence.
        module: What runs it.
        model: The checkpoint.
        exact: The checkpoint that stands for it in the reference; empty when tokens are not judged.
        arguments: Further ones of the module.
        health: The exit code that ``health`` must give every time, where it is what runs.
        table: Whether the table of models has its heads, so that Triton is to compile no attention
            where the kernels of ahead of time are.
    """

    name: str
    module: str
    model: str
    exact: str
    arguments: tuple[str, ...] = ()
    health: int | None = None
    table: bool = True


CASES = (
    Case(name="eager", module="engine", model="plain", exact="plain", arguments=("eager",)),
    Case(name="graphs", module="engine", model="plain", exact="plain", arguments=("graphs",)),
    Case(name="server", module="server", model="plain", exact="plain"),
    Case(name="marlin-eager", module="engine", model="w4a16", exact="w4a16-unpacked",
         arguments=("eager",)),
    Case(name="marlin-graphs", module="engine", model="w4a16", exact="w4a16-unpacked",
         arguments=("graphs",)),
    Case(name="vision", module="engine", model="vision", exact="vision", arguments=("graphs",)),
    Case(name="experts", module="engine", model="experts", exact="experts",
         arguments=("graphs",)),
    Case(name="health-random", module="health", model="random-gemma", exact="", health=1),
    # 4 query heads on 2 KV heads of 64: no model of the table.
    Case(name="health-sane", module="health", model="sane", exact="", health=0, table=False),
)  # fmt: skip
HEALTH = {case.name: case.health for case in CASES}
FOREIGN = {case.name for case in CASES if not case.table}
# Where a model of tests.realserver.make is in its cache.
SNAPSHOT = "models--sm75--{0}/snapshots/" + "0" * 40


class Bench:
    """The machine: where things are and how Python is started.

    Args:
        python: Interpreter with torch.
        work: Directory of everything that is made.
        path: Directories for its path.
        ahead: Whether the kernels of ahead of time are there, of which this GPU runs the PTX.
    """

    def __init__(self, python: str, work: Path, path: list[Path], *, ahead: bool = False) -> None:
        self.python = python
        self.work = work
        self.site = work / "site"
        self.path = path
        self.ahead = ahead

    def environment(self, case: str, *, turing: bool = True) -> dict[str, str]:
        """Of one process; caches are its own, so that its kernels can be told from others'."""
        places = [self.site, *self.path, ROOT]
        shims = {
            "SM75_AS_TURING": "1",
            "LD_PRELOAD": str(self.work / "capability.so"),
        }
        return {
            **os.environ,
            **(shims if turing else {}),
            **({"SM75_KERNELS": "ptx"} if self.ahead else {}),
            "PYTHONPATH": os.pathsep.join(
                str(p) for p in ([HERE / "asturing", *places] if turing else places)
            ),
            "PYTHONUNBUFFERED": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "CUDA_CACHE_PATH": str(self.work / "nv-cache"),
            "CUDA_CACHE_MAXSIZE": str(4 << 30),
            "TRITON_CACHE_DIR": str(self.work / "triton" / case),
            "VLLM_CACHE_ROOT": str(self.work / "vllm" / case),
            "TORCHINDUCTOR_CACHE_DIR": str(self.work / "inductor" / case),
        }

    def module(self, case: str, name: str, *arguments: str, turing: bool = True) -> float:
        """Run a module of the tests; seconds it took.

        Raises:
            RuntimeError: It failed.
        """
        log = self.work / f"{case}.log"
        started = time.monotonic()
        with log.open("ab") as handle:
            done = subprocess.run(
                [self.python, "-m", f"tests.{name}", *arguments],
                cwd=self.work, env=self.environment(case, turing=turing), stdout=handle,
                stderr=subprocess.STDOUT, check=False,
            )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"{case}: exit code {done.returncode}; see {log}")
        return round(time.monotonic() - started, 1)


def unpack(package: Path, site: Path) -> None:
    """Put a package's Python part into a directory, as an installer would."""
    for entry, content in iter_payload(package):
        inside = re.search(r"site-packages/(.+)", entry.name)
        if inside is None or not entry.isfile():
            continue
        path = site / inside[1]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.read())


def driver() -> tuple[dict[str, str], tuple[int, int]]:
    """What nvidia-smi says, and the newest PTX version that the driver takes."""
    fields = ("name", "driver_version", "compute_cap", "memory.total")
    said = subprocess.run(
        ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"],
        check=True, capture_output=True, text=True,
    ).stdout.splitlines()[0]  # fmt: skip
    text = subprocess.run(["nvidia-smi"], check=True, capture_output=True, text=True).stdout
    hit = re.search(r"CUDA (?:UMD )?Version: *(\d+)\.(\d+)", text)
    cuda = (int(hit[1]), int(hit[2])) if hit else (13, 0)
    facts = dict(zip(fields, (part.strip() for part in said.split(",")), strict=True))
    return {**facts, "cuda": f"{cuda[0]}.{cuda[1]}"}, PTX_OF_CUDA.get(cuda, (9, 0))


def prepare(bench: Bench, package: Path, ahead: Path | None) -> dict[str, Any]:
    """Unpack the packages, apply the shims, compile the one in C; what was done."""
    gpu, version = driver()
    shutil.rmtree(bench.site, ignore_errors=True)
    for each in (package, ahead):
        if each is not None:
            unpack(each, bench.site)
    lowered = {p.name: lower(p, version) for p in sorted((bench.site / "vllm").glob("*.so"))}
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-O1", "-o", str(bench.work / "capability.so"),
         str(HERE / "asturing" / "capability.c"), "-ldl"], check=True,
    )  # fmt: skip
    versions = subprocess.run(
        [bench.python, "-c", _VERSIONS], check=True, capture_output=True, text=True,
        env=bench.environment("versions", turing=False),
    ).stdout  # fmt: skip
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "gpu": gpu,
        "versions": json.loads(versions.splitlines()[-1]),
        "package": package.name,
        "kernels": ahead.name if ahead else None,
        "input_hash": read_info(package)["about"]["extra"]["input_hash"],
        "ptx": {"lowered to": ".".join(map(str, version)), "pieces": lowered},
    }


_VERSIONS = """
import importlib.metadata as m, json, platform
names = ("vllm", "torch", "triton", "transformers", "numpy", "compressed-tensors", "fastapi")
print(json.dumps({"python": platform.python_version(), **{n: m.version(n) for n in names}}))
"""


def run_case(bench: Bench, case: Case) -> dict[str, Any]:
    """Run one engine; what it says, with its rows still in it."""
    out = bench.work / f"{case.name}.json"
    model = bench.work / "models" / case.model
    if case.health is not None:
        model /= SNAPSHOT.format(case.model)
    extra = [*case.arguments, str(out)]
    if case.module in ("server", "health"):
        extra.append(str(bench.work / f"{case.name}-vllm.log"))
    seconds = bench.module(case.name, f"device.{case.module}", str(model), *extra)
    found: dict[str, Any] = json.loads(out.read_text())
    logs = [path for path in (bench.work / f"{case.name}.log", bench.work / f"{case.name}-vllm.log")
            if path.is_file()]  # fmt: skip
    said = "".join(path.read_text(encoding="utf-8", errors="replace") for path in logs)
    return {**found, "seconds": seconds, "kernels": kernels(bench.work / "triton" / case.name),
            "ahead of time": ahead(said)}  # fmt: skip


def ahead(log: str) -> dict[str, Any]:
    """What vLLM's log says of the kernels that were compiled ahead of time.

    Returns:
        ``packed``: variants in the package, None without it; ``left``: kernels that went to
        Triton all the same.
    """
    packed = re.search(r"Compute capability 7\.5: (\d+) attention kernels from", log)
    left = re.findall(r"no kernel ahead of time for (\w+)", log)
    return {"packed": int(packed[1]) if packed else None, "left": sorted(set(left))}


def kernels(cache: Path) -> list[dict[str, Any]]:
    """What Triton compiled: name, target, shared memory, warps; each distinct one once."""
    found: dict[tuple[str, str, int, int], int] = {}
    for path in cache.glob("*/*.json"):
        data = json.loads(path.read_text())
        if not isinstance(data, dict) or "shared" not in data:
            continue
        ptx = path.with_suffix(".ptx")
        target = re.search(r"\.target (\w+)", ptx.read_text()) if ptx.exists() else None
        key = (data["name"], target[1] if target else "?", data["shared"], data["num_warps"])
        found[key] = found.get(key, 0) + 1
    return [
        {"name": n, "target": t, "shared": s, "warps": w, "variants": count}
        for (n, t, s, w), count in sorted(found.items())
    ]


def score(bench: Bench, exact: str, rows: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """The reference's figures for some rows; the same row is looked at once."""

    def key(row: dict[str, Any]) -> str:
        return json.dumps([row["prompt"], row.get("images"), row["tokens"]])

    unique = {key(r): r for r in rows}
    given, out = bench.work / f"{name}-rows.json", bench.work / f"{name}-scores.json"
    given.write_text(json.dumps(list(unique.values())))
    model = str(bench.work / "models" / exact)
    bench.module(name, "device.reference", model, "float32", str(given), str(out), turing=False)
    scores = dict(zip(unique, json.loads(out.read_text()), strict=True))
    return [scores[key(r)] for r in rows]


def verdicts(bench: Bench, exact: str, results: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Judge all runs of the cases of one checkpoint."""
    named = [
        (case, run, rows) for case, found in results.items() for run, rows in found["runs"].items()
    ]
    flat = [row for _, _, rows in named for row in rows]
    scores = iter(score(bench, exact, flat, f"reference-{exact}"))
    judged: dict[str, dict[str, Any]] = {case: {} for case in results}
    for case, run, rows in named:
        mine = [next(scores) for _ in rows]
        with_logprobs = all(len(r.get("logprobs", ())) == len(r["tokens"]) for r in rows)
        verdict = judge(
            [s["deficits"] for s in mine],
            TOLERANCE[exact],
            [r["logprobs"] for r in rows] if with_logprobs else (),
            [s["logprobs"] for s in mine] if with_logprobs else (),
        )
        cached = sum(r.get("cached", 0) for r in rows)
        judged[case][run] = {
            "prompts": [len(r["prompt"]) for r in rows],
            **({"images": [len(r["images"]) for r in rows]} if "images" in rows[0] else {}),
            **verdict.facts(),
            **({"cached_tokens": cached} if "cached" in rows[0] else {}),
        }
    return judged


def baseline(bench: Bench, exact: str) -> dict[str, Any]:
    """transformers itself in float16, by the same measure."""
    name = f"float16-{exact}"
    out = bench.work / f"{name}.json"
    model = str(bench.work / "models" / exact)
    bench.module(name, "device.reference", model, "float16", "-", str(out), turing=False)
    rows = json.loads(out.read_text())
    scores = score(bench, exact, rows, name)
    return judge(
        [s["deficits"] for s in scores],
        TOLERANCE[exact],
        [r["logprobs"] for r in rows],
        [s["logprobs"] for s in scores],
    ).facts()


def faults(evidence: dict[str, Any]) -> list[str]:
    """What in the evidence is not as it must be."""
    found = []
    for name, case in evidence["cases"].items():
        if "error" in case:
            found.append(f"{name}: {case['error']}")
            continue
        wanted = HEALTH.get(name)
        if wanted is not None and set(case["exit_codes"]) != {wanted}:
            found.append(f"{name}: health said {sorted(set(case['exit_codes']))}, not {wanted}")
        runs = case.get("runs", {}).items()
        found += [f"{name}, {run}: {v['unsound']} of {v['tokens']} tokens are not explained"
                  for run, v in runs if not v["sound"]]  # fmt: skip
        found += [f"{name}, {run}: nothing was remembered" for run, v in runs
                  if "cached" in run and not v.get("cached_tokens")]  # fmt: skip
        found += [f"{name}: {k['name']} is for {k['target']} with {k['shared']} bytes"
                  for k in case["kernels"]
                  if k["target"] != "sm_75" or k["shared"] > SHARED_LIMIT]  # fmt: skip
        compiled = any("attention" in k["name"] for k in case["kernels"])
        said = case.get("ahead of time", {})
        packed, left = said.get("packed"), said.get("left", ())
        if packed is None and not compiled:
            found.append(f"{name}: no attention kernel was compiled")
        if packed is not None and name not in FOREIGN and (compiled or left):
            found.append(f"{name}: Triton compiled attention beside the kernels ahead of time")
    return found


def main() -> int:
    """Everything, in order; the evidence is written whatever happens."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("package", type=Path)
    parser.add_argument("--python", default="python3")
    parser.add_argument("--path", type=Path, action="append", default=[])
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kernels", type=Path, help="the package vllm-sm75-kernels")
    parser.add_argument("--only", action="append", choices=[case.name for case in CASES])
    parser.add_argument("--parallel", type=int, default=1, help="cases at once")
    parser.add_argument("--health", type=Path, help="lessons.json and sane/ of the --work of "
                        "tests.realserver.run, for the cases of health")  # fmt: skip
    given = parser.parse_args()
    work = given.work.absolute()
    work.mkdir(parents=True, exist_ok=True)
    bench = Bench(
        given.python, work, [p.absolute() for p in given.path], ahead=given.kernels is not None
    )
    names = given.only or [c.name for c in CASES if c.health is None or given.health]
    chosen = [case for case in CASES if case.name in names]
    evidence = prepare(bench, given.package, given.kernels)
    exacts = sorted({case.exact for case in chosen} - {""})
    models = work / "models"
    seeing = {"vision", "experts"}
    if set(exacts) - seeing and not (models / "prompts.json").exists():
        bench.module("models", "device.models", str(models), turing=False)
    if set(exacts) & seeing and not (models / "experts" / "pictures.json").exists():
        bench.module("models", "device.pictures", str(models), turing=False)
    if any(case.health is not None for case in chosen):
        if given.health is None:
            parser.error("the cases of health need the directory of their models: --health")
        shutil.copytree(given.health / "sane", work / "models" / "sane", dirs_exist_ok=True)
        bench.module("models", "realserver.make", str(given.health.absolute() / "lessons.json"),
                     str(work / "models"), "random-gemma", turing=False)  # fmt: skip

    def attempt(case: Case) -> dict[str, Any]:
        try:
            return run_case(bench, case)
        except RuntimeError as error:
            print(error, file=sys.stderr, flush=True)
            return {"error": str(error).replace(f"{work}/", "")}

    with ThreadPoolExecutor(given.parallel) as pool:
        cases = dict(zip([c.name for c in chosen], pool.map(attempt, chosen), strict=True))
        plain = {exact: pool.submit(baseline, bench, exact) for exact in exacts}

        def judged(exact: str) -> dict[str, Any]:
            done = [c.name for c in chosen if c.exact == exact and "runs" in cases[c.name]]
            return verdicts(bench, exact, {name: cases[name] for name in done}) if done else {}

        for found in pool.map(judged, exacts):
            for name, runs in found.items():
                cases[name]["runs"] = runs
        evidence["transformers in float16"] = {e: made.result() for e, made in plain.items()}
    evidence |= {"shims": SHIMS, "not run": NOT_RUN, "cases": cases}
    evidence["faults"] = faults(evidence)
    given.out.write_text(json.dumps(evidence, indent=1, sort_keys=True) + "\n")
    for fault in evidence["faults"]:
        print(f"FAULT {fault}")
    return bool(evidence["faults"])


if __name__ == "__main__":
    raise SystemExit(main())
