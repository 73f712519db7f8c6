"""What to do next when a server is not well: one line, in words that can be typed."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

_LOG = (
    "python3 orchestrator.py explain LOG (journalctl -u vllm | python3 orchestrator.py explain -)"
)
KEY = (
    "export VLLM_API_KEY=..., the key that the server was started with (its --api-key or "
    "VLLM_API_KEY); a restart mends nothing"
)
ABSENT = (
    f"is it running, and is this its address (--url)? Its log: {_LOG}; while it loads: --wait 900"
)
SLOW = f"look at its log: {_LOG}; while it loads: --wait 900; more time for an answer: --timeout"
BUSY = "it has more questions than it takes: ask again, or let fewer in (vllm serve --max-num-seqs)"
FAILS = f"it answers with errors: {_LOG}; while it loads: --wait 900"
EMPTY = f"it serves no model: look at its start: {_LOG}"
_NONSENSE = (
    f"look at its log: {_LOG}; restart it. If it stays so: SM75_KERNELS=off leaves our kernels out"
)
_THINKS = "a model that thinks aloud needs --max-tokens 1024; if it is none: "
_MODEL = "name a model that it lists (curl URL/v1/models): --model NAME"
_PROTOCOL = f"it does not speak the protocol of OpenAI as vLLM does: {_LOG}"
# What vLLM 0.33.0 says, and what mends it. In its order: vllm/renderers/hf.py:885-889 and
# transformers' own words; vllm/entrypoints/openai/chat_completion/api_router.py:65;
# vllm/entrypoints/serve/engine/serving.py:78; vllm/renderers/params.py:405,544.
_SAID = (
    (
        r"chat.template",
        (
            "start it with one: python3 orchestrator.py serve MODEL -- --chat-template FILE; "
            "a model without one is often a base model, which is not made to chat: take its -it or "
            "-Instruct"
        ),
    ),
    (
        r"does not support Chat Completions",
        (
            "it serves a model that does not chat (embeddings, scores): serve another, or ask "
            "another address (--url)"
        ),
    ),
    (r"model\b.{0,300}\bdoes not exist", _MODEL),
    (
        r"maximum context length|max_model_len",
        (
            "it takes fewer tokens than a question and its answer: start it with more (vllm serve "
            "--max-model-len), or ask for fewer (--max-tokens)"
        ),
    ),
)
_REFUSED = f"it refuses the question for what it says above; its log: {_LOG}"


def stranger(url: str) -> str:
    """When something else than a server of the protocol answers.

    Args:
        url: Where it was asked.
    """
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    return (
        "is this vLLM's address (--url)? Another program or a proxy answers there; on that "
        f"machine: sudo ss -ltnp 'sport = :{port}'"
    )


def of_status(status: int, url: str, *, said: str = "", listing: bool) -> str:
    """By an HTTP status and what the server says.

    Args:
        status: The status, not 200.
        said: The message of its error document; empty where it sent none.
        url: Where it was asked.
        listing: Whether for the list of models.
    """
    if status in (401, 403):
        return KEY
    if status == 429:
        return BUSY
    if found := next((step for words, step in _SAID if re.search(words, said, re.I)), ""):
        return found
    if status >= 500:
        return FAILS
    if status == 404 and not listing:
        return _MODEL
    if said and not listing:
        return _REFUSED
    return stranger(url) if listing or status < 400 else _PROTOCOL


def of_nonsense(*, cut: bool) -> str:
    """When answers are wrong.

    Args:
        cut: Whether one did not end within the tokens it was given.
    """
    return (_THINKS if cut else "") + _NONSENSE
