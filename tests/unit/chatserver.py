"""A chat server on 127.0.0.1 that streams, counts tokens, and misbehaves on demand.

It has a tokenizer, a template, a prefix cache, and waits as long as it is told for prompts and
tokens. What it says to questions of ``health`` is sane unless it is told otherwise.
"""

from __future__ import annotations

import json
import random
import socket
import struct
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

from tests.unit.test_health import sane

TEMPLATE = 7


def words(text: str) -> int:
    """A token a word."""
    return len(text.split())


def pieces(text: str) -> int:
    """Words of more than four letters have two tokens."""
    return sum(1 + (len(word) > 4) for word in text.split())


def letters(text: str) -> int:
    """A token a byte."""
    return len(text.encode())


class ChatServer:
    """A context manager.

    Attributes:
        tokenizer: Counts tokens of a prompt; the template adds ``TEMPLATE``.
        prefill: Seconds until the first token, for a prompt that is not cached.
        delay: Seconds before each further token.
        usage: Whether streams end with a count.
        strict: Refuses fields that are not of the protocol.
        cache: Whether a prompt that was there before is known.
        tells: Whether it says how much was.
        most: Tokens that an answer has at most, whatever is asked for.
        says_usage: What it makes of its count of an answer.
        together: Tokens in one piece.
        moods: What to do with the next measured requests, first to last, then behave: an int: that
            HTTP status; ``die``: reset after half; ``half``: close after half, without a word;
            ``hang``: after half; ``error``: an error in the stream; ``silent``: no text at all.
        always: A mood for every request.
        nonsense: What it says to health's questions instead.
        sane: Whether it answers health's questions; without, a question is a prompt as others are.
        prompts: All that was asked, without health's.
    """

    def __init__(self) -> None:
        self.tokenizer: Callable[[str], int] = words
        self.prefill, self.delay = 0.0, 0.0
        self.usage, self.strict, self.cache, self.tells = True, False, False, False
        self.most = 1 << 30
        self.says_usage: Callable[[int], int] = lambda count: count
        self.together = 1
        self.moods: list[int | str] = []
        self.always: int | str = ""
        self.nonsense = ""
        self.sane = True
        self.prompts: list[str] = []
        self.asked: list[dict[str, Any]] = []
        self.busy = self.busiest = 0
        self.release = threading.Event()
        self._lock = threading.Lock()
        self._seen: set[str] = set()
        self._random = random.Random(1)
        owner = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            # Small writes leave at once, as in real servers.
            disable_nagle_algorithm = True

            def log_message(self, format: str, *args: object) -> None:
                return

            def do_GET(self) -> None:
                owner.whole(self, {"data": [{"id": "tiny"}]})

            def do_POST(self) -> None:
                length = int(self.headers["Content-Length"])
                owner.chat(self, json.loads(self.rfile.read(length)))

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request: object, client_address: object) -> None:
                """A client that goes away is what some tests are about."""

        self._server = Server(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def whole(self, handler: BaseHTTPRequestHandler, data: Any, status: int = 200) -> None:
        """Answer at once."""
        body = json.dumps(data).encode()
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    def chat(self, handler: BaseHTTPRequestHandler, asked: dict[str, Any]) -> None:
        text = asked["messages"][0]["content"]
        if isinstance(text, list):  # in parts, as vllm bench serve sends it
            text = "".join(part["text"] for part in text)
        # The newer name of the same, which vllm bench serve uses.
        asked.setdefault("max_tokens", asked.get("max_completion_tokens"))
        if self.sane and ("?" in text or "Explain" in text):
            said = self.nonsense or sane(text, self._random)
            if not asked["stream"]:
                choice = {"message": {"content": said}, "finish_reason": "stop"}
                self.whole(handler, {"choices": [choice]})
                return
            self._start(handler)
            self._event(handler, {"choices": [{"delta": {"content": said}}]})
            self._event(handler, {"choices": [{"delta": {}, "finish_reason": "stop"}]})
            self._end(handler)
            return
        with self._lock:
            self.asked.append(asked)
            self.prompts.append(text)
            known = self.cache and text in self._seen
            self._seen.add(text)
            # Requests of one token find out how it counts.
            measured = asked["max_tokens"] > 4
            mood = self.moods.pop(0) if measured and self.moods else self.always
            self.busy += 1
            self.busiest = max(self.busiest, self.busy)
        try:
            self._answer(handler, asked, text, known=known, mood=mood)
        finally:
            with self._lock:
                self.busy -= 1

    def _answer(
        self, handler: BaseHTTPRequestHandler, asked: dict[str, Any], text: str, *, known: bool,
        mood: int | str,
    ) -> None:  # fmt: skip
        if isinstance(mood, int):
            self.whole(handler, {"error": "too much"}, mood)
            return
        if self.strict and ({"ignore_eos", "min_tokens"} & asked.keys()):
            self.whole(handler, {"error": "unknown field"}, 400)
            return
        count = min(asked["max_tokens"], self.most)
        self._start(handler)
        # As vLLM: the role comes first, and is no text.
        time.sleep(0 if known else self.prefill)
        self._event(handler, {"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        for number in range(0, count, self.together):
            if number:
                time.sleep(self.delay * self.together)
            if mood and number >= count // 2 and self._misbehave(handler, mood):
                return
            said = " ok" * min(self.together, count - number)
            if mood != "silent":
                self._event(handler, {"choices": [{"delta": {"content": said}}]})
        finish = "length" if count == asked["max_tokens"] else "stop"
        self._event(handler, {"choices": [{"delta": {}, "finish_reason": finish}]})
        if self.usage and asked.get("stream_options", {}).get("include_usage"):
            prompt = self.tokenizer(text) + TEMPLATE
            usage: dict[str, Any] = {
                "prompt_tokens": prompt, "completion_tokens": self.says_usage(count),
            }  # fmt: skip
            if self.tells:
                usage["prompt_tokens_details"] = {"cached_tokens": prompt if known else 0}
            self._event(handler, {"choices": [], "usage": usage})
        self._end(handler)

    def _misbehave(self, handler: BaseHTTPRequestHandler, mood: str) -> bool:
        peer = handler.connection
        handler.close_connection = True
        if mood == "die":
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            peer.close()
        elif mood == "half":
            peer.shutdown(socket.SHUT_WR)
        elif mood == "hang":
            self.release.wait(30)
        elif mood == "error":
            self._event(handler, {"error": {"message": "engine died"}})
            self._end(handler)
        else:
            handler.close_connection = False
            return False
        return True

    def _start(self, handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Type", "text/event-stream")
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()

    def _event(self, handler: BaseHTTPRequestHandler, data: Any) -> None:
        text = data if isinstance(data, str) else json.dumps(data)
        body = f"data: {text}\n\n".encode()
        handler.wfile.write(b"%x\r\n%s\r\n" % (len(body), body))
        handler.wfile.flush()

    def _end(self, handler: BaseHTTPRequestHandler) -> None:
        self._event(handler, "[DONE]")
        handler.wfile.write(b"0\r\n\r\n")
