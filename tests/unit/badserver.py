"""A package index on 127.0.0.1 that misbehaves on demand."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from http.server import BaseHTTPRequestHandler
from types import TracebackType
from typing import Any

from tests.unit.localserver import LocalServer


class BadServer(LocalServer):
    """Serves files and the simple API; a context manager.

    Attributes:
        files: Content by file name, as ``project/filename``.
        moods: What to do with the next requests of a file, first to last, then behave:
            ``truncate`` half the promised bytes, then close; ``alter`` one byte; ``stall``
            half the bytes, then silence; ``chunked-short`` half the bytes, announced as all;
            ``norange-short`` the same whatever was asked;
            ``norange`` the whole file whatever was asked; ``wrong-total`` another total in
            Content-Range; ``longer`` more bytes than there are; an int: that HTTP status;
            ``(status, headers)``; a function: gets the request's handler and answers it.
            Index pages (``simple/project``) have the last three.
        always: A mood for every request of a file.
        hashes: Overrides the hash that the index states (None: states none).
        log: (path, Range header or empty) of each request.
        html: Serve PEP 503 pages instead of JSON.
    """

    def __init__(self) -> None:
        super().__init__()
        self.files: dict[str, bytes] = {}
        self.moods: dict[str, list[Any]] = {}
        self.always: dict[str, Any] = {}
        self.hashes: dict[str, str | None] = {}
        self.log: list[tuple[str, str]] = []
        self.auth: list[str] = []
        self.html = False
        self.release = threading.Event()

    @property
    def url(self) -> str:
        """Base URL of the simple index."""
        return f"{self.base}/simple/"

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release.set()
        super().__exit__(kind, error, trace)

    def requests(self, name: str) -> list[str]:
        """Range headers of the requests for a file."""
        return [rng for path, rng in self.log if path == f"/files/{name}"]

    def respond(self, handler: BaseHTTPRequestHandler) -> None:
        path = handler.path
        self.log.append((path, handler.headers.get("Range", "")))
        self.auth.append(handler.headers.get("Authorization", ""))
        if path.startswith("/simple/"):
            self._page(handler, path.removeprefix("/simple/").strip("/"))
        else:
            self._file(handler, path.removeprefix("/files/"))

    def _page(self, handler: BaseHTTPRequestHandler, project: str) -> None:
        names = [name for name in self.files if name.startswith(f"{project}/")]
        mood = self._mood(f"simple/{project}")
        if callable(mood):
            mood(handler)
            return
        if isinstance(mood, int | tuple) or not names:
            status, headers = mood if isinstance(mood, tuple) else (mood or 404, {})
            self._status(handler, status, headers)
            return
        entries = []
        anchors = []
        for name in names:
            filename = name.partition("/")[2]
            digest = self.hashes.get(name, hashlib.sha256(self.files[name]).hexdigest())
            entry: dict[str, Any] = {
                "filename": filename,
                "url": f"../../files/{name}",
                "hashes": {},
            }
            if digest:
                entry["hashes"] = {"sha256": digest}
                entry["size"] = len(self.files[name])
            entries.append(entry)
            fragment = f"#sha256={digest}" if digest else ""
            anchors.append(f'<a href="../../files/{name}{fragment}">{filename}</a>')
        if self.html:
            body = ("<!DOCTYPE html><html><body>" + "\n".join(anchors)).encode()
            kind = "text/html"
        else:
            body = json.dumps({"meta": {"api-version": "1.0"}, "files": entries}).encode()
            kind = "application/vnd.pypi.simple.v1+json"
        self.send(handler, 200, {"Content-Type": kind, "Content-Length": str(len(body))}, body)

    def _mood(self, name: str) -> Any:
        queue = self.moods.get(name)
        return queue.pop(0) if queue else self.always.get(name)

    def _file(self, handler: BaseHTTPRequestHandler, name: str) -> None:
        mood = self._mood(name)
        if callable(mood):
            mood(handler)
            return
        if isinstance(mood, int | tuple):
            status, headers = mood if isinstance(mood, tuple) else (mood, {})
            self._status(handler, status, headers)
            return
        content = self.files.get(name)
        if content is None:
            self._status(handler, 404, {})
            return
        if mood == "alter":
            middle = len(content) // 2
            content = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
        total = len(content)
        asked = handler.headers.get("Range", "")
        status, headers, body = 200, {}, content
        if asked and mood not in ("norange", "norange-short"):
            first, _, last = asked.removeprefix("bytes=").partition("-")
            if int(first) >= total:
                self._status(handler, 416, {"Content-Range": f"bytes */{total}"})
                return
            body = content[int(first) : int(last) + 1]
            status = 206
            said = total + 1 if mood == "wrong-total" else total
            headers["Content-Range"] = f"bytes {first}-{int(first) + len(body) - 1}/{said}"
        if mood == "longer":
            body += b"extra"
        if mood in ("chunked-short", "norange-short"):
            headers["Transfer-Encoding"] = "chunked"
            half = body[: len(body) // 2]
            body = f"{len(half):x}\r\n".encode() + half + b"\r\n0\r\n\r\n"
        elif mood != "longer":
            headers["Content-Length"] = str(len(body))
        else:
            headers["Connection"] = "close"
            handler.close_connection = True
        if mood in ("truncate", "stall"):
            body = body[: max(1, len(body) // 2)]
            handler.close_connection = True
        self.send(handler, status, headers, body)
        if mood == "stall":
            self.release.wait(60)

    def _status(
        self, handler: BaseHTTPRequestHandler, status: int, headers: dict[str, str]
    ) -> None:
        self.send(handler, status, {**headers, "Content-Length": "0"}, b"")


def http_date(seconds_from_now: float) -> str:
    """A Retry-After date."""
    return time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(time.time() + seconds_from_now))
