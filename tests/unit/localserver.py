"""A server on 127.0.0.1 in a thread, for tests that say what it answers."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Self


class LocalServer:
    """The server; a context manager.

    Attributes:
        base: Its URL, without a path.
    """

    def __init__(self) -> None:
        owner = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *args: object) -> None:
                return

            def handle_any(self) -> None:
                owner.respond(self)

            do_GET = do_HEAD = do_PUT = do_POST = do_PATCH = do_DELETE = handle_any

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request: object, client_address: object) -> None:
                """A client that goes away is what some tests are about."""

        self._server = Server(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self.host = f"127.0.0.1:{self._server.server_port}"
        self.base = f"http://{self.host}"

    def respond(self, handler: BaseHTTPRequestHandler) -> None:
        """Answer a request."""
        raise NotImplementedError

    def send(
        self,
        handler: BaseHTTPRequestHandler,
        status: int,
        headers: dict[str, str],
        body: bytes = b"",
    ) -> None:
        """Send an answer; a client that has gone is no fault."""
        handler.send_response(status)
        for name, value in headers.items():
            handler.send_header(name, value)
        handler.end_headers()
        try:
            handler.wfile.write(b"" if handler.command == "HEAD" else body)
            handler.wfile.flush()
        except OSError:
            handler.close_connection = True

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def body_of(handler: BaseHTTPRequestHandler) -> bytes:
    """What a request carries."""
    return handler.rfile.read(int(handler.headers.get("Content-Length") or 0))
