"""GPTQ's and AWQ's own figures, which vLLM refuses as it reads the checkpoint.

Followed: ``auto_gptq.py`` (``AutoGPTQConfig.__init__``, ``from_config``), ``auto_awq.py`` (the same
of ``AutoAWQConfig``) and ``gptq_utils.py`` (``normalize_and_validate_gptq_desc_act``). What a
release takes is read out of it (:mod:`sm75.serve.sdist`). Group sizes are left to vLLM: what
Marlin does not take another kernel may.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sm75.serve.known import Known

# Keys that must be there, each by any of its names (from_config).
_KEYS = {
    "auto_gptq": (("bits",), ("group_size",), ("desc_act",), ("sym",)),
    "auto_awq": (("w_bit", "bits"), ("q_group_size", "group_size"), ("zero_point",)),
}


def reason(method: str, own: Mapping[str, Any], known: Known) -> str:
    """Why a checkpoint's figures are refused.

    Args:
        method: vLLM's, ``auto_gptq`` or ``auto_awq``; of others nothing is known here.
        own: The checkpoint's ``quantization_config``.
        known: The release's tables.

    Returns:
        The reason; empty: nothing is known against it.
    """
    for names in _KEYS.get(method, ()):
        if not any(name in own for name in names):
            return f"its quantization_config has no {' or '.join(names)}"
    if method == "auto_gptq":
        return _gptq(own, known)
    if method == "auto_awq":
        key = next(name for name in _KEYS[method][0] if name in own)
        if own[key] not in known.awq_bits:
            allowed = " or ".join(map(str, known.awq_bits))
            return f"its {key} is {own[key]!r}, and vLLM takes {allowed} of AWQ"
    return ""


def _gptq(own: Mapping[str, Any], known: Known) -> str:
    bits, symmetric = own["bits"], own["sym"]
    if (bits, symmetric) not in known.gptq_bits:
        allowed = " or ".join(
            f"{number} bits {'' if even else 'not '}symmetric" for number, even in known.gptq_bits
        )
        return (
            f"its bits are {bits!r} and sym is {str(symmetric).lower()}, and vLLM takes {allowed} "
            "of GPTQ"
        )
    if known.act_order:
        return ""
    if own["desc_act"] and own["group_size"] != -1:
        return "its desc_act is true, and vLLM takes no activation order any more"
    rules = own.get("dynamic")
    for pattern, rule in (rules if isinstance(rules, Mapping) else {}).items():
        if str(pattern).startswith("-:") or not isinstance(rule, Mapping):
            continue
        if rule.get("desc_act", own["desc_act"]) and rule.get(
            "group_size", own["group_size"]
        ) != -1:  # fmt: skip
            return f"desc_act is true by its dynamic rule {pattern!r}, which vLLM does not take"
    return ""
