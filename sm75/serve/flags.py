"""The user's own flags for ``vllm serve``: what they say, and what cannot work on 7.5."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sm75 import jsontext
from sm75.doctor import rules
from sm75.errors import UsageError
from sm75.serve import numbers

# Other spellings (vllm/engine/arg_utils.py, and FlexibleArgumentParser: underscores).
_ALIASES = {
    "-tp": "--tensor-parallel-size", "-pp": "--pipeline-parallel-size", "-q": "--quantization",
    "-dp": "--data-parallel-size", "-dcp": "--decode-context-parallel-size",
    "-pcp": "--prefill-context-parallel-size", "-ep": "--enable-expert-parallel",
    "-sc": "--speculative-config", "-dc": "--diffusion-config", "-ac": "--attention-config",
    "-cc": "--compilation-config",
}  # fmt: skip
# Flags that change what the card's memory is used for, and are not in the table; what of them.
_UNCOUNTED = {
    "--tensor-parallel-size": "an even share a card; NCCL's buffers are not counted",
    "--pipeline-parallel-size": "stages taken as equal; NCCL's buffers are not counted",
    "--data-parallel-size": "replicas, a card each",
    "--decode-context-parallel-size": "the cache's shares",
    "--prefill-context-parallel-size": "the cache's shares",
    "--enable-expert-parallel": "experts taken as even shares",
    "--enable-lora": "adapters and their buffers",
    "--speculative-config": "the draft model and its cache",
    "--spec-model": "the draft model and its cache",
    "--spec-method": "the draft and its cache",
    "--limit-mm-per-prompt": "a guess stands for images and sound",
    "--language-model-only": "a guess stands for images and sound",
    "--mm-processor-kwargs": "a guess stands for images and sound",
    "--mm-ipc-gpu-memory-gb": "its own",
    "--quantization-config": "weights are taken as they are in the files",
    "--hf-overrides": "config.json is taken as it is",
    "--cpu-offload-gb": "weights that stay in RAM",
    "--offload-backend": "weights that stay in RAM",
    "--kv-cache-dtype-skip-layers": "the cache is taken as float16",
    "--num-gpu-blocks-override": "the cache's size",
    "--block-size": "blocks are taken as 16 tokens",
    "--compilation-config": "its CUDA graphs",
    "--cudagraph-capture-sizes": "CUDA graphs are taken as vLLM chooses them",
    "--enable-dbo": "its second batch",
    "--model-loader-extra-config": "what it loads",
}
# Types of a KV cache that run on 7.5: those that verify --gpu has tried (docs/claims.md).
_CACHES = ("auto", "float16", "int8_per_token_head", "int4_per_token_head")
_BF16 = "bfloat16 needs capability 8.0 or newer; a T4G has 7.5 (vLLM refuses it as well)"
_FP8 = (
    "7.5 has no instructions for fp8: Triton ends with 'fp8e4nv not supported in this "
    "architecture'; fp8 begins with 8.9"
)
_FLASH = {
    "FLASHINFER": "the package has no FlashInfer: its kernels for 7.5 fail (explain knows how)",
    "FLASH": "FlashAttention has kernels for 8.0 and newer only, and the package has none of them",
}


@dataclass(frozen=True)
class Given:
    """The arguments after ``--``.

    Attributes:
        arguments: As they were typed.
    """

    arguments: tuple[str, ...]

    def value(self, flag: str) -> str | None:
        """What a flag was given, the last time; empty for a switch; nothing where it is not there.

        Args:
            flag: Its long name, with dashes.
        """
        found = None
        for at, argument in enumerate(self.arguments):
            name, equals, text = argument.partition("=")
            if _canonical(name) != flag:
                continue
            following = self.arguments[at + 1 : at + 2]
            found = text if equals else (following[0] if following else "")
            if not equals and found.startswith("--"):
                found = ""
        return found

    def has(self, flag: str) -> bool:
        """Whether a flag is there."""
        return self.value(flag) is not None

    def number(self, flag: str) -> int | None:
        """A number of tokens, sequences or cards; ``32k`` is 32,000 and ``32K`` 32,768.

        Raises:
            UsageError: It is none, or below 1.
        """
        text = self.value(flag)
        if text is None or text.strip().lower() in ("auto", "-1"):
            return None
        try:
            found = numbers.human(text)
        except ValueError:
            found = 0
        if found < 1:
            raise UsageError(
                f"{flag} {text} is no number for it",
                why="it takes a whole number of 1 or more; 32k is 32,000 and 32K 32,768 "
                "(vllm/utils/argparse_utils.py)",
                fix=f"give {flag} such a number, or leave it out",
            )
        return found

    def share(self) -> float:
        """--gpu-memory-utilization; 0 where it is not there.

        Raises:
            UsageError: It is no number above 0 and up to 1.
        """
        text = self.value("--gpu-memory-utilization")
        if text is None:
            return 0.0
        try:
            found = float(text)
        except ValueError:
            found = 0.0
        if not 0 < found <= 1:
            raise UsageError(
                f"--gpu-memory-utilization {text} is no share",
                why="it takes a number above 0 and at most 1: vLLM's part of the card's memory "
                "(vllm/config/cache.py, CacheConfig)",
                fix="for instance: --gpu-memory-utilization 0.9",
            )
        return found

    def backends(self) -> list[str]:
        """The attention backends that are asked for."""
        found = [self.value("--attention-backend"), self.value("--attention-config.backend")]
        if text := self.value("--attention-config"):
            try:
                config = jsontext.loads(text)
                found.append(str(config.get("backend") or ""))
            except (ValueError, AttributeError):
                pass  # vLLM says what is wrong with it
        return [name.upper() for name in found if name]


def _canonical(name: str) -> str:
    first, dot, rest = name.partition(".")
    return _ALIASES.get(first, first.replace("_", "-")) + dot + rest


def merge(ours: Sequence[tuple[str, str]], given: Given) -> tuple[list[str], list[str]]:
    """Our flags without those that the user gives, then the user's.

    Returns:
        The arguments, and the flags of ours that gave way.
    """
    kept, gone = [], []
    for flag, value in ours:
        if given.has(flag):
            gone.append(flag)
        else:
            kept += [flag, value]
    return kept + list(given.arguments), gone


def refuse(given: Given, environment: Mapping[str, str]) -> None:
    """Refuse what cannot work on 7.5.

    Raises:
        UsageError: It cannot.
    """
    dtype = given.value("--dtype")
    if dtype == "bfloat16":
        raise UsageError(
            "--dtype bfloat16 cannot work", why=_BF16,
            fix="leave --dtype out: float16 is passed, and bfloat16 weights are converted",
        )  # fmt: skip
    cache = given.value("--kv-cache-dtype")
    if cache is not None and cache not in _CACHES:
        why = _BF16 if cache == "bfloat16" else _FP8 if "fp8" in cache else (
            "nothing was tried on 7.5 but " + ", ".join(_CACHES))  # fmt: skip
        raise UsageError(
            f"--kv-cache-dtype {cache} cannot work" if why in (_BF16, _FP8)
            else f"--kv-cache-dtype {cache} is not known to work", why=why,
            fix="leave --kv-cache-dtype out; for more tokens: int8_per_token_head",
        )  # fmt: skip
    asked = [(name, f"--attention-backend {name}") for name in given.backends()]
    if name := environment.get("VLLM_ATTENTION_BACKEND", ""):
        asked.append((name.upper(), f"VLLM_ATTENTION_BACKEND={name}"))
    if environment.get("VLLM_USE_FLASHINFER_SAMPLER") == "1":
        asked.append(("FLASHINFER", "VLLM_USE_FLASHINFER_SAMPLER=1"))
    for name, said in asked:
        reason = next((why for start, why in _FLASH.items() if name.startswith(start)), "")
        if reason:
            unset = said.partition("=")[0]
            raise UsageError(
                f"{said} cannot work", why=reason,
                fix=f"unset {unset}" if "=" in said else "leave it out: vLLM takes TRITON_ATTN",
            )  # fmt: skip
    if environment.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
        raise UsageError(
            "CUDA_VISIBLE_DEVICES hides every GPU", why="it is empty or -1",
            fix="unset CUDA_VISIBLE_DEVICES",
        )  # fmt: skip


def warnings(given: Given, environment: Mapping[str, str]) -> list[str]:
    """What does nothing or hurts, by ``doctor``'s list, and what is not looked at."""
    found = [f"{name}: {says}" for name, _, says in rules.variables(environment)]
    if given.has("--config"):
        found.append("--config: the file is not read here; what it sets is not in the arithmetic")
    uncounted = [f"{flag} ({what})" for flag, what in _UNCOUNTED.items()
                 if given.value(flag) not in (None, "1")]  # fmt: skip
    if uncounted:
        found.append("not counted in the table: " + "; ".join(uncounted))
    if given.value("--dtype") in ("float32", "float"):
        found.append("--dtype float32: weights take twice the memory, and it is not tried here")
    cache = given.value("--kv-cache-dtype")
    if cache and cache not in ("auto", "float16"):
        found.append(f"--kv-cache-dtype {cache}: counted as float16; more tokens than said fit")
    return found
