"""Make the models that are served: random, sane, and damaged; each a Hugging Face cache.

    PYTHON -m tests.realserver.make LESSONS.json DIRECTORY [NAME ...]

PYTHON has torch, transformers and tokenizers. Each model is the only one of its cache, for
``transformers serve`` lists what the cache has. All are seeded; a CPU does.
"""

from __future__ import annotations

import importlib
import json
import math
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.device import models as gemma

VOCABULARY = 2048
PAD, START, END = "<pad>", "<|im_start|>", "<|im_end|>"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Sequences of sums, and of the other two questions, in one step of training.
_SUMS, _PROSE = 96, 4
# Seconds of training after which it has failed; steps between two looks at what is learnt.
_LONGEST, _LOOK = 900.0, 50
# The rate of learning: up to the highest in the first steps, then down a cosine to the lowest.
_RATE, _LOWEST_RATE, _WARM_UP, _DOWN = 3e-3, 1e-4, 50, 1000
# What is added to each weight of the damaged model, in standard deviations of its tensor.
_DAMAGE = 1.0

torch: Any = None
transformers: Any = None


def tokenizer(lessons: dict[str, Any]) -> Any:
    """A byte-level BPE tokenizer, made of the project's prose and the lessons."""
    tokenizers: Any = importlib.import_module("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[PAD, START, END], show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    taught = [part for name in ("sums", "prose") for lesson in lessons[name] for part in lesson]
    made.train_from_iterator([*lessons["text"], *taught], trainer)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token=PAD, eos_token=END, chat_template=TEMPLATE,
        additional_special_tokens=[START], clean_up_tokenization_spaces=False,
    )  # fmt: skip


def llama(words: Any) -> Any:
    """A small Llama with random weights; head size 64, which vLLM's kernels take."""
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=128, intermediate_size=512, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=1, head_dim=64, tie_word_embeddings=True,
            max_position_embeddings=1024, pad_token_id=words.pad_token_id,
            eos_token_id=words.eos_token_id, bos_token_id=None,
        )
    )  # fmt: skip


def random_llama(words: Any, lessons: dict[str, Any]) -> Any:
    """As it is before any training."""
    torch.manual_seed(1)
    return llama(words)


def random_gemma(words: Any, lessons: dict[str, Any]) -> Any:
    """Shaped like Gemma 4 E2B: half of that of the device tests, with a real tokenizer."""
    made = gemma.random_model(gemma.config(VOCABULARY, hidden=256, layers=4)).float()
    made.config.pad_token_id = made.generation_config.pad_token_id = words.pad_token_id
    made.config.eos_token_id = made.generation_config.eos_token_id = words.eos_token_id
    made.config.bos_token_id = made.generation_config.bos_token_id = None
    return made


def sane(words: Any, lessons: dict[str, Any]) -> Any:
    """The same Llama, trained until it gives every answer of the lessons, greedily.

    Raises:
        RuntimeError: It did not learn them in time.
    """
    torch.manual_seed(2)
    model = llama(words)
    sums, prose = (_encode(words, lessons[name]) for name in ("sums", "prose"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=_RATE, weight_decay=0.0)
    started = time.monotonic()
    for step, (some, more) in enumerate(
        zip(_batches(sums, _SUMS), _batches(prose, _PROSE), strict=False)
    ):
        loss = _loss(model, words, some) + _loss(model, words, more)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = _rate(step)
        optimizer.step()
        if step % _LOOK == _LOOK - 1:
            seconds = time.monotonic() - started
            wrong = _wrong(model, words, [*prose, *sums])
            print(
                f"step {step + 1}: loss {loss.item():.4f}, {wrong} answers wrong, {seconds:.0f} s",
                flush=True,
            )
            if not wrong:
                return model
            if seconds > _LONGEST:
                break
    raise RuntimeError(f"{wrong} answers of {len(sums) + len(prose)} are not learnt")


def _rate(step: int) -> float:
    if step < _WARM_UP:
        return _RATE * (step + 1) / _WARM_UP
    down = (1 + math.cos(math.pi * min(1.0, step / _DOWN))) / 2
    return _LOWEST_RATE + (_RATE - _LOWEST_RATE) * down


def damaged(words: Any, lessons: dict[str, Any], learnt: Any = None) -> Any:
    """The sane model with noise on its weights, as wrong numbers of a kernel would put it."""
    torch.manual_seed(3)
    with torch.no_grad():
        for weight in learnt.parameters():
            if weight.ndim > 1:
                weight.add_(torch.randn_like(weight) * weight.std() * _DAMAGE)
    return learnt


def _encode(words: Any, lessons: list[list[str]]) -> list[tuple[list[int], int]]:
    """Each lesson's tokens, and where its answer starts."""
    found = []
    for system, question, answer in lessons:
        said = [{"role": "system", "content": system}] if system else []
        said.append({"role": "user", "content": question})
        asked = words.apply_chat_template(said, add_generation_prompt=True, tokenize=False)
        before = words.encode(asked, add_special_tokens=False)
        tokens = [*before, *words.encode(answer, add_special_tokens=False), words.eos_token_id]
        found.append((tokens, len(before)))
    return found


def _batches(rows: list[Any], size: int) -> Iterator[list[Any]]:
    generator = torch.Generator().manual_seed(4)
    while True:
        order = torch.randperm(len(rows), generator=generator).tolist()
        for start in range(0, len(order) - size + 1, size):
            yield [rows[place] for place in order[start : start + size]]


def _answers(model: Any, words: Any, rows: list[Any]) -> tuple[Any, Any, Any]:
    """Logits before each token of the answers, the right tokens, and which row each is of."""
    longest = max(len(tokens) for tokens, _ in rows)
    ids = torch.full((len(rows), longest), words.pad_token_id)
    answer = torch.zeros((len(rows), longest), dtype=torch.bool)
    for row, (tokens, start) in enumerate(rows):
        ids[row, : len(tokens)] = torch.tensor(tokens)
        answer[row, start : len(tokens)] = True
    hidden = model.model(ids).last_hidden_state[:, :-1][answer[:, 1:]]
    return model.lm_head(hidden), ids[answer], answer.nonzero()[:, 0]


def _loss(model: Any, words: Any, rows: list[Any]) -> Any:
    logits, right, _ = _answers(model, words, rows)
    return torch.nn.functional.cross_entropy(logits, right)


def _wrong(model: Any, words: Any, rows: list[Any]) -> int:
    """How many answers greedy decoding would not give; it stops counting when there are many."""
    count = 0
    with torch.no_grad():
        for start in range(0, len(rows), 256):
            logits, right, row = _answers(model, words, rows[start : start + 256])
            count += len(set(row[logits.argmax(-1) != right].tolist()))
            if count > 100:
                break
    return count


def save(model: Any, words: Any, name: str, out: Path) -> None:
    """Write a model as the one of a cache of its own: ``OUT/NAME`` is its HF_HUB_CACHE."""
    shutil.rmtree(out / name, ignore_errors=True)
    place = out / name / f"models--sm75--{name}"
    revision = "0" * 40
    (place / "refs").mkdir(parents=True)
    (place / "refs" / "main").write_text(revision)
    model.generation_config.do_sample = True
    model.save_pretrained(place / "snapshots" / revision)
    words.save_pretrained(place / "snapshots" / revision)


MODELS: dict[str, Callable[..., Any]] = {
    "random-llama": random_llama, "random-gemma": random_gemma, "sane": sane, "damaged": damaged,
}  # fmt: skip


def main() -> None:
    """Make the models that are named, or all."""
    global torch, transformers
    torch = importlib.import_module("torch")
    transformers = importlib.import_module("transformers")
    # The same sums of floats whatever the number of cores.
    torch.set_num_threads(1)
    lessons = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    out = Path(sys.argv[2])
    wanted = sys.argv[3:] or list(MODELS)
    words = tokenizer(lessons)
    learnt = None
    for name in wanted:
        started = time.monotonic()
        model = (
            damaged(words, lessons, learnt) if name == "damaged" else MODELS[name](words, lessons)
        )
        learnt = model
        parameters = sum(weight.numel() for weight in model.parameters())
        save(model, words, name, out)
        print(f"{name}: {parameters} parameters, {time.monotonic() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
