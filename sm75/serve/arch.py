"""Whether vLLM has code for a model's architecture, and what for.

Followed: ``models/registry.py`` (``inspect_model_cls``, ``_try_resolve_transformers``) and
``config/model.py`` (``_get_default_runner_type``) of vLLM 0.33.0. An architecture that is not in
its registry may run by transformers' own code; whether transformers has it is looked up in the
environment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sm75 import jsontext
from sm75.errors import CheckFailed
from sm75.serve.flags import Given
from sm75.serve.known import Installed, Known

# Why nothing is said of its KV cache.
POOLS = "embeddings or scores take none, or another"


def look(config: Mapping[str, Any], directory: Path, given: Given, here: Installed) -> list[str]:
    """What is to be said of a model's architecture.

    Args:
        config: Its config.json.
        directory: Where it lies.
        given: The user's own flags.
        here: What is installed.

    Raises:
        CheckFailed: vLLM has no code for it, and transformers neither.
    """
    names = [str(name) for name in config.get("architectures") or ()]
    known = here.known
    if known is None:
        unread = f"vLLM {here.release} was not read (sm75/serve/known): neither architecture nor "
        return [unread + "quantization is looked at"]
    if not names or given.has("--hf-overrides"):
        return []
    kind = next((kind for name in names if (kind := _kind(name, known))), "")
    if not kind:
        return _strange(names, config, given, here, known)
    said = []
    if kind == "draft":
        said.append(f"{names[0]} drafts for another model (--speculative-config), and is no model "
                    "to serve by itself")  # fmt: skip
    if pools(config, directory, given, here):
        said.append(
            f"{names[0]} is served for embeddings or scores: there is no chat, so health and "
            "--health call it ill"
        )
    return said


def pools(config: Mapping[str, Any], directory: Path, given: Given, here: Installed) -> bool:
    """Whether vLLM serves a model for embeddings or scores; see :func:`look` for the arguments."""
    known = here.known
    runner = given.value("--runner") or "auto"
    if runner != "auto" or known is None:
        return runner == "pooling"
    names = [str(name) for name in config.get("architectures") or ()]
    kind = next((kind for name in names if (kind := _kind(name, known))), "")
    return kind == "pooling" or (bool(kind) and _sentence(directory))


def _kind(name: str, known: Known) -> str:
    """What an architecture is for; empty: the registry does not have it.

    Of one with a known end another with the same beginning is taken: ``XForSequenceClassification``
    is served with the code of ``XForCausalLM`` (``_normalize_arch``).
    """
    found = next((kind for kind, names in known.architectures.items() if name in names), "")
    if found:
        return found
    for end, runner in known.suffixes:
        if name.endswith(end):
            bases = {name.removesuffix(end) + other for other, _ in known.suffixes}
            every = set[str]().union(*known.architectures.values())
            return ("pooling" if runner == "pooling" else "generate") if bases & every else ""
    return ""


def _strange(
    names: Sequence[str], config: Mapping[str, Any], given: Given, here: Installed, known: Known
) -> list[str]:
    own = any(key.startswith("AutoModel") for key in config.get("auto_map") or {})
    impl = given.value("--model-impl") or "auto"
    name = names[0]
    start = f"vLLM {here.release} has no code of its own for {name}"
    if here.plugins:
        return [f"{start}; {', '.join(here.plugins)} may bring it"]
    if impl in ("auto", "transformers") and (own or here.site is None or _has(here.site, name)):
        where = "the model's own code (--trust-remote-code)" if own else "transformers' code"
        return [f"{start}: it may run by {where}, if that is made for it; not tried"]
    reason = f"{start}, and transformers has none"
    fix = "see whether a newer vLLM has it: python3 orchestrator.py lock --vllm latest --dry-run"
    if name in known.gone:
        reason = f"{name} was supported in vLLM until v{known.gone[name]}, and is not any more"
        fix = "take a newer model"
    elif name in known.elsewhere:
        reason = "a plugin has it, and none is installed"
        fix = f"install it beside vLLM: {known.elsewhere[name]}"
    raise CheckFailed(f"vLLM does not support {name}", why=reason, fix=fix)


def _has(site: Path, name: str) -> bool:
    """Whether transformers has a class of that name, in its models' files."""
    needle = f"class {name}(".encode()
    return any(
        needle in path.read_bytes()
        for path in (site / "transformers" / "models").glob("*/modeling_*.py")
    )


def _sentence(directory: Path) -> bool:
    """Whether sentence-transformers' files make it a model for embeddings, whatever it is called
    (``get_pooling_config``)."""
    try:
        modules = jsontext.loads((directory / "modules.json").read_text(encoding="utf-8"))
        return any(str(module["type"]).rpartition(".")[2] == "Pooling" for module in modules)
    except (OSError, ValueError, LookupError, TypeError):
        return False
