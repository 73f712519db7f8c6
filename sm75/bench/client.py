"""Ask for a streamed answer and take the times of its pieces."""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from dataclasses import dataclass, field, replace
from typing import Any, Self

import httpx

from sm75 import jsontext
from sm75.errors import ServerError
from sm75.health.client import CHAT, BadAnswer
from sm75.health.events import Events
from sm75.words import counted

# More than the pieces of 100,000 tokens; a server that sends for ever must not fill the memory.
_MOST_BYTES = 64 << 20
_SHOWN = 200


class Refused(BadAnswer):
    """The server does not take a request as it is.

    Args:
        status: HTTP status.
        body: The start of what it said.
    """

    def __init__(self, status: int, body: str) -> None:
        super().__init__(f"HTTP {status}: {body}")
        self.status = status


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """What requests ask for beyond the protocol's core.

    Attributes:
        exact: ``ignore_eos`` and ``min_tokens`` (vLLM and others): answers have the length asked
            for, whatever the model would like.
        usage: ``stream_options.include_usage``: the server counts tokens in its last event.
    """

    exact: bool = True
    usage: bool = True

    def less(self) -> Wishes | None:
        """The next thing to do without; None when nothing is left."""
        if self.exact:
            return replace(self, exact=False)
        return replace(self, usage=False) if self.usage else None


@dataclass(kw_only=True)
class Reply:
    """What came, and when. Times in seconds of one monotonic clock.

    Attributes:
        asked: Tokens asked for.
        start: Just before the request was sent.
        first: When the first text came; 0 while none has.
        last: When the last event of the answer itself came (text or finish reason).
        pieces: Events with text.
        gaps: Seconds between these.
        prompt_tokens: As the server counts; None where it does not.
        completion_tokens: As the server counts.
        cached_tokens: Of the prompt, taken from a cache, as the server says (vLLM with
            ``--enable-prompt-tokens-details``).
        finish: Why it ended, as the server says.
    """

    asked: int
    start: float = 0.0
    first: float = 0.0
    last: float = 0.0
    pieces: int = 0
    gaps: list[float] = field(default_factory=list)
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    finish: str = ""

    @property
    def ttft(self) -> float:
        """Seconds to the first text."""
        return self.first - self.start

    @property
    def itl(self) -> float | None:
        """Mean seconds between tokens, by the server's count; None where it does not count."""
        if self.completion_tokens is None or self.completion_tokens < 2 or self.last <= self.first:
            return None
        return (self.last - self.first) / (self.completion_tokens - 1)

    @property
    def short(self) -> bool:
        """Whether it has fewer tokens than were asked for."""
        return self.completion_tokens is not None and self.completion_tokens < self.asked

    @property
    def lie(self) -> str:
        """Why the server's count cannot be right; empty when it can."""
        if self.completion_tokens is None:
            return ""
        tokens = counted(self.completion_tokens, "token")
        if self.completion_tokens > self.asked:
            return f"it counts {tokens}, {self.asked} were asked for"
        # One more: text that was held back may come by itself at the end.
        if self.pieces > self.completion_tokens + 1:
            return f"it counts {tokens}, and sent {counted(self.pieces, 'piece')}"
        return ""

    def take(self, event: str, now: float) -> None:
        """Take an event.

        Raises:
            BadAnswer: It is none of chat.
        """
        try:
            part = jsontext.loads(event)
            if part.get("error"):
                raise BadAnswer(f"its stream has an error: {event[:_SHOWN]}")
            for choice in part["choices"]:
                delta = choice.get("delta") or {}
                # Thoughts are tokens too: vLLM calls them reasoning, before that reasoning_content.
                if any(delta.get(kind) for kind in ("content", "reasoning", "reasoning_content")):
                    if self.pieces:
                        self.gaps.append(now - self.last)
                    else:
                        self.first = now
                    self.pieces += 1
                    self.last = now
                if finish := choice.get("finish_reason"):
                    self.finish, self.last = str(finish), now
            if usage := part.get("usage"):
                self._count(usage)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise BadAnswer(f"its stream is none of chat: {event[:_SHOWN]}") from error

    def _count(self, usage: dict[str, Any]) -> None:
        self.prompt_tokens = _whole(usage.get("prompt_tokens"))
        self.completion_tokens = _whole(usage.get("completion_tokens"))
        details = usage.get("prompt_tokens_details") or {}
        self.cached_tokens = _whole(details.get("cached_tokens"))


class Client:
    """Asks a server, several questions at once if need be; an async context manager.

    Args:
        url: The server's base (``sm75.health.client.base_url``).
        model: The model's name there.
        api_key: Sent as a bearer token where given.
        timeout: Seconds for each answer, to its last byte.
        connections: How many questions at once; their connections stay open.
        wishes: What requests ask for.
    """

    def __init__(
        self, url: str, model: str, *, api_key: str = "", timeout: float = 600.0,
        connections: int = 1, wishes: Wishes | None = None,
    ) -> None:  # fmt: skip
        self.url, self.model, self.timeout = url, model, timeout
        self.wishes = wishes or Wishes()
        # Proxies of the environment are for the internet, not for the server at hand. The time
        # limits of sockets begin anew with each byte; ours is that of the whole answer.
        self._http = httpx.AsyncClient(
            trust_env=False,
            timeout=None,  # noqa: S113
            verify=ssl.create_default_context(),
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            limits=httpx.Limits(
                max_connections=connections, max_keepalive_connections=connections,
                keepalive_expiry=None,
            ),
        )  # fmt: skip

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._http.aclose()

    async def ask(self, prompt: str, tokens: int) -> Reply:
        """Ask for so many tokens.

        Args:
            prompt: What the user says.
            tokens: The most of an answer, and with ``wishes.exact`` the least.

        Raises:
            ServerError: No answer, not all of it, or not in time; HTTP 429 or 5xx.
            Refused: HTTP 4xx.
            BadAnswer: Something that is no answer.
        """
        data: dict[str, Any] = {
            "model": self.model,
            "messages": [{"role": "user", "content": prompt}],
            "temperature": 0,
            "max_tokens": tokens,
            "stream": True,
        }
        if self.wishes.exact:
            data |= {"ignore_eos": True, "min_tokens": tokens}
        if self.wishes.usage:
            data["stream_options"] = {"include_usage": True}
        try:
            async with asyncio.timeout(self.timeout):
                return await self._ask(data, tokens)
        except TimeoutError:
            raise ServerError(
                f"no whole answer from {self.url}{CHAT} within {self.timeout:g} s",
                why="it is too slow, or it hangs",
                fix="look at its log: python3 orchestrator.py explain LOG; more time: --timeout",
            ) from None
        except httpx.HTTPError as error:
            raise ServerError(
                f"no whole answer from {self.url}{CHAT}",
                why=str(error) or type(error).__name__,
                fix="look at its log: python3 orchestrator.py explain LOG",
            ) from error

    async def _ask(self, data: dict[str, Any], tokens: int) -> Reply:
        reply, events, size, over = Reply(asked=tokens), Events(), 0, False
        content = json.dumps(data).encode()
        reply.start = time.perf_counter()
        async with self._http.stream(
            "POST", self.url + CHAT, content=content, headers={"Content-Type": "application/json"}
        ) as answer:
            if answer.status_code != 200:
                await self._refuse(answer)
            async for piece in answer.aiter_bytes():
                now = time.perf_counter()
                size += len(piece)
                if size > _MOST_BYTES:
                    raise BadAnswer(f"its answer has more than {_MOST_BYTES >> 20} MiB")
                for event in events.feed(piece):
                    over = over or event == "[DONE]"
                    if not over:
                        reply.take(event, now)
        for event in events.close():
            over = over or event == "[DONE]"
        if not over:
            raise BadAnswer("its stream ended without [DONE]")
        if not reply.pieces:
            raise BadAnswer("its answer has no text")
        return reply

    async def _refuse(self, answer: httpx.Response) -> None:
        body = b""
        async for piece in answer.aiter_bytes():
            body += piece
            if len(body) > _SHOWN:
                break
        said = " ".join(body[:_SHOWN].decode("utf-8", errors="replace").split()) or "no text"
        status = answer.status_code
        if status == 429 or status >= 500:
            raise ServerError(
                f"no answer from {self.url}{CHAT}", why=f"HTTP {status}: {said}",
                fix="fewer at once: --concurrency 1; or wait until it has started",
            )  # fmt: skip
        raise Refused(status, said)


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
