"""The flags: ours exist, the user's win, and what cannot work on 7.5 is refused."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from sm75.errors import UsageError
from sm75.serve import flags
from sm75.serve.flags import Given
from sm75.store import default_root
from tests.data.serve.flags import flags as flags_in

DATA = Path(__file__).parents[1] / "data" / "serve"
RELEASES = ("0.28.0", "0.33.0")
OURS = ("--dtype", "--kv-cache-dtype", "--gpu-memory-utilization", "--max-model-len",
        "--max-num-seqs")  # fmt: skip
# Those of the user's that the arithmetic reads, and those that the messages name.
READ = ("--tensor-parallel-size", "--max-num-batched-tokens", "--enforce-eager",
        "--max-cudagraph-capture-size", "--attention-backend", "--attention-config",
        "--async-scheduling", "--kv-cache-memory-bytes", "--limit-mm-per-prompt")  # fmt: skip


@pytest.mark.parametrize("release", RELEASES)
def test_every_flag_exists(release: str) -> None:
    known = (DATA / f"flags-{release}.txt").read_text().splitlines()
    assert set(OURS + READ) <= set(known)


def test_what_is_not_counted_exists() -> None:
    known = {flag for release in RELEASES
             for flag in (DATA / f"flags-{release}.txt").read_text().splitlines()}  # fmt: skip
    named = {*flags._UNCOUNTED, *flags._ALIASES.values()}
    assert named <= known


@pytest.mark.integration
@pytest.mark.parametrize("release", RELEASES)
def test_the_lists_are_the_releases_own(release: str) -> None:
    found = sorted(default_root().glob(f"sha256/*/*/vllm-{release}.tar.gz"))
    if not found:
        pytest.skip("the sdist is not in the store")
    with tarfile.open(found[0]) as archive:
        member = archive.extractfile(f"vllm-{release}/vllm/engine/arg_utils.py")
        assert member is not None
        source = member.read().decode()
    assert flags_in(source) == (DATA / f"flags-{release}.txt").read_text().splitlines()


@pytest.mark.parametrize(
    ("arguments", "flag", "value"),
    [
        ("--port 9", "--port", "9"),
        ("--port=9", "--port", "9"),
        ("--port 9 --port=10", "--port", "10"),
        ("--max_model_len 9", "--max-model-len", "9"),
        ("-tp 2", "--tensor-parallel-size", "2"),
        ("-tp=2", "--tensor-parallel-size", "2"),
        ("--enforce-eager --port 9", "--enforce-eager", ""),
        ("--enforce-eager", "--enforce-eager", ""),
        ("-ac.backend FLASH_ATTN", "--attention-config.backend", "FLASH_ATTN"),
        ("--reporter 9", "--port", None),
        ("", "--port", None),
    ],
)
def test_a_value_is_found(arguments: str, flag: str, value: str | None) -> None:
    assert Given(tuple(arguments.split())).value(flag) == value


@pytest.mark.parametrize(
    ("text", "number"),
    [("8192", 8192), ("32k", 32_000), ("32K", 32_768), ("1.5k", 1500), ("auto", None),
     ("-1", None)],
)  # fmt: skip
def test_numbers_as_vllm_reads_them(text: str, number: int | None) -> None:
    assert Given(("--max-model-len", text)).number("--max-model-len") == number


@pytest.mark.parametrize("text", ["lots", "0", "", "k", "-5"])
def test_no_numbers(text: str) -> None:
    with pytest.raises(UsageError, match="is no number"):
        Given(("--max-model-len", text)).number("--max-model-len")


@pytest.mark.parametrize("text", ["0", "1.1", "nan", "x", "-0.5"])
def test_no_shares(text: str) -> None:
    with pytest.raises(UsageError, match="is no share"):
        Given(("--gpu-memory-utilization", text)).share()


def test_the_users_flags_win_and_stand_once() -> None:
    ours = [("--dtype", "float16"), ("--max-model-len", "8192"), ("--max-num-seqs", "16")]
    given = Given(("--max_model_len=99", "--port", "9"))
    merged, gone = flags.merge(ours, given)
    assert merged == ["--dtype", "float16", "--max-num-seqs", "16", "--max_model_len=99", "--port",
                      "9"]  # fmt: skip
    assert gone == ["--max-model-len"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--dtype bfloat16", "8.0 or newer"),
        ("--dtype=bfloat16", "8.0 or newer"),
        ("--kv-cache-dtype fp8", "fp8e4nv not supported"),
        ("--kv_cache_dtype fp8_e5m2", "fp8e4nv not supported"),
        ("--kv-cache-dtype fp8_per_token_head", "fp8e4nv not supported"),
        ("--kv-cache-dtype bfloat16", "8.0 or newer"),
        ("--kv-cache-dtype turboquant_k8v4", "nothing was tried"),
        ("--attention-backend FLASH_ATTN", "FlashAttention has kernels"),
        ("--attention-backend flashinfer", "no FlashInfer"),
        ("--attention-backend=FLASHMLA", "FlashAttention has kernels"),
        ("-ac.backend FLASHINFER", "no FlashInfer"),
        ('--attention-config {"backend":"FLASH_ATTN"}', "FlashAttention has kernels"),
    ],
)
def test_what_cannot_work_is_refused(arguments: str, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        flags.refuse(Given(tuple(arguments.split())), {})
    assert says in str(caught.value)
    assert "next:" in str(caught.value)


@pytest.mark.parametrize(
    ("variable", "value"),
    [("VLLM_ATTENTION_BACKEND", "FLASHINFER"), ("VLLM_ATTENTION_BACKEND", "FLASH_ATTN"),
     ("VLLM_USE_FLASHINFER_SAMPLER", "1"), ("CUDA_VISIBLE_DEVICES", ""),
     ("CUDA_VISIBLE_DEVICES", "-1")],
)  # fmt: skip
def test_variables_are_refused(variable: str, value: str) -> None:
    with pytest.raises(UsageError, match=variable) as caught:
        flags.refuse(Given(()), {variable: value})
    assert f"unset {variable}" in caught.value.fix


@pytest.mark.parametrize(
    "arguments",
    ["--dtype float16", "--dtype auto", "--kv-cache-dtype int8_per_token_head",
     "--attention-backend TRITON_ATTN", "-ac.backend TRITON_ATTN", "--attention-config {",
     "--attention-config []", "--port 9"],
)  # fmt: skip
def test_what_works_is_not_refused(arguments: str) -> None:
    environment = {"VLLM_ATTENTION_BACKEND": "TRITON_ATTN", "CUDA_VISIBLE_DEVICES": "0"}
    flags.refuse(Given(tuple(arguments.split())), environment)


def test_doctors_list_is_warned_of() -> None:
    said = flags.warnings(
        Given(("--config", "x.yaml")),
        {"VLLM_ATTENTION_BACKEND": "TRITON_ATTN", "LD_LIBRARY_PATH": "/usr/local/cuda/compat"},
    )
    assert [line.partition(":")[0] for line in said] == [
        "VLLM_ATTENTION_BACKEND", "LD_LIBRARY_PATH", "--config"]  # fmt: skip
    assert not flags.warnings(Given(()), {})


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--enable-lora", ["--enable-lora (adapters and their buffers)"]),
        ("-pp 2 -sc {}", ["--pipeline-parallel-size (stages", "--speculative-config (the draft"]),
        ("--tensor-parallel-size=2", ["--tensor-parallel-size (an even share"]),
        ("--limit_mm_per_prompt {}", ["--limit-mm-per-prompt (a guess"]),
        ("-tp 1 -pp 1 --data-parallel-size 1", []),
        ("--port 9 --no-enable-lora", []),
    ],
)
def test_what_is_not_counted_is_one_line(arguments: str, says: list[str]) -> None:
    found = [line for line in flags.warnings(Given(tuple(arguments.split())), {})
             if "not counted in the table: " in line]  # fmt: skip
    assert len(found) == bool(says)
    assert all(text in found[0] for text in says)
