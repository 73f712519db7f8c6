"""The installed environment at work, under emulation: minutes each.

The image's torch is the public one (its missing sm_75 is waived, as the adapter documents), and
where a device is needed that vLLM only asks about, standindriver says that there is a T4G. Nothing
of the package is changed.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from sm75.closurelock import load_omissions
from tests.integration import standin
from tests.integration.closurekit import LOCK, ROOT
from tests.integration.emulation import Emulated

BOX = Path(__file__).parent / "box"
TORCH = "2.12.0+cu130"
# Gemma 4's text model: heads of 256 (sliding) and 512 (full), one KV head, as in E2B.
GEMMA4 = {
    "architectures": ["Gemma4ForCausalLM"],
    "model_type": "gemma4_text",
    "dtype": "bfloat16",
    "hidden_size": 1536,
    "intermediate_size": 6144,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "global_head_dim": 512,
    "final_logit_softcapping": 30.0,
    "vocab_size": 262144,
    "max_position_embeddings": 131072,
}


def last_line(text: str) -> str:
    return text.strip().splitlines()[-1]


def said(done: subprocess.CompletedProcess[str]) -> Any:
    """The JSON of one of the programs in ``box``."""
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(last_line(done.stdout))


def test_no_image_is_said_at_first_import(emulated: Emulated, tmp_path: Path) -> None:
    done = emulated.run("-c", "import torch", image=tmp_path / "none", accept="")
    line = last_line(done.stderr)
    assert f"dlami-torch: there is no torch in {tmp_path / 'none'}" in line
    assert "Deep Learning AMI" in line


@pytest.mark.slow
def test_public_torch_is_refused_and_accepted_for_tests(emulated: Emulated, image: Path) -> None:
    program = "import torch; print(torch.__version__)"
    refused = emulated.run("-c", program, image=image, accept="")
    assert "has no sm_75 code (it has sm_80" in last_line(refused.stderr)
    accepted = emulated.run("-c", program, image=image)
    assert accepted.stdout.strip() == TORCH, accepted.stderr
    assert "is waived by DLAMI_TORCH_ACCEPT" in accepted.stderr


@pytest.mark.slow
def test_vllm_imports_and_its_kernels_load(emulated: Emulated, image: Path, driver: Path) -> None:
    """Both kernel extensions, found and loaded as on a box: by the library path, nothing else."""
    found = said(emulated.run(BOX / "load_kernels.py", image=image, driver=driver))
    assert (found["vllm"], found["metadata"]) == (LOCK.vllm, LOCK.vllm)
    assert found["torch"] == TORCH.partition("+")[0]  # as the public wheel's metadata have it
    assert [Path(p).name for p in found["loaded"]] == [
        "_C_stable_libtorch.abi3.so",
        "_moe_C_stable_libtorch.abi3.so",
        "cumem_allocator.abi3.so",
    ]
    names = {name.partition(".")[0] for name in found["operators"]}
    assert {
        "_C::rms_norm",
        "_C::cutlass_scaled_mm",
        "_C::marlin_gemm",
        "_C_cache_ops::reshape_and_cache",
        "_moe_C::topk_softmax",
        "_moe_C::moe_align_block_size",
    } <= names
    assert len(found["operators"]) > 100


@pytest.mark.slow
def test_version(emulated: Emulated, image: Path, driver: Path) -> None:
    done = emulated.run(emulated.prefix / "bin/vllm", "--version", image=image, driver=driver)
    assert done.returncode == 0, done.stderr[-3000:]
    assert last_line(done.stdout) == LOCK.vllm


@pytest.mark.slow
def test_version_without_a_device(emulated: Emulated, image: Path) -> None:
    """Upstream makes the parser of `serve` first, and that asks for a device."""
    done = emulated.run(emulated.prefix / "bin/vllm", "--version", image=image)
    assert done.returncode == 1
    assert "RuntimeError: Failed to infer device type" in done.stderr


@pytest.mark.slow
def test_import_without_a_device(emulated: Emulated, image: Path) -> None:
    """What docs/installing.md names for a machine without a driver."""
    done = emulated.run("-c", "import vllm; print(vllm.__version__)", image=image)
    assert done.returncode == 0, done.stderr[-3000:]
    assert last_line(done.stdout) == LOCK.vllm


@pytest.mark.slow
def test_help_of_serve(emulated: Emulated, image: Path, driver: Path) -> None:
    vllm = emulated.prefix / "bin" / "vllm"
    done = emulated.run(vllm, "serve", "--help=all", image=image, driver=driver)
    assert done.returncode == 0, done.stderr[-3000:]
    for option in ("--model", "--dtype", "--max-model-len", "--gpu-memory-utilization"):
        assert option in done.stdout


@pytest.mark.slow
def test_engine_configuration_of_gemma4(
    emulated: Emulated, image: Path, driver: Path, tmp_path: Path
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(GEMMA4))
    found = said(
        emulated.run(
            BOX / "engine_config.py",
            tmp_path / "model",
            emulated.starter(),
            image=image,
            driver=driver,
        )
    )
    assert found == {
        "platform": "NvmlCudaPlatform",
        "device": "NVIDIA T4G (stand-in)",
        "capability": "7.5",
        "memory": 15360 << 20,
        "architecture": "Gemma4ForCausalLM",
        "dtype": "torch.float16",  # bfloat16 needs 8.0
        "attention": "AttentionBackendEnum.TRITON_ATTN",
        "max_model_len": 4096,
        "device_type": "cuda",
    }


@pytest.mark.slow
def test_pip_finds_no_fault(emulated: Emulated, image: Path) -> None:
    """Metadata and closure tell the same: what is required is there, in a version that will do.

    The public torch requires NVIDIA's packages; those are the image's, and not visible here.
    """
    done = emulated.run("-m", "pip", "check", image=image)
    theirs = [line for line in done.stdout.splitlines() if line.startswith("torch 2.12.0 requires")]
    assert theirs, done.stdout + done.stderr
    assert set(done.stdout.splitlines()) == set(theirs)


@pytest.mark.slow
def test_nothing_that_is_left_out_can_be_imported(emulated: Emulated, image: Path) -> None:
    names = sorted(load_omissions(ROOT, LOCK.vllm).absent_imports)
    program = f"import importlib.util as u; print([n for n in {names} if u.find_spec(n)])"
    done = emulated.run("-c", program, image=image)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
    assert len(names) > 10
    assert not set(names) & {name for name, *_ in standin.WHEELS}
