"""From a model and the user's flags to the command line, with the arithmetic behind it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from sm75.doctor.rules import T4G_MIB
from sm75.errors import CheckFailed
from sm75.serve import arch, contents, dtype, flags, known, misfit, quant, sane, typed
from sm75.serve import host as hosts
from sm75.serve import length as lengths
from sm75.serve import shape as shapes
from sm75.serve.choose import Asked, case_of, choose
from sm75.serve.flags import Given
from sm75.serve.host import Host
from sm75.serve.planned import Plan
from sm75.serve.weights import measure


def make(
    program: Path,
    name: str,
    model: Path,
    given: Given,
    *,
    environment: Mapping[str, str],
    card_mib: int = 0,
    host: Host | None = None,
) -> Plan:
    """Plan a start.

    Args:
        program: vLLM's.
        name: The model as the user says it.
        model: Its directory.
        given: The user's own flags.
        environment: Variables.
        card_mib: The card's memory as nvidia-smi says; 0: none is seen, a T4G's is taken.
        host: The machine's memory; nothing where it cannot be seen.

    Raises:
        UsageError: The flags or variables ask for what cannot work.
        CheckFailed: The model does not fit, or is incomplete.
    """
    here = known.look(program)
    given = typed.check(given, here)
    flags.refuse(given, environment)
    seen, card_mib = bool(card_mib), card_mib or T4G_MIB
    contents.refuse_other_kinds(model)
    config = shapes.config(model)
    with shapes.understood(model):
        sane.check(config, model / "config.json")
        said = arch.look(config, model, given, here)
        found = quant.read(config, model)
        quant.refuse(found, given, here)
        dtype.refuse(config, given, here)
        shape = shapes.parse(config)
    lengths.refuse(shape.length, given.number("--max-model-len"), given, environment)
    if arch.pools(config, model, given, here):
        shape = replace(shape, unknown=arch.POOLS)
    weights = measure(model, tied=shape.tied, layers=shape.count)
    if weights is None:
        raise CheckFailed(
            f"{model} has no weights", why="there are no .safetensors, .bin or .pt files in it",
            fix="download the model again",
        )  # fmt: skip
    contents.refuse_without_tokenizer(model, given)
    element = dtype.element_bytes(config, given, here)
    cache_type, why = dtype.cache_type(found.cache, given)
    shape = replace(shape, quantized=found.said or given.value("--quantization") or "")
    asked = Asked.of(given)
    misfit.refuse_cut(shape, asked)
    case = case_of(card_mib, weights, found, shape, given, seen=seen, element=element,
                   item=dtype.cache_bytes(element, given))  # fmt: skip
    choice = choose(case, asked)
    misfit.refuse(case, choice, given)
    budget, settings, length = choice.budget, choice.settings, choice.length
    ours = [
        ("--dtype", "float16"),
        ("--kv-cache-dtype", cache_type),
        ("--gpu-memory-utilization", f"{budget.share:g}"),
        ("--max-model-len", str(length) if length else "auto"),
        ("--max-num-seqs", str(settings.seqs)),
    ]
    arguments, gave_way = flags.merge(ours, given)
    said += lengths.notes(shape.length, given)
    said += quant.notes(found, given) + ([why] if why else [])
    said += flags.warnings(given, environment)
    if given.has("--kv-cache-memory-bytes"):
        said.append("--kv-cache-memory-bytes: vLLM takes that, whatever the table says")
    said += misfit.notes(choice)
    return Plan(
        command=(str(program), "serve", name, *arguments), model=model, shape=shape,
        weights=weights, budget=budget, cache=choice.cache, settings=settings, length=length,
        gave_way=tuple(gave_way), host=tuple(hosts.judge(weights, host or Host())),
        warnings=tuple(said), given=given,
    )  # fmt: skip
