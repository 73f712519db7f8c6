"""What vLLM's own parser would refuse, for both releases that were read."""

from __future__ import annotations

import ast
import shlex
import tarfile
from pathlib import Path

import pytest

from sm75.errors import UsageError
from sm75.serve import known, typed
from sm75.serve.flags import Given
from sm75.serve.known import Installed
from sm75.store import default_root
from tests.unit import servekit
from tests.unit.commandkit import Runner
from tests.unit.test_serve_plan import planned

DATA = Path(__file__).parents[1] / "data" / "serve"
RELEASES = ("0.28.0", "0.33.0")


def spelled(text: str, release: str = "0.33.0", plugins: tuple[str, ...] = ()) -> str:
    given = Given(tuple(shlex.split(text)))
    return shlex.join(typed.check(given, Installed(release=release, plugins=plugins)).arguments)


@pytest.mark.parametrize("release", RELEASES)
def test_every_flag_of_the_engine_is_in_the_table(release: str) -> None:
    table = known.Installed(release=release).known
    assert table is not None
    listed = set((DATA / f"flags-{release}.txt").read_text().splitlines())
    own = {name for name, flag in table.flags.items() if not flag.of.startswith("FrontendArgs.")}
    also = {name for flag in table.flags.values() for name in flag.also}
    assert listed <= set(table.flags) | also
    # Beside them, what make_arg_parser adds.
    assert own - listed <= {"--headless", "--api-server-count", "--config", "--grpc"}


@pytest.mark.parametrize("release", RELEASES)
def test_what_a_person_reads_in_the_sources(release: str) -> None:
    """vllm/engine/arg_utils.py and vllm/config of both sdists, read by hand."""
    table = known.Installed(release=release).known
    assert table is not None
    flags = table.flags
    assert flags["--max-model-len"].takes == "auto"
    assert flags["--max-num-batched-tokens"].takes == "human"
    assert (flags["--max-num-seqs"].takes, flags["--max-num-seqs"].ge) == ("int", 1)
    assert flags["--gpu-memory-utilization"].gt == 0
    assert flags["--gpu-memory-utilization"].le == 1
    assert flags["--tensor-parallel-size"].also == ("-tp",)
    assert flags["--enforce-eager"].takes == "pair"
    assert flags["--disable-log-stats"].takes == "switch"
    assert flags["--hf-token"].takes == "maybe"
    assert flags["--served-model-name"].takes == flags["--lora-modules"].takes == "many"
    # Made one text after their fields were read.
    assert flags["--allowed-origins"].takes == flags["--middleware"].takes == "text"
    assert flags["--max-lora-rank"].choices[:2] == (1, 8)
    assert "float16" in flags["--dtype"].choices
    # A class of its own, a callable, and what plugins add to.
    for name in ("--compilation-config", "--hf-overrides", "--quantization", "--moe-backend"):
        assert (flags[name].takes, flags[name].choices) == ("text", ())
    assert table.inverse == (release == "0.33.0")


@pytest.mark.integration
@pytest.mark.parametrize("release", RELEASES)
def test_the_servers_flags_are_its_fields(release: str) -> None:
    """By the names that its help would have, without this project's reader."""
    found = sorted(default_root().glob(f"sha256/*/*/vllm-{release}.tar.gz"))
    if not found:
        pytest.skip("the sdist is not in the store")
    folder = "common" if release == "0.33.0" else "openai"
    with tarfile.open(found[0]) as archive:
        member = archive.extractfile(f"vllm-{release}/vllm/entrypoints/{folder}/cli_args.py")
        assert member is not None
        tree = ast.parse(member.read())
    fields = {
        part.target.id for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name.endswith("FrontendArgs")
        for part in node.body
        if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name)
    }  # fmt: skip
    table = known.Installed(release=release).known
    assert table is not None
    ours = {flag.of.partition(".")[2] for flag in table.flags.values()
            if flag.of.startswith("FrontendArgs.")}  # fmt: skip
    assert ours == fields


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize(
    ("text", "becomes"),
    [
        ("--max-model 4k", "--max-model-len 4k"),
        ("--max_model=4k", "--max-model-len=4k"),
        ("--no-async-sched", "--no-async-scheduling"),
        ("--attention-conf.backend X", "--attention-config.backend X"),
        *((same, same) for same in (
            "--max_model_len=4096", "--no-enforce-eager", "--no-enable-lora", "-tp 2", "-q awq",
            "-qawq", "-O3 -O 2", "-O=1", "-cc.mode 3", "--attention_config.a.b=1",
            "--hf-token --port 9", "--served-model-name a b c --port 9", "--max-model-len -1",
            "--max-num-batched-tokens 2K", "--tokenizer-revision None", "--help=all", "-h",
            "--chat-template '--two words'", "--hf-overrides '{\"a\": 1}'",
            "--compilation-config.cudagraph_capture_sizes+ 1,2", "--seed -1",
        )),
    ],
)  # fmt: skip
def test_what_vllm_takes(release: str, text: str, becomes: str) -> None:
    assert spelled(text, release) == becomes


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("--max-modle-len 9", "no flag of vLLM {}: --max-modle-len; did you mean --max-model-len?"),
        ("--max_modle_len=9", "--max-modle-len; did you mean --max-model-len?"),
        ("--nonsense", "no flag of vLLM {}: --nonsense\n"),
        ("--max-num-s 3", "could match --max-num-scheduled-tokens, --max-num-seqs"),
        ("--enforce-eager=true", "ignored explicit argument 'true'"),
        ("--port", "--port: expected one argument"),
        ("--port --host x", "--port: expected one argument"),
        ("--max-model-len.x 3", "'{{}}' is no value for --max-model-len"),
        ("-cc.mode", "-cc.mode has no value"),
        ("stray", "stray belongs to no flag"),
        ("--port 9 stray", "stray belongs to no flag"),
        ("--model x", "--model stands behind --"),
        ("--port x", "'x' is no value for --port"),
        ("--max-num-seqs 0", "vLLM {} takes a whole number, at least 1 (its SchedulerConfig.max"),
        ("--max-num-seqs 1k", "'1k' is no value for --max-num-seqs"),
        ("--max-num-batched-tokens 1.5K", "32k is 32,000 and 32K 32,768"),
        ("--max-model-len lots", "or auto"),
        ("--gpu-memory-utilization 0", "a number, above 0, at most 1"),
        ("--gpu-memory-utilization nan", "is no value for --gpu-memory-utilization"),
        ("--gpu-memory-utilization 90%", "is no value for --gpu-memory-utilization"),
        ("-tp 0", "'0' is no value for --tensor-parallel-size"),
        ("--seed None", "'None' is no value for --seed"),
        ("--dtype fp16", "one of auto, half, float16"),
        ("--max-lora-rank 7", "one of 1, 8, 16"),
    ],
)  # fmt: skip
def test_what_vllm_refuses(release: str, text: str, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        spelled(text, release)
    assert says.format(release) in str(caught.value)
    assert "next:" in str(caught.value)


def test_releases_differ() -> None:
    assert spelled("--disable-lora") == "--disable-lora"
    assert spelled("--device-memory-util 0.5") == "--gpu-memory-utilization 0.5"
    for text in ("--disable-lora", "--device-memory-utilization 0.5"):
        with pytest.raises(UsageError, match=r"no flag of vLLM 0\.28\.0"):
            spelled(text, "0.28.0")


def test_where_it_cannot_be_known_nothing_is_said() -> None:
    assert spelled("--max-modle-len 9 --port x", "9.9.9") == "--max-modle-len 9 --port x"
    assert spelled("--max-modle-len 9", plugins=("more",)) == "--max-modle-len 9"
    with pytest.raises(UsageError, match="no value for --port"):
        spelled("--port x", plugins=("more",))


def test_an_abbreviation_is_counted_with(tmp_path: Path) -> None:
    model = servekit.model(tmp_path / "m", servekit.LLAMA1)
    found = planned(model, "--max-model", "4k", "--max-num-seq", "4")
    assert (found.length, found.settings.seqs) == (4000, 4)
    assert found.command.count("--max-model-len") == 1


def test_it_is_said_before_the_start(tmp_path: Path, run: Runner) -> None:
    model = servekit.model(tmp_path / "m", servekit.LLAMA1)
    done = run("serve", model, "--dry-run", "--", "--max-modle-len", "9")
    assert done.code == 2
    assert "did you mean --max-model-len?" in done.err
