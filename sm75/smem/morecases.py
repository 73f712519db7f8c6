"""The kernels beside attention that Gemma 4 can launch: experts, sampling, LoRA, bookkeeping.

Found by reading who imports a ``triton.jit`` function on the way from the model runner (V2, the
default with Triton) and the Gemma 4 models; ``docs/turing-attention.md`` lists those left out.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

from sm75.smem import faketorch as torch
from sm75.smem.cases import MERGE, Case
from sm75.smem.models import MODELS, Experts

MOE = "vllm.model_executor.layers.fused_moe.fused_moe"
GEMMA4 = "vllm.model_executor.models.gemma4"
LORA = "vllm.lora.ops.triton_ops"
GPU = "vllm.v1.worker.gpu"
TOP_K_P = "vllm.v1.sample.ops.topk_topp_triton"

_DISPATCH = (
    "vllm.model_executor.warmup.jit_warmup",
    "vllm.model_executor.warmup.jit_warmup_triton_helper",
)
_VOCAB = 262_144
_REQUESTS = 64


def cases() -> Iterator[Case]:
    """All of them."""
    for model in MODELS:
        if model.experts is not None:
            for tokens in (1, 96, 4096):
                yield _case(
                    "experts", f"{model.name} experts, {tokens} tokens",
                    (MOE, f"{MOE.rpartition('.')[0]}.utils"), _moe,
                    model.experts, tokens,
                )  # fmt: skip
            yield _case("experts", f"{model.name} router", (GEMMA4,), _route, model.experts)
    for rank in (16, 64):
        for tokens in (16, 512):
            yield _case(
                "lora", f"LoRA rank {rank}, {tokens} tokens",
                (f"{LORA}.lora_shrink_op", f"{LORA}.lora_expand_op", f"{LORA}.kernel_utils",
                 f"{LORA}.utils"),
                _lora, rank, tokens,
            )  # fmt: skip
    for head in (512, 256, 128):
        yield _case("merge", f"merge of attention states, h{head}", (MERGE,), _merge, head)
    for name, call in _SAMPLING.items():
        module = f"{GPU}.{name.partition(':')[0]}" if ":" in name else TOP_K_P
        extra = _DISPATCH if module == TOP_K_P else ()
        yield _case("sampling", name.rpartition(":")[2], (module, *extra), call, module)


def _case(group: str, name: str, modules: tuple[str, ...], call: Any, *args: Any) -> Case:
    return Case(group=group, name=name, modules=modules, call=lambda: call(*args))


def _i32(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, dtype=torch.int32)


def _f32(*shape: int) -> torch.Tensor:
    return torch.empty(*shape)


def _moe(experts: Experts, tokens: int) -> None:
    moe = importlib.import_module(MOE)
    tl = importlib.import_module("vllm.triton_utils").tl
    config = moe.get_default_config(
        tokens, experts.count, 2 * experts.inner, experts.hidden, experts.chosen, None
    )
    rows = tokens * experts.chosen
    block = config["BLOCK_SIZE_M"]
    padded = rows + experts.count * (block - 1)
    shapes = ((experts.hidden, 2 * experts.inner), (experts.inner, experts.hidden))
    for (size, out), weighted in zip(shapes, (False, True), strict=True):
        moe.invoke_fused_moe_triton_kernel(
            A=torch.empty(rows if weighted else tokens, size, dtype=torch.float16),
            B=torch.empty(experts.count, out, size, dtype=torch.float16),
            C=torch.empty(tokens, experts.chosen, out, dtype=torch.float16),
            A_scale=None, B_scale=None,
            topk_weights=_f32(tokens, experts.chosen),
            sorted_token_ids=_i32(padded),
            expert_ids=_i32(-(-padded // block)),
            num_tokens_post_padded=_i32(1),
            mul_routed_weight=weighted, top_k=1 if weighted else experts.chosen,
            config=config, compute_type=tl.float16,
            use_fp8_w8a8=False, use_int8_w8a8=False, use_int8_w8a16=False, use_int4_w4a16=False,
            per_channel_quant=False,
        )  # fmt: skip


def _route(experts: Experts) -> None:
    gemma4 = importlib.import_module(GEMMA4)
    gemma4.gemma4_fused_routing_kernel_triton(
        _f32(_REQUESTS, experts.count), experts.chosen, _f32(experts.count)
    )


def _lora(rank: int, tokens: int) -> None:
    hidden, slots = MODELS[0].hidden, 4
    shrink = importlib.import_module(f"{LORA}.lora_shrink_op")
    expand = importlib.import_module(f"{LORA}.lora_expand_op")
    mapping = (
        _i32(tokens), _i32(tokens), _i32(slots + 1), _i32(slots + 2), _i32(slots + 1),
        Scalar(0), Scalar(slots),
    )  # fmt: skip
    half = torch.float16
    shrink._lora_shrink(
        torch.empty(tokens, hidden, dtype=half),
        [torch.empty(slots, rank, hidden, dtype=half)],
        _f32(1, tokens, rank),
        *mapping,
        1.0,
    )
    expand._lora_expand(
        _f32(1, tokens, rank),
        [torch.empty(slots, hidden, rank, dtype=half)],
        torch.empty(tokens, hidden, dtype=half),
        *mapping,
    )


class Scalar(torch.Tensor):
    """A tensor of one number, which the wrapper asks for."""

    def __init__(self, value: int) -> None:
        super().__init__((1,), torch.int32)
        self.value = value

    def item(self) -> int:
        return self.value


def _merge(head: int) -> None:
    ops = importlib.import_module(MERGE)
    out = torch.empty(256, 8, head, dtype=torch.float16)
    lse = _f32(8, 256)
    ops.merge_attn_states(
        output=out, prefix_output=out, prefix_lse=lse, suffix_output=out, suffix_lse=lse
    )


def _logits() -> torch.Tensor:
    return _f32(_REQUESTS, _VOCAB)


def _temperature(module: str) -> None:
    _of(module).apply_temperature(_logits(), _i32(_REQUESTS), _f32(_REQUESTS))


def _gumbel(module: str) -> None:
    _of(module).gumbel_sample(
        _logits(), _i32(_REQUESTS), _f32(_REQUESTS),
        torch.empty(_REQUESTS, dtype=torch.int64), torch.empty(_REQUESTS, dtype=torch.int64),
        apply_temperature=True, is_drafting=False,
    )  # fmt: skip


def _min_p(module: str) -> None:
    _of(module).apply_min_p(_logits(), _i32(_REQUESTS), _f32(_REQUESTS))


def _token_logprobs(module: str) -> None:
    _of(module).compute_token_logprobs(_logits(), torch.empty(_REQUESTS, 8, dtype=torch.int64))


def _nans(module: str) -> None:
    _of(module).get_num_nans(_logits())


def _top_k_p(module: str) -> None:
    _of(module).apply_top_k_top_p_triton(_logits(), _i32(_REQUESTS), _f32(_REQUESTS))


def _penalties(module: str) -> None:
    words = -(-_VOCAB // 32)
    _of(module).apply_penalties(
        _logits(), _i32(_REQUESTS), _i32(_REQUESTS), _i32(_REQUESTS), _f32(_REQUESTS),
        _f32(_REQUESTS), _f32(_REQUESTS), _i32(_REQUESTS, words), _i32(_REQUESTS, _VOCAB),
    )  # fmt: skip


def _positions(module: str) -> None:
    _of(module).prepare_pos_seq_lens(
        _i32(_REQUESTS), _i32(_REQUESTS + 1), _i32(_REQUESTS),
        torch.empty(4096, dtype=torch.int64), _i32(_REQUESTS),
    )  # fmt: skip


def _prefill_inputs(module: str) -> None:
    _of(module).prepare_prefill_inputs(
        _i32(4096), _i32(_REQUESTS), _i32(_REQUESTS), _i32(_REQUESTS + 1), _i32(_REQUESTS, 8192),
        _i32(_REQUESTS), _i32(_REQUESTS),
    )  # fmt: skip


def _of(module: str) -> Any:
    return importlib.import_module(module)


_SAMPLING = {
    "sample.gumbel:temperature": _temperature,
    "sample.gumbel:sampling": _gumbel,
    "sample.min_p:min-p": _min_p,
    "sample.logprob:log-probabilities": _token_logprobs,
    "sample.penalties:penalties": _penalties,
    "metrics.logits:NaN count": _nans,
    "input_batch:positions": _positions,
    "input_batch:prefill inputs": _prefill_inputs,
    "top-k and top-p": _top_k_p,
}
