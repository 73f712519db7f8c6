"""Checkpoints that see: a vision tower before a text model of Gemma 4's shape, tiny and random.

``vision`` has the text model of tests.device.models and a tower of head size 64, as Gemma 4 E2B
has. ``experts`` is shaped like Gemma 4 26B-A4B: experts, keys that are values too, no per-layer
embeddings, a tower of head size 72, and tokens of one image that see each other both ways. Each
has the processor's files, and pictures.json: prompts with images among the words.

    python -m tests.device.pictures DIRECTORY
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

from tests.device.models import CONTEXT, VOCABULARY, config

BOI, EOI, IMAGE, VIDEO, AUDIO, BOA, EOA = range(4, 11)
NAMES = {"<|image>": BOI, "<image|>": EOI, "<|image|>": IMAGE, "<|video|>": VIDEO,
         "<|audio|>": AUDIO, "<|audio>": BOA, "<audio|>": EOA}  # fmt: skip
FIRST_WORD = 16
# Soft tokens an image at most; patches of 16 by 16 pixels, pooled 3 by 3: what Gemma 4's processor
# does (transformers, image_processing_gemma4.py).
SOFT = 280
PATCH, POOL = 16, 3
# Pixels; one is small, one is tall, one is wide.
SIZES = ((336, 448), (96, 96), (800, 160), (200, 900))
# Words and images (by number) of each prompt: alone, two, across the window and a prefill step of
# 1,024 tokens, none, and four, the most that the kernels of ahead of time are made for.
LAYOUT: tuple[tuple[tuple[str, int], ...], ...] = (
    (("words", 5), ("image", 0), ("words", 37)),
    (("words", 3), ("image", 1), ("words", 60), ("image", 2), ("words", 140)),
    (("words", 900), ("image", 3), ("words", 300)),
    (("words", 201),),
    (("words", 2), ("image", 0), ("image", 1), ("words", 9), ("image", 2), ("image", 3),
     ("words", 50)),
)  # fmt: skip


def vision_config(head: int) -> Any:
    """A tower of two layers and two heads."""
    transformers: Any = importlib.import_module("transformers")
    return transformers.Gemma4VisionConfig(
        hidden_size=2 * head, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, head_dim=head, pooling_kernel_size=POOL, patch_size=PATCH,
        position_embedding_size=1024, default_output_length=SOFT,
    )  # fmt: skip


def experts_config() -> Any:
    """Four layers in the shape of 26B-A4B: eight experts, of which five are asked.

    With the router's weights below the fifth counts for next to nothing, so that it does not matter
    which of two near-equal ones float16 asks.
    """
    transformers: Any = importlib.import_module("transformers")
    sliding, full = "sliding_attention", "full_attention"
    return transformers.Gemma4TextConfig(
        vocab_size=VOCABULARY, vocab_size_per_layer_input=VOCABULARY, hidden_size=512,
        intermediate_size=512, num_hidden_layers=4, num_attention_heads=16, num_key_value_heads=8,
        head_dim=256, global_head_dim=512, num_global_key_value_heads=2, attention_k_eq_v=True,
        hidden_size_per_layer_input=0, layer_types=[sliding, full, sliding, full],
        num_kv_shared_layers=0, sliding_window=1024, max_position_embeddings=CONTEXT,
        final_logit_softcapping=30.0, pad_token_id=0, eos_token_id=1, bos_token_id=2,
        tie_word_embeddings=True, use_bidirectional_attention="vision", enable_moe_block=True,
        num_experts=8, top_k_experts=5, moe_intermediate_size=128,
    )  # fmt: skip


def model(text: Any, tower: Any) -> Any:
    """The model in float16, its weights random."""
    torch: Any = importlib.import_module("torch")
    transformers: Any = importlib.import_module("transformers")
    torch.manual_seed(0)
    shape = transformers.Gemma4Config(
        text_config=text.to_dict(), vision_config=tower.to_dict(), audio_config=None,
        boi_token_id=BOI, eoi_token_id=EOI, image_token_id=IMAGE, video_token_id=VIDEO,
        boa_token_id=BOA, eoa_token_index=EOA, audio_token_id=AUDIO,
        architectures=["Gemma4ForConditionalGeneration"],
    )  # fmt: skip
    made = transformers.Gemma4ForConditionalGeneration(shape).float()
    with torch.no_grad():
        for name, weight in made.named_parameters():
            weight.copy_(_weight(name, weight, torch.randn_like(weight)))
    made.half()
    made.config.dtype = torch.float16
    return made


def _weight(name: str, weight: Any, noise: Any) -> Any:
    """Scales at which tokens differ, words and pictures matter, and nothing overflows.

    Tried on a CPU: with attention's share smaller than the MLP's, 64 tokens have some 30 different
    ones; with equal shares one token is said again and again.
    """
    if "embed_tokens_per_layer" in name:
        return noise * 0.125
    if "embed_tokens" in name:
        rows = noise * 0.01
        # Never the best: a picture's tokens are given, not generated.
        rows[:FIRST_WORD] *= 0.01
        return rows
    if "position_embedding_table" in name:
        return noise * 0.5
    if "router.proj" in name:
        # Far enough apart that a few experts count and the rest hardly do.
        return noise * 4
    if name.endswith("language_model.norm.weight"):
        return 10 * (1 + 0.1 * noise)
    if weight.ndim > 1:
        return noise / weight.shape[-1] ** 0.5
    sizes = {"q_norm": 0.5, "k_norm": 0.5}
    if "language_model" in name:
        sizes |= {"post_attention_layernorm": 0.7, "post_feedforward_layernorm.weight": 1.5}
    size = next((size for part, size in sizes.items() if part in name), 1.0)
    return size * (1 + 0.1 * noise)


def processor() -> Any:
    """Gemma 4's processor over a tokenizer with a word for each token."""
    tokenizers: Any = importlib.import_module("tokenizers")
    transformers: Any = importlib.import_module("transformers")
    gemma4: Any = importlib.import_module("transformers.models.gemma4")
    words = {"<pad>": 0, "<eos>": 1, "<bos>": 2, "<unk>": 3, **NAMES}
    words.update({f"w{number}": number for number in range(len(words), VOCABULARY)})
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>",
        unk_token="<unk>", extra_special_tokens={
            "boi_token": "<|image>", "eoi_token": "<image|>", "image_token": "<|image|>",
            "boa_token": "<|audio>", "eoa_token": "<audio|>", "audio_token": "<|audio|>"},
    )  # fmt: skip
    return gemma4.Gemma4Processor(
        feature_extractor=gemma4.Gemma4AudioFeatureExtractor(),
        image_processor=gemma4.Gemma4ImageProcessor(max_soft_tokens=SOFT),
        tokenizer=tokenizer,
        video_processor=gemma4.Gemma4VideoProcessor(),
        image_seq_length=SOFT,
    )


def images() -> list[Any]:
    """Pictures of the sizes above: shades, edges and noise; always the same."""
    numpy: Any = importlib.import_module("numpy")
    image: Any = importlib.import_module("PIL.Image")
    drawn = []
    for number, (height, width) in enumerate(SIZES):
        random = numpy.random.default_rng(number)
        y, x = numpy.mgrid[0:height, 0:width]
        shades = [127 + 100 * numpy.sin((x * a + y * b) / 40) for a, b in ((1, 2), (3, 1), (2, 5))]
        pixels = numpy.stack(shades, -1) + random.normal(0, 12, (height, width, 3))
        pixels[height // 3 : height // 2, width // 4 : width // 2] = random.integers(0, 255, 3)
        drawn.append(image.fromarray(pixels.clip(0, 255).astype("uint8")))
    return drawn


def folded(prompt: list[int]) -> list[int]:
    """A prompt with a single token in the place of each image's."""
    short: list[int] = []
    for token in prompt:
        if token == BOI:
            short.append(IMAGE)
        elif token not in (IMAGE, EOI):
            short.append(token)
    return short


def prompts(seeing: Any) -> list[dict[str, Any]]:
    """Each prompt as vLLM's processor must make it of one with a token an image.

    Args:
        seeing: The processor of transformers, which says how many tokens each image takes.
    """
    torch: Any = importlib.import_module("torch")
    generator = torch.Generator().manual_seed(2)
    counts = seeing.image_processor(images=images(), return_tensors="pt")[
        "num_soft_tokens_per_image"
    ]
    found = []
    for layout in LAYOUT:
        prompt, shown = [2], []
        for kind, number in layout:
            if kind == "words":
                words = torch.randint(FIRST_WORD, VOCABULARY, (number,), generator=generator)
                prompt += words.tolist()
            else:
                prompt += [BOI, *[IMAGE] * int(counts[number]), EOI]
                shown.append(number)
        found.append({"prompt": prompt, "images": shown})
    return found


def make(out: Path) -> None:
    """Both checkpoints."""
    seeing = processor()
    for name, text, head in (("vision", config(), 64), ("experts", experts_config(), 72)):
        model(text, vision_config(head)).save_pretrained(out / name)
        seeing.save_pretrained(out / name)
        (out / name / "pictures.json").write_text(json.dumps(prompts(seeing)))


def main() -> None:
    """Make everything below the directory given."""
    make(Path(sys.argv[1]))


if __name__ == "__main__":
    main()
