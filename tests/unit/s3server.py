"""An object store on 127.0.0.1 that speaks as much of S3 as a client needs to publish.

One bucket, path style, no signatures checked. ``moods`` makes it fail on demand.
"""

from __future__ import annotations

import hashlib
import re
from http.server import BaseHTTPRequestHandler
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from tests.unit.localserver import LocalServer, body_of

_BEGUN = b"<InitiateMultipartUploadResult><UploadId>1</UploadId></InitiateMultipartUploadResult>"
_ENDED = "<CompleteMultipartUploadResult><ETag>{}</ETag></CompleteMultipartUploadResult>"


class S3Server(LocalServer):
    """The server; a context manager.

    Attributes:
        objects: Content by key.
        log: (method, key) of each request that changed something, in order.
        moods: Statuses for the next requests of a ``METHOD key``, first to last.
    """

    bucket = "bucket"

    def __init__(self) -> None:
        super().__init__()
        self.objects: dict[str, bytes] = {}
        self.parts: dict[str, dict[int, bytes]] = {}
        self.log: list[tuple[str, str]] = []
        self.reads: list[str] = []
        self.moods: dict[str, list[int]] = {}

    def respond(self, handler: BaseHTTPRequestHandler) -> None:
        status, headers, body = self.answer(handler.command, handler.path, body_of(handler))
        self.send(handler, status, {"Content-Length": str(len(body)), **headers}, body)

    def answer(self, method: str, target: str, body: bytes) -> tuple[int, dict[str, str], bytes]:
        parts = urlsplit(target)
        asked = parse_qs(parts.query, keep_blank_values=True)
        key = unquote(parts.path).removeprefix(f"/{self.bucket}").strip("/")
        if queue := self.moods.get(f"{method} {key}"):
            return queue.pop(0), {}, b""
        if method == "POST" and "delete" in asked:
            return 200, {}, self._delete_many(body)
        if method == "POST" and "uploads" in asked:
            self.parts[key] = {}
            return 200, {}, _BEGUN
        if method == "POST" and "uploadId" in asked:
            numbered = self.parts.pop(key)
            return self._store(key, b"".join(numbered[n] for n in sorted(numbered)), multi=True)
        if method == "PUT" and "partNumber" in asked:
            self.parts[key][int(asked["partNumber"][0])] = body
            return 200, {"ETag": f'"{hashlib.sha256(body).hexdigest()}"'}, b""
        if method == "PUT":
            return self._store(key, body)
        if method == "DELETE":
            self.log.append(("DELETE", key))
            self.objects.pop(key, None)
            return 204, {}, b""
        if method == "GET" and "list-type" in asked:
            return 200, {}, self._list(asked.get("prefix", [""])[0])
        if key not in self.objects:
            return 404, {}, b"<Error><Code>NoSuchKey</Code></Error>"
        self.reads.append(key)
        return 200, self._headers(self.objects[key]), self.objects[key]

    def _headers(self, data: bytes) -> dict[str, str]:
        return {
            "ETag": f'"{hashlib.sha256(data).hexdigest()}"',
            "Last-Modified": "Mon, 01 Jan 2024 00:00:00 GMT",
        }

    def _store(
        self, key: str, data: bytes, *, multi: bool = False
    ) -> tuple[int, dict[str, str], bytes]:
        self.log.append(("PUT", key))
        self.objects[key] = data
        etag = self._headers(data)["ETag"]
        return 200, {"ETag": etag}, _ENDED.format(escape(etag)).encode() if multi else b""

    def _delete_many(self, body: bytes) -> bytes:
        keys = [key.decode() for key in re.findall(rb"<Key>(.*?)</Key>", body)]
        for key in keys:
            self.log.append(("DELETE", key))
            self.objects.pop(key, None)
        deleted = "".join(f"<Deleted><Key>{escape(key)}</Key></Deleted>" for key in keys)
        return f"<DeleteResult>{deleted}</DeleteResult>".encode()

    def _list(self, prefix: str) -> bytes:
        entries = "".join(
            f"<Contents><Key>{escape(key)}</Key><Size>{len(data)}</Size><ETag>&quot;x&quot;</ETag>"
            "<LastModified>2024-01-01T00:00:00.000Z</LastModified></Contents>"
            for key, data in sorted(self.objects.items())
            if key.startswith(prefix)
        )
        return (
            f"<ListBucketResult><IsTruncated>false</IsTruncated>{entries}</ListBucketResult>"
        ).encode()
