"""``verify --gpu``: what needs no GPU and no torch."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sm75.errors import CheckFailed, ToolchainError, UsageError
from sm75.gpu import bundles, report, trials
from sm75.gpu.launcher import Launcher, bind
from sm75.lockfile import load_release
from sm75.smem.models import MODELS, block_sizes
from tests.unit import gpukit

ROOT = gpukit.ROOT


class Tensor:
    """An address and a type."""

    def __init__(self, address: int, dtype: str = "torch.float16") -> None:
        self.address, self.dtype = address, dtype

    def data_ptr(self) -> int:
        return self.address


class Backend:
    """Remembers launches."""

    def __init__(self) -> None:
        self.launches: list[tuple[Any, ...]] = []
        self.loads = 0

    def load(self, ptx: bytes, entry: str) -> str:
        self.loads += 1
        return entry

    def reserve(self, function: Any, shared: int) -> None:
        pass

    def launch(self, *what: Any) -> None:
        self.launches.append(what)


class Kernel:
    """A Triton kernel's name."""

    def __init__(self, name: str) -> None:
        self.__name__ = name


def given(**changes: Any) -> dict[str, Any]:
    return {"out": Tensor(512), "stride": 7, "SIZE": 16, "none": None} | changes


def test_bind_gives_the_entry_its_values() -> None:
    tensor = Tensor(512)
    values, keep = bind(gpukit.prepared(), "attend", given(out=tensor))
    # Triton's two scratch pointers stand behind the kernel's own parameters.
    assert values == [("*fp16", 512), ("i64", 7), ("*i8", 0), ("*i8", 0)]
    assert keep == [tensor]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"SIZE": 32}, "SIZE is 32, compiled 16"),
        ({"none": Tensor(512)}, "none is"),
        ({"out": Tensor(520)}, "out is no multiple of 16"),
        ({"out": Tensor(512, "torch.int8")}, "out is of type i8, compiled for *fp16"),
        ({"num_warps": 8}, "8 warps, compiled for 4"),
    ],
)
def test_another_launch_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(CheckFailed) as error:
        bind(gpukit.prepared(), "attend", given(**changes))
    assert said in str(error.value)
    assert "make the bundle anew" in str(error.value)


def test_another_kernel_is_refused() -> None:
    with pytest.raises(CheckFailed, match="reduce is launched"):
        bind(gpukit.prepared(), "reduce", given())


def test_launcher_loads_once_and_takes_no_more_than_recorded() -> None:
    backend = Backend()
    launcher = Launcher(backend=backend, expected=[gpukit.prepared()] * 2, loaded={})
    for _ in range(2):
        launcher(Kernel("attend"), (3, 1), given(num_warps=4))
    assert backend.loads == 1
    assert [launch[1:4] for launch in backend.launches] == [((3, 1), 128, 65_536)] * 2
    with pytest.raises(CheckFailed, match="was not recorded"):
        launcher(Kernel("attend"), (3, 1), given())


def unpacked(tmp_path: Path, **changes: Any) -> Path:
    tree = tmp_path / "tree"
    (tree / "vllm").mkdir(parents=True, exist_ok=True)
    (tree / "vllm" / "a.py").write_text("A = 1\n")
    plan = {"patched": {"one": ["k1"], "two": "does not fit"}}
    kernels = {"vllm_sm75_kernels/index.json": b"{}"}
    made, again = (
        bundles.pack(
            ROOT, {"patched": tree}, {"vllm": "0"}, plan, [gpukit.prepared()], kernels=kernels
        )
        for _ in range(2)
    )
    assert made == again
    program = tmp_path / "bundle.pyz"
    program.write_bytes(made)
    home = tmp_path / "home"
    with zipfile.ZipFile(program) as archive:
        archive.extractall(home)
    return home


def test_bundle_holds_what_was_prepared(tmp_path: Path) -> None:
    home = unpacked(tmp_path)
    bundle = bundles.load(home)
    assert bundle.launches("patched", "one") == [gpukit.prepared()]
    assert bundle.launches("patched", "two") == "does not fit"
    assert (home / "trees/patched/vllm/a.py").read_text() == "A = 1\n"
    assert (home / bundles.KERNELS / "vllm_sm75_kernels" / "index.json").read_text() == "{}"
    with pytest.raises(UsageError, match="no trial 'three'"):
        bundle.launches("patched", "three")


@pytest.mark.parametrize("fault", ["no index", "no ptx", "schema", "cut"])
def test_damaged_bundle_is_refused(tmp_path: Path, fault: str) -> None:
    home = unpacked(tmp_path)
    index = home / bundles.INDEX
    if fault == "no index":
        index.unlink()
    elif fault == "no ptx":
        (home / "ptx" / "k1.ptx").unlink()
    elif fault == "schema":
        index.write_text(json.dumps(json.loads(index.read_text()) | {"schema": 99}))
    else:
        index.write_text(index.read_text()[:-20])
    with pytest.raises(UsageError) as error:
        bundles.load(home)
    assert "verify --gpu --bundle" in str(error.value)


def test_bundle_runs_alone_and_says_what_is_missing(tmp_path: Path) -> None:
    """Out of the file, by a Python that has neither this project nor (mostly) torch."""
    unpacked(tmp_path)
    done = subprocess.run(
        [sys.executable, "-I", str(tmp_path / "bundle.pyz"), "--json", str(tmp_path / "r.json")],
        check=False, capture_output=True, text=True, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 6, done.stderr
    assert "torch" in done.stderr
    assert "next:" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "r.json").exists()


def test_all_right_passes() -> None:
    assert bundles.passed([gpukit.result(), gpukit.result("unpatched")])


@pytest.mark.parametrize(
    "wrong",
    [
        gpukit.result(passed=False, max_error=0.5),
        gpukit.result("unpatched", passed=False, max_error=None, mean_error=None),
        {"side": "patched", "trial": "t", "refused": "98304 bytes"},
        {"side": "8 warps", "trial": "(this side broke off)", "passed": False, "broke": 1},
    ],
)
def test_anything_wrong_fails(
    wrong: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A wrong number is exit code 1 and names its trial; the file's own verdict is not taken."""
    assert not bundles.passed([gpukit.result(), wrong])
    path = tmp_path / "result.json"
    path.write_text(json.dumps(gpukit.report(gpukit.result(), wrong)))
    for as_json in (False, True):
        code = report.run_and_print(
            ROOT, load_release(ROOT, None), None, None,  # type: ignore[arg-type]
            bundle=None, result=path, kernels=None, as_json=as_json,
        )  # fmt: skip
        assert code == 1
    shown = capsys.readouterr().out
    assert wrong["trial"] in shown
    assert "WRONG" in shown


def test_nothing_run_is_no_pass() -> None:
    assert not bundles.passed([])
    assert not bundles.passed([gpukit.result("unpatched")])


def test_unpatched_may_not_fit() -> None:
    refused = {"side": "unpatched", "trial": "t", "refused": "98304 bytes of shared memory"}
    assert bundles.passed([gpukit.result(), refused])


EVIDENCE = ROOT / "docs" / "evidence" / "attention-h200-2026-12-01.json"


def _shown(path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    code = report.run_and_print(
        ROOT, load_release(ROOT, None), None, None,  # type: ignore[arg-type]
        bundle=None, result=path, kernels=None, as_json=False,
    )  # fmt: skip
    return code, capsys.readouterr().out


def test_tables_show_both_sides_and_times(capsys: pytest.CaptureFixture[str]) -> None:
    """The committed evidence: it is whole, and right."""
    code, shown = _shown(EVIDENCE, capsys)
    assert code == 0
    for text in (
        "NVIDIA H200",
        "98304",
        "65536",
        "patched",
        "ms as T4G",
        "935 trials",
        "all right",
    ):
        assert text in shown


def _first(results: list[dict[str, Any]], side: str = "patched") -> dict[str, Any]:
    return next(one for one in results if one["side"] == side and "launches" in one)


def _own(results: list[dict[str, Any]]) -> dict[str, Any]:
    names = {trial.name for trial in trials.ahead_trials()}
    return next(one for one in results if one["side"] == "ahead of time" and one["trial"] in names)


FORGERIES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "error": (lambda r: _first(r["results"]).update(max_error=9.0), "off by 9.0e+00"),
    "nan": (lambda r: _first(r["results"]).update(max_error=float("nan")), "not a number"),
    "cache": (lambda r: _first(r["results"]).update(cache_error=99), "the cache is off"),
    "tolerance": (
        lambda r: _first(r["results"]).update(tolerance=10.0, max_error=9.0), "4e-03 is allowed"
    ),
    "shared": (
        lambda r: _first(r["results"])["launches"][0].update(shared=99_999), "99999 bytes of shared"
    ),
    "empty launch": (lambda r: _first(r["results"]).update(launches=[]), "nothing was launched"),
    "few": (lambda r: r.update(results=r["results"][:3]), "trials are missing"),
    "one again and again": (
        lambda r: r.update(results=[r["results"][0]] * len(r["results"])), "stand twice"
    ),
    "another target": (lambda r: r.update(target="sm_90"), "its kernels are for 'sm_90'"),
    "another schema": (lambda r: r.update(schema=99), "it is of schema 99"),
    "no gpu": (lambda r: r.pop("gpu"), "it does not say its gpu"),
    "escapes": (lambda r: r.update(gpu="[red]\x1b[31m"), "it does not say its gpu"),
    "ahead of time by the JIT": (
        lambda r: _own(r["results"]).update(kernels=[]),
        "no kernel that was compiled ahead of time was launched",
    ),
    "ahead of time left out": (
        lambda r: r.update(results=[o for o in r["results"] if o["side"] != "ahead of time"]),
        "trials are missing, the first: ahead of time",
    ),
    "ahead of time refused": (
        lambda r: _first(r["results"], "ahead of time").update(refused="does not fit"),
        "does not fit",
    ),
    "refused": (
        lambda r: r["results"].append({**_first(r["results"]), "trial": "x", "refused": "no"}), "no"
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", FORGERIES)
def test_the_verdict_is_made_of_the_numbers(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    forge, said = FORGERIES[kind]
    forged = json.loads(EVIDENCE.read_bytes())
    forge(forged)
    path = tmp_path / "result.json"
    path.write_text(json.dumps(forged))
    code, shown = _shown(path, capsys)
    assert code == 1
    assert said in shown
    assert "WRONG" in shown


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", '{"results": [{"side": "patched"}]}', "[" * 200_000]
)
def test_other_files_are_no_results(tmp_path: Path, text: str) -> None:
    path = tmp_path / "result.json"
    path.write_text(text)
    with pytest.raises(UsageError, match="no result of verify --gpu"):
        report.read_result(path)
    with pytest.raises(UsageError, match="cannot be read"):
        report.read_result(tmp_path / "none")


def test_no_gpu_says_how_to_go_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake = tmp_path / "python"
    fake.write_text("#!/bin/sh\necho False 2.12.0\n")
    fake.chmod(0o755)
    for python, said in ((fake, "no NVIDIA GPU, torch 2.12.0"), (tmp_path / "x", "No such file")):
        monkeypatch.setenv("SM75_GPU_PYTHON", str(python))
        with pytest.raises(ToolchainError) as error:
            report.find_python(ROOT, load_release(ROOT, None))
        assert said in str(error.value)
        assert "verify --gpu --bundle" in str(error.value)


def test_every_kind_of_layer_is_tried_ahead_of_time() -> None:
    """No trial twice on a side, and each layer of the model table with its own blocks."""
    for side in trials.SIDES:
        names = [trial.name for trial in trials.of_side(side)]
        assert len(set(names)) == len(names), side
    own = list(trials.ahead_trials())
    for model in MODELS:
        for layer, block in block_sizes(model).items():
            kinds = {t.cache for t in own if t.layer == layer and t.block == block}
            assert kinds == {"auto", "int8"}, (model.name, layer.name)
    assert max(max(trial.batch.keys) for trial in own) > 32_000
    assert any(trial.large > 1 for trial in own)
    # They are tried on that side alone.
    assert not {t.name for t in own if t.large > 1} & {t.name for t in trials.of_side("patched")}


def test_trials_cover_the_issue() -> None:
    found = list(trials.trials())
    assert len({trial.name for trial in found}) == len(found)
    assert {trial.layer.head for trial in found} >= {64, 72, 96, 128, 256, 512}
    assert {trial.cache for trial in found} == {"auto", "int8", "int4", "none"}
    assert any(trial.layer.q_heads // trial.layer.kv_heads > 16 for trial in found)
    assert any(trial.layer.window for trial in found)
    for feature in ("softcap", "sinks", "descriptors", "prefix"):
        assert any(getattr(trial, feature) for trial in found), feature
    assert not all(trial.causal for trial in found)
    for trial in found:
        pairs = zip(trial.batch.queries, trial.batch.keys, strict=True)
        assert all(1 <= queries <= keys for queries, keys in pairs)


def test_a_directory_without_kernels_is_refused_before_anything_is_compiled(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there are no kernels in") as refused:
        report.run_and_print(
            ROOT, None, None, None, bundle=tmp_path / "b.pyz", result=None,  # type: ignore[arg-type]
            kernels=tmp_path, as_json=False,
        )  # fmt: skip
    assert "kernels build --files DIR" in refused.value.fix
