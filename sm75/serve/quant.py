"""How a checkpoint is quantized, as vLLM understands it, and whether that runs on 7.5.

Followed: ``model_arch_config_convertor.py`` (``_normalize_quantization_config``),
``config/model.py`` (``_verify_quantization``), ``config/vllm.py`` (``_get_quantization_config``)
and ``compressed_tensors.py`` (``_get_scheme_from_parts``) of vLLM 0.33.0. What each method needs is
read out of the release (:mod:`sm75.serve.sdist`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sm75 import jsontext
from sm75.errors import CheckFailed, Sm75Error, UsageError
from sm75.serve import packed
from sm75.serve.dtype import WIDE
from sm75.serve.flags import Given
from sm75.serve.known import Installed, Known

_FLASHINFER = "its kernels are FlashInfer's, for capability 10.0"
# A T4G's, times ten.
_HERE = 75
_FIX = (
    "take another quantization of the model: AWQ, GPTQ, FP8, NVFP4, or compressed-tensors with "
    "int4 or int8 weights"
)
# What quantizes a float checkpoint to FP8 while it loads. ``fp8`` alone is an old name of the
# first (weight_utils.py, get_quant_config).
ONLINE_FP8 = ("fp8", "fp8_per_tensor", "fp8_per_block", "fp8_per_channel")
# Of a method that checkpoints name: the user's names for it (override_quantization_method of
# auto_gptq.py and auto_awq.py).
_NAMES = {
    "auto_gptq": ("gptq", "gptq_marlin", "auto_gptq", "marlin", "moe_wna16"),
    "auto_awq": ("awq", "awq_marlin", "auto_awq", "marlin", "moe_wna16"),
    "gpt_oss_mxfp4": ("mxfp4",),
}
# Modules that a method imports and the channel does not have (lock/omissions.toml).
_MODULES = {"humming": "humming", "torchao": "torchao"}
# Types of Marlin's kernels for float16 by what they multiply: weights, and scales where those have
# another type (generate_kernels.py, QUANT_CONFIGS). On 7.5 it has no rival for these.
_MARLIN = {
    "FP8": ("kFloat16", "kFE4M3fn", ""),
    "NVFP4": ("kFloat16", "kFE2M1f", "kFE4M3fn"),
    "MXFP8": ("kFloat16", "kFE4M3fn", "kFE8M0fnu"),
    "MXFP4": ("kFloat16", "kFE2M1f", "kFE8M0fnu"),
}
_FLOATS = {
    "fp8": ("FP8",), "deepseek_v4_fp8": ("FP8",), "modelopt_fp4": ("NVFP4",),
    "modelopt_mixed": ("FP8", "NVFP4"), **dict.fromkeys(ONLINE_FP8, ("FP8",)),
    "mxfp8": ("MXFP8",), "mxfp4": ("MXFP4",),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Quantization:
    """A checkpoint's quantization.

    Attributes:
        said: The method as the checkpoint says it; empty: none.
        method: The method that vLLM takes for it.
        schemes: Classes of compressed-tensors or Quark that decide whether it runs; the others need
            no more than 7.5.
        floats: Small floats that its weights are: FP8, NVFP4, MXFP8, MXFP4.
        cache: The type of KV cache that it asks for; empty: none.
        block: Side of the blocks of FP8 weights that share a scale; 0: none do.
        own: All that the checkpoint says of it.
    """

    said: str = ""
    method: str = ""
    schemes: tuple[str, ...] = ()
    floats: tuple[str, ...] = ()
    cache: str = ""
    block: int = 0
    own: Mapping[str, Any] = field(default_factory=dict)


def read(config: Mapping[str, Any], directory: Path) -> Quantization:
    """Find out how a checkpoint is quantized.

    Args:
        config: Its config.json.
        directory: Where it lies; older ModelOpt checkpoints have a file of their own there.
    """
    own = _own(config, directory)
    if own is None:
        return Quantization()
    said = _method(own)
    method, schemes = _taken(said, own, config), list(_schemes(said, own))
    return Quantization(
        said=str(own.get("quant_method") or said), method=method,
        schemes=tuple(dict.fromkeys(one for one in schemes if one not in _MARLIN)),
        floats=tuple(dict.fromkeys([*_FLOATS.get(method, ()),
                                    *(one for one in schemes if one in _MARLIN)])),
        cache=_cache(said, own),
        block=int((own.get("weight_block_size") or [0])[0]),
        own=own,
    )  # fmt: skip


def _own(config: Mapping[str, Any], directory: Path) -> Mapping[str, Any] | None:
    for part in (config, config.get("text_config") or {}):
        found = part.get("quantization_config") or part.get("compression_config")
        if isinstance(found, dict):
            return found
    try:
        found = jsontext.loads((directory / "hf_quant_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _method(own: Mapping[str, Any]) -> str:
    inner = own.get("quantization")
    inner = inner if isinstance(inner, dict) else {}
    if (own.get("producer") or {}).get("name") == "modelopt" or "modelopt_quant_config" in inner:
        algorithm = str(inner.get("quant_algo") or "").upper()
        if algorithm:
            return {"NVFP4": "modelopt_fp4", "MIXED_PRECISION": "modelopt_mixed"}.get(
                algorithm, "modelopt"
            )
    method = str(own.get("quant_method") or "").lower()
    return method.replace("compressed_tensors", "compressed-tensors")


def _taken(said: str, own: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """The method that takes a checkpoint over, in the order of ``_verify_quantization``."""
    if said.startswith("modelopt"):
        inner = own.get("quantization")
        holder = inner if isinstance(inner, dict) else own
        algorithm = str(holder.get("quant_algo") or "").upper()
        for has, method in (("FP4", "modelopt_fp4"), ("MXFP8", "modelopt_mxfp8"),
                            ("MIXED_PRECISION", "modelopt_mixed")):  # fmt: skip
            if has in algorithm:
                return method
        return said
    kind = str(config.get("model_type") or "")
    if said == "mxfp4" and kind == "gpt_oss":
        return "gpt_oss_mxfp4"
    if said == "fp8" and kind.startswith("deepseek_v4"):
        return "deepseek_v4_fp8"
    return {"gptq": "auto_gptq", "awq": "auto_awq", "auto-round": "inc"}.get(said, said)


def _schemes(said: str, own: Mapping[str, Any]) -> Iterator[str]:
    """Classes, or kinds of small floats."""
    if said == "compressed-tensors":
        for group in (own.get("config_groups") or {}).values():
            weights, inputs = group.get("weights") or {}, group.get("input_activations") or {}
            bits, micro = weights.get("num_bits"), weights.get("group_size") == 32
            if weights.get("type") == "float" and bits == 4:
                yield "CompressedTensorsW4A4Mxfp4" if micro else "NVFP4"
            elif weights.get("type") == "float" and bits == 8:
                yield "MXFP8" if micro else "FP8"
            elif bits == 4 and inputs.get("type") == "float":
                yield "CompressedTensorsW4A8Fp8"
    elif said == "quark":
        parts = [own.get("global_quant_config"), *(own.get("layer_quant_config") or {}).values()]
        for part in parts:
            weight, inputs = (part or {}).get("weight"), (part or {}).get("input_tensors")
            types = [one.get("dtype") for one in (weight, inputs) if isinstance(one, dict)]
            if types == ["fp8_e4m3", "fp8_e4m3"]:
                yield "QuarkW8A8Fp8"


def _cache(said: str, own: Mapping[str, Any]) -> str:
    """The KV cache that ``auto`` means then (torch_utils.py, get_kv_cache_quant_algo_string;
    attention.py, kv_cache_scheme)."""
    inner = own.get("quantization")
    inner = inner if isinstance(inner, dict) and said.startswith("modelopt") else {}
    scheme = inner.get("kv_cache_scheme") or own.get("kv_cache_scheme")
    if isinstance(scheme, dict):
        return "nvfp4" if scheme.get("num_bits") == 4 else "fp8"
    if said.startswith("modelopt"):
        return str(inner.get("kv_cache_quant_algo") or own.get("kv_cache_quant_algo") or "").lower()
    return ""


def refuse(found: Quantization, given: Given, here: Installed) -> None:
    """Refuse what cannot run on 7.5, or not in this environment.

    Args:
        found: The checkpoint's quantization.
        given: The user's own flags.
        here: What is installed.

    Raises:
        UsageError: ``--quantization`` asks for it.
        CheckFailed: The checkpoint needs it.
    """
    known = here.known
    if known is None:
        return
    asked = given.value("--quantization") or ""
    own = (found.method, found.said, *_NAMES.get(found.method, ()), "humming")
    if asked and found.method and asked not in own:
        raise UsageError(
            f"--quantization {asked} does not suit the checkpoint",
            why=f"it is quantized by {found.said} already", fix="leave --quantization out",
        )  # fmt: skip
    name = asked if asked and (not found.method or asked in _MODULES) else found.method
    if name:
        reason = _reason(name, found, given, known, here, online=name == asked)
        if reason:
            raise _error(f"--quantization {asked}" if name == asked else
                         f"the checkpoint's quantization, {found.said},", reason,
                         asked=name == asked)  # fmt: skip


def _error(what: str, reason: str, *, asked: bool) -> Sm75Error:
    kind = UsageError if asked else CheckFailed
    return kind(f"{what} cannot run here", why=reason,
                fix="leave --quantization out, or: fp8_per_tensor" if asked else _FIX)  # fmt: skip


def _reason(
    name: str, found: Quantization, given: Given, known: Known, here: Installed, *, online: bool
) -> str:
    """Why a method cannot run; empty: nothing is known against it."""
    online = online and not found.method and name in (*known.online, "fp8", "online")
    if name == "nvfp4_per_token":
        return _FLASHINFER
    method = known.methods.get("online" if online else name)
    if method is None:
        names = f"; {', '.join(here.plugins)} may bring it" if here.plugins else ""
        return "" if names else f"vLLM {here.release} has no method of that name"
    if method.capability > _HERE:
        return _needs(method.name, method.capability, here)
    wanted = "float32" if given.value("--dtype") in WIDE else "float16"
    if method.types and wanted not in method.types:
        return f"it computes in {', '.join(method.types)}, not in {wanted}"
    # That kernel of experts has rules of its own.
    ours = name == found.method and given.value("--quantization") != "moe_wna16"
    if ours and (figures := packed.reason(name, found.own, known)):
        return figures
    for kind in _FLOATS.get(name, ()) if online else found.floats:
        if _MARLIN[kind] not in known.marlin:
            return f"vLLM {here.release} has no kernel for {kind} weights and float16 on 7.5"
    module = _MODULES.get(name)
    if module and here.lacks(module):
        return f"the environment has no module {module}, which it needs"
    if name in known.deprecated and not given.has("--allow-deprecated-quantization"):
        return f"vLLM {here.release} calls it deprecated: --allow-deprecated-quantization"
    for scheme in found.schemes:
        if known.schemes.get(scheme, 0) > _HERE:
            return _needs(scheme, known.schemes[scheme], here)
    return ""


def _needs(name: str, capability: int, here: Installed) -> str:
    least = f"{capability // 10}.{capability % 10}"
    return f"{name} of vLLM {here.release} needs capability {least}; a T4G has 7.5"


def notes(found: Quantization, given: Given) -> list[str]:
    """What is to be said of what runs."""
    said = []
    floats = found.floats or _FLOATS.get(given.value("--quantization") or "", ())
    if floats:
        said.append(
            f"{' and '.join(floats)} weights: 7.5 has no arithmetic for them, Marlin multiplies "
            "float16 by them as they are: less memory, no faster arithmetic. Not tried on a T4G"
        )
    if found.cache in ("fp8", "nvfp4") and not given.has("--kv-cache-dtype"):
        said.append(
            f"the checkpoint asks for a KV cache in {found.cache}, which 7.5 cannot run: float16 "
            "is passed"
        )
    return said
