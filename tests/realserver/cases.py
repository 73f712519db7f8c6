"""What is done between ``health`` and a server of the sane model, and what ``health`` must say."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.realserver.lessons import manner
from tests.realserver.proxy import Body, Wrong
from tests.realserver.server import Served

WELL, NONSENSE, SILENT = 0, 1, 11


@dataclass(frozen=True, kw_only=True)
class Case:
    """One wrong.

    Attributes:
        name: In the evidence.
        wrong: Made anew for each run.
        code: The exit code that ``health`` must give.
        says: What its verdict must have.
        options: Of ``health``.
    """

    name: str
    wrong: Callable[[], Wrong]
    code: int
    says: str = ""
    options: tuple[str, ...] = field(default=())


def _choice(change: Callable[[Body], Any]) -> Callable[[Body, Body], Body]:
    """Change the choices of an answer or of a piece of one."""

    def tell(asked: Body, body: Body) -> Body:
        for choice in body["choices"]:
            change(choice)
        return body

    return tell


def _finish(reason: str | None) -> Callable[[], Wrong]:
    def change(choice: Body) -> None:
        if choice.get("finish_reason"):
            choice["finish_reason"] = reason

    return lambda: Wrong(tell=_choice(change))


def _stream_finish(asked: Body, body: Body) -> Body:
    if asked["stream"]:
        for choice in body["choices"]:
            if choice.get("finish_reason"):
                choice["finish_reason"] = "length"
    return body


def _content(value: str | None) -> Callable[[], Wrong]:
    def change(choice: Body) -> None:
        for part in ("message", "delta"):
            if "content" in choice.get(part, {}):
                choice[part]["content"] = value

    return lambda: Wrong(tell=_choice(change))


def _late() -> Wrong:
    """Each whole answer is the one to the question before."""
    before = ["The capital of Italy is Rome."]

    def tell(asked: Body, body: Body) -> Body:
        if not asked["stream"]:
            message = body["choices"][0]["message"]
            before.append(message["content"])
            message["content"] = before[-2]
        return body

    return Wrong(tell=tell)


def _other_sum() -> Wrong:
    """The server is asked for another sum, and answers that one rightly."""

    def ask(asked: Body) -> Body:
        message = asked["messages"][-1]
        text = re.sub(
            r"\d+", lambda n: str(11 + (int(n[0]) - 10) % 39), message["content"], count=1
        )
        return {**asked, "messages": [{**message, "content": text}]}

    return Wrong(ask=ask)


def in_manner(number: int) -> Wrong:
    """Nothing wrong: a system message, as applications send, asks for a manner of answering."""

    def ask(asked: Body) -> Body:
        if "+" in asked["messages"][-1]["content"]:
            return asked
        system = {"role": "system", "content": manner(number)}
        return {**asked, "messages": [system, *asked["messages"]]}

    return Wrong(ask=ask)


def _cut(at: int, end: str, *, streams: bool) -> Callable[[], Wrong]:
    return lambda: Wrong(cut=at, end=end, streams=streams)


CASES = (
    Case(name="nothing wrong", wrong=Wrong, code=WELL),
    Case(name="lies: finish_reason length everywhere", wrong=_finish("length"), code=NONSENSE,
         says="did not end within"),
    Case(name="lies: finish_reason length of the stream, which is allowed",
         wrong=lambda: Wrong(tell=_stream_finish), code=WELL),
    Case(name="lies: finish_reason null", wrong=_finish(None), code=NONSENSE,
         says="does not say why it ended"),
    Case(name="lies: finish_reason abort", wrong=_finish("abort"), code=NONSENSE, says="'abort'"),
    Case(name="lies: content empty", wrong=_content(""), code=NONSENSE, says="it is empty"),
    Case(name="lies: content null", wrong=_content(None), code=NONSENSE, says="it is empty"),
    Case(name="lies: the answer to the question before", wrong=_late, code=NONSENSE,
         says="it is not the answer"),
    Case(name="lies: the right answer to another sum", wrong=_other_sum, code=NONSENSE,
         says="it is not the answer"),
    Case(name="truncated: whole answer, proper end", wrong=_cut(40, "close", streams=False),
         code=NONSENSE, says="no chat completion"),
    Case(name="truncated: stream, proper end", wrong=_cut(900, "close", streams=True),
         code=NONSENSE, says="stream"),
    Case(name="broken connection: whole answer", wrong=_cut(40, "reset", streams=False),
         code=SILENT, says="no answer"),
    Case(name="broken connection: stream", wrong=_cut(900, "reset", streams=True), code=SILENT,
         says="no answer"),
    Case(name="broken connection: before the answer", wrong=_cut(0, "reset", streams=False),
         code=SILENT, says="no answer"),
    Case(name="half-closed: before the answer", wrong=_cut(0, "half", streams=False), code=SILENT,
         says="no answer"),
    Case(name="half-closed: whole answer", wrong=_cut(40, "half", streams=False), code=SILENT,
         says="no answer"),
    Case(name="half-closed: stream", wrong=_cut(900, "half", streams=True), code=SILENT,
         says="no answer"),
    Case(name="slow: each piece 0.1 s later", wrong=lambda: Wrong(delay=0.1), code=WELL),
    Case(name="slow: each piece 0.5 s later, 5 s given",
         wrong=lambda: Wrong(delay=0.5, streams=True), code=SILENT, says="within 5 s",
         options=("--timeout", "5")),
    Case(name="slow: whole answer 8 s later, 5 s given",
         wrong=lambda: Wrong(delay=8.0, streams=False), code=SILENT, says="within 5 s",
         options=("--timeout", "5")),
)  # fmt: skip


def dying(server: Served) -> tuple[Case, ...]:
    """The server is killed while it answers; it must be started anew after each."""

    def early(asked: Body) -> Body:
        # It takes the question, and never gets to answer it.
        server.pause()
        threading.Timer(0.5, server.kill).start()
        return asked

    return (
        Case(name="killed while it makes a whole answer", wrong=lambda: Wrong(ask=early),
             code=SILENT, says="no answer"),
        Case(name="killed within the stream",
             wrong=lambda: Wrong(cut=600, end="none", streams=True, at_cut=server.kill),
             code=SILENT, says="no answer"),
    )  # fmt: skip


@contextmanager
def throttled(server: Served) -> Iterator[None]:
    """The server gets a fifth of the time."""
    over = threading.Event()

    def stop_and_go() -> None:
        while not over.is_set():
            server.pause()
            time.sleep(0.08)
            server.resume()
            time.sleep(0.02)

    thread = threading.Thread(target=stop_and_go)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        server.resume()
