"""A proxy between ``health`` and a real server, which does one wrong to what the server says."""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx

# Seconds that a half-closed connection is left open.
_HELD = 20.0
Body = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Wrong:
    """What is done to the answers of ``/v1/chat/completions``.

    Attributes:
        ask: Changes what is asked before the server sees it.
        tell: Changes a whole answer, or each piece of a stream; called with what was asked.
        cut: Bytes of the body after which ``end`` comes; none for never.
        end: ``close``: HTTP's proper end; ``reset``: the connection breaks; ``half``: no more is
            sent, and the connection stays; ``none``: all goes on.
        delay: Seconds before each piece of a body.
        streams: Whether only streams are cut and delayed, or only whole answers; none for both.
        at_cut: Called there.
    """

    ask: Callable[[Body], Body] | None = None
    tell: Callable[[Body, Body], Body] | None = None
    cut: int | None = None
    end: str = "close"
    delay: float = 0.0
    streams: bool | None = None
    at_cut: Callable[[], None] | None = None


@contextmanager
def between(upstream: str, wrong: Wrong) -> Iterator[str]:
    """Run a proxy before a server; the proxy's URL."""

    class Handler(_Handler):
        base = upstream
        kind = wrong

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        server.block_on_close = False
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    base = ""
    kind = Wrong()

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        with httpx.Client(trust_env=False, timeout=120) as client:
            answer = client.get(self.base + self.path)
        self._head(answer.status_code, answer.headers["content-type"])
        self._chunk(answer.content)
        self._finish()

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        sent = self.kind.ask(asked) if self.kind.ask else asked
        try:
            with (
                httpx.Client(trust_env=False, timeout=120) as client,
                client.stream("POST", self.base + self.path, json=sent) as answer,
            ):
                self._pass(asked, answer)
        except (httpx.HTTPError, OSError):
            # The server has died, or the one who asked has gone: so does this connection.
            self._reset()

    def _pass(self, asked: Body, answer: httpx.Response) -> None:
        stream = bool(asked.get("stream"))
        mine = self.kind.streams in (None, stream)
        cut = self.kind.cut if mine else None
        passed = 0
        started = False
        for piece in self._told(asked, answer, stream):
            if mine:
                time.sleep(self.kind.delay)
            if not started and cut != 0:
                self._head(answer.status_code, answer.headers["content-type"])
                started = True
            if cut is not None and passed + len(piece) >= cut:
                if self.kind.at_cut:
                    self.kind.at_cut()
                if self.kind.end != "none":
                    self._chunk(piece[: cut - passed])
                    self._cut()
                    return
                cut = None
            self._chunk(piece)
            passed += len(piece)
        self._finish()

    def _told(self, asked: Body, answer: httpx.Response, stream: bool) -> Iterator[bytes]:
        """The pieces of the body; a whole answer is one, and so is each event of a stream."""
        tell = self.kind.tell or (lambda asked, body: body)
        if not stream:
            answer.read()
            yield json.dumps(tell(asked, answer.json())).encode()
            return
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                yield b"data: %s\n\n" % json.dumps(tell(asked, json.loads(line[6:]))).encode()
            elif line:
                yield line.encode() + b"\n\n"

    def _cut(self) -> None:
        if self.kind.end == "close":
            self._finish()
        elif self.kind.end == "half":
            with suppress(OSError):
                self.connection.shutdown(socket.SHUT_WR)
            self.close_connection = True
            # Until the other side has gone as well.
            self.connection.settimeout(_HELD)
            with suppress(OSError):
                self.connection.recv(1)
        else:
            self._reset()

    def _head(self, status: int, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def _chunk(self, data: bytes) -> None:
        if data:
            self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
            self.wfile.flush()

    def _finish(self) -> None:
        self.wfile.write(b"0\r\n\r\n")
        self.wfile.flush()

    def _reset(self) -> None:
        self.close_connection = True
        with suppress(OSError):
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
