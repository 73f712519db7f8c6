"""Which extensions setup.py lists, by the spelling of the arch list."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.unit.projectkit import OVERLAY, ROOT, load

setup = load(OVERLAY / "tools" / "sm75_setup.py")

KEPT = (
    "vllm._C_stable_libtorch",
    "vllm._moe_C_stable_libtorch",
    "vllm.cumem_allocator",
    "vllm.spinloop",
    "vllm.fs_io_C",
)
EVERYTHING = [
    SimpleNamespace(name=name)
    for name in (*KEPT, "vllm.vllm_flash_attn._vllm_fa2_C", "vllm._flashmla_C", "vllm._deep_gemm_C")
]

TURING = [
    "7.5",
    "7.5+PTX",
    "7.5;7.5",
    "7.5 7.5+PTX",
    "7.5,7.5",
    " 7.5 ",
    "7.5;",
    "Turing",
    "Turing+PTX",
]
OTHERS = ["7.5;8.0", "8.0;7.5", "7.5 8.0", "7.5,8.0+PTX", "7.0;7.5", "8.0", "17.5", "7.55", "75",
          "7x5", "7.5+SASS", "Turing;Ampere", "Volta"]  # fmt: skip


@pytest.mark.parametrize("value", TURING)
def test_turing_alone(value: str) -> None:
    found = setup.keep(EVERYTHING, {"TORCH_CUDA_ARCH_LIST": value})
    assert tuple(extension.name for extension in found) == KEPT


@pytest.mark.parametrize("value", [*OTHERS, "", " ", ";"])
def test_others_keep_everything(value: str) -> None:
    assert setup.keep(EVERYTHING, {"TORCH_CUDA_ARCH_LIST": value}) == EVERYTHING


def test_unset_keeps_everything() -> None:
    assert setup.keep(EVERYTHING, {}) == EVERYTHING


def test_the_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    assert setup.keep(EVERYTHING) == EVERYTHING
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "7.5")
    assert len(setup.keep(EVERYTHING)) == len(KEPT)


def test_the_result_is_a_list_of_its_own() -> None:
    """Upstream appends to it."""
    found = setup.keep(EVERYTHING, {})
    found.append(None)
    assert None not in EVERYTHING


def test_same_extensions_as_the_recipe_builds() -> None:
    script = load(ROOT / "recipes" / "vllm-sm75" / "build.py")
    assert {f"vllm.{name}" for name in script.EXTENSIONS} == setup.KEPT == set(KEPT)
