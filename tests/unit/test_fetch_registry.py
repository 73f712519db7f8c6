"""A package index that is slow, broken, hostile or out of order: its pages, redirects, refusals.

What happens to the files themselves is in test_fetch.py.
"""

from __future__ import annotations

import gzip
import http.server
import json
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from sm75 import transfer
from sm75.errors import FetchError
from sm75.index import IndexConfig, PackageIndex, parse_page
from sm75.store import Store
from sm75.transfer import TransferOptions
from tests.unit.badserver import BadServer
from tests.unit.fetchkit import CONTENT, HASTY, Case, run, stored

PAGE = "simple/demo"
JSON = "application/vnd.pypi.simple.v1+json"


def pages(server: BadServer) -> int:
    return sum(path == f"/{PAGE}/" for path, _ in server.log)


def answer(
    body: bytes, *, kind: str = JSON, length: int | None = None, **headers: str
) -> Callable[[BaseHTTPRequestHandler], None]:
    """A mood: this body, with that Content-Length (default: its own; -1: none)."""

    def do(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Type", kind)
        for name, value in headers.items():
            handler.send_header(name.replace("_", "-"), value)
        if length != -1:
            handler.send_header("Content-Length", str(len(body) if length is None else length))
        handler.close_connection = True
        handler.end_headers()
        handler.wfile.write(body)

    return do


def listing(server: BadServer, name: str) -> bytes:
    """The page that the server would give."""
    filename = name.partition("/")[2]
    entry = {"filename": filename, "url": f"../../files/{name}", "hashes": {}}
    return json.dumps({"meta": {"api-version": "1.0"}, "files": [entry]}).encode()


def refused(server: BadServer, store: Store, case: Case) -> FetchError:
    with pytest.raises(FetchError) as caught:
        run(server, store, case.artifact)
    assert caught.value.exit_code == 4
    assert stored(store) == []
    assert server.requests(case.name) == []
    return caught.value


def arrives(server: BadServer, store: Store, case: Case) -> None:
    run(server, store, case.artifact)
    assert store.get(case.artifact).read_bytes() == CONTENT


def test_a_page_that_stalls_is_asked_for_again(server: BadServer, store: Store, case: Case) -> None:
    def stall(handler: BaseHTTPRequestHandler) -> None:
        answer(b'{"files": [', length=500)(handler)
        server.release.wait(60)

    server.moods[PAGE] = [stall]
    arrives(server, store, case)
    assert pages(server) == 2


def test_a_page_that_never_says_a_word(server: BadServer, store: Store, case: Case) -> None:
    server.always[PAGE] = lambda handler: server.release.wait(60)
    fault = refused(server, store, case)
    assert "timed out waiting for bytes; tried 3 times" in fault.why
    assert pages(server) == HASTY.attempts


def test_a_page_in_drops_is_given_up(server: BadServer, store: Store, case: Case) -> None:
    """Each byte comes before the connection counts as stalled."""

    def drops(handler: BaseHTTPRequestHandler) -> None:
        answer(b"", length=10_000)(handler)
        while not server.release.wait(0.05):
            handler.wfile.write(b" ")
            handler.wfile.flush()

    server.always[PAGE] = drops
    options = TransferOptions(read_timeout=10, page_timeout=0.3, attempts=2, backoff=0.01)
    index = PackageIndex(IndexConfig(indexes=(server.url,)), options)
    with pytest.raises(FetchError) as caught:
        index.find("demo", case.artifact.filename)
    assert "did not come within 0.3 s; tried 2 times" in caught.value.why


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
def test_page_and_file_are_tried_again_with_growing_waits(
    server: BadServer, store: Store, case: Case, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr("sm75.transfer.asyncio.sleep", sleep)
    server.moods[PAGE] = [status, status]
    server.moods[case.name] = [status, status]
    arrives(server, store, case)
    assert waits == [0.01, 0.02, 0.01, 0.02]


@pytest.mark.parametrize("status", [429, 503])
def test_without_end_it_is_an_error_that_says_how_often(
    server: BadServer, store: Store, case: Case, status: int
) -> None:
    server.always[PAGE] = status
    fault = refused(server, store, case)
    assert f"HTTP {status}" in fault.why
    assert "tried 3 times" in fault.why
    assert pages(server) == HASTY.attempts


def test_too_many_requests_and_when_to_come_back(
    server: BadServer, store: Store, case: Case
) -> None:
    server.moods[PAGE] = [(429, {"Retry-After": "1"})]
    started = time.monotonic()
    arrives(server, store, case)
    assert 1 <= time.monotonic() - started < 10


@pytest.mark.parametrize(
    "value", ["soon", "-3", "²", "", "1e9", "Mon, 01 Jan 0001 00:00:00 +2359", "1.5"]
)
def test_a_retry_after_of_no_meaning_is_none(
    server: BadServer, store: Store, case: Case, value: str
) -> None:
    server.moods[PAGE] = [(429, {"Retry-After": value})]
    server.moods[case.name] = [(503, {"Retry-After": value})]
    started = time.monotonic()
    arrives(server, store, case)
    assert time.monotonic() - started < 5


@pytest.mark.parametrize("value", ["86400", "9" * 400])
def test_tomorrow_is_too_late(server: BadServer, store: Store, case: Case, value: str) -> None:
    server.always[PAGE] = (429, {"Retry-After": value})
    assert "come back in" in refused(server, store, case).why
    assert pages(server) == 1


def test_a_page_cut_off_is_asked_for_again(server: BadServer, store: Store, case: Case) -> None:
    """Fewer bytes than its Content-Length, then the end of the connection."""
    whole = listing(server, case.name)
    server.moods[PAGE] = [answer(whole[:40], length=len(whole))]
    arrives(server, store, case)
    assert pages(server) == 2


@pytest.mark.parametrize(
    ("body", "length"),
    [
        (b'{"files": []}', 5),
        (b"", None),
        (b"<html>login</html>", None),
        (b"[" * 200_000, None),
        (b'{"files": [{"filename": 5, "url": "x", "size": 1}]}', None),
        (b'{"files": [{"filename": "x", "url": "x", "size": "1"}]}', None),
        (b'{"files": [{"filename": "x", "url": "x", "hashes": {"sha256": 1}}]}', None),
        (b'{"files": [{"filename": "x", "url": 3}]}', None),
        (b'{"files": [{"filename": "x", "url": "http://[x"}]}', None),
        (b'{"files": {"filename": "x"}}', None),
    ],
)
def test_what_is_no_page(
    server: BadServer, store: Store, case: Case, body: bytes, length: int | None
) -> None:
    server.always[PAGE] = answer(body, length=length)
    assert "not a page of a package index" in refused(server, store, case).why


def test_a_content_length_that_is_no_number(server: BadServer, store: Store, case: Case) -> None:
    server.always[PAGE] = answer(b"{}", length=-1, Content_Length="many")
    assert "tried 3 times" in refused(server, store, case).why


def test_a_packed_page_nobody_asked_for(server: BadServer, store: Store, case: Case) -> None:
    packed = gzip.compress(listing(server, case.name))
    server.moods[PAGE] = [answer(packed, Content_Encoding="gzip")]
    arrives(server, store, case)


def test_a_packed_page_that_is_damaged(server: BadServer, store: Store, case: Case) -> None:
    packed = gzip.compress(listing(server, case.name))
    server.always[PAGE] = answer(packed[:12] + b"xxxxxxxx", Content_Encoding="gzip")
    fault = refused(server, store, case)
    assert "cannot be unpacked" in fault.why
    assert "tried 3 times" in fault.why


def test_a_bomb_in_the_place_of_a_page(
    server: BadServer, store: Store, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A megabyte that unpacks to a gigabyte is given up at the limit."""
    monkeypatch.setattr(transfer, "_PAGE_LIMIT", 4 << 20)
    packed = gzip.compress(bytes(100 << 20))
    assert len(packed) < 200_000
    server.always[PAGE] = answer(packed, Content_Encoding="gzip")
    fault = refused(server, store, case)
    assert "larger than any index page (more than 4 MiB, unpacked)" in fault.why
    assert pages(server) == 1


@pytest.mark.parametrize("hops", [1, 20])
def test_redirects_are_followed(server: BadServer, store: Store, case: Case, hops: int) -> None:
    here = server.url.replace("/simple/", "")
    server.moods[PAGE] = [(302, {"Location": f"{here}/{PAGE}/"})] * hops
    server.moods[case.name] = [(307, {"Location": f"/files/{case.name}"})] * hops
    arrives(server, store, case)


def test_a_loop_of_redirects(server: BadServer, store: Store, case: Case) -> None:
    server.always[PAGE] = (302, {"Location": f"/{PAGE}/"})
    assert "redirects without end" in refused(server, store, case).why
    assert pages(server) == 21


@pytest.mark.parametrize("target", ["ftp://127.0.0.1/x", "file:///etc/passwd", "http://[x/"])
def test_a_redirect_to_nowhere(server: BadServer, store: Store, case: Case, target: str) -> None:
    server.always[PAGE] = (302, {"Location": target})
    refused(server, store, case)


def test_a_redirect_with_an_endless_body(server: BadServer, store: Store, case: Case) -> None:
    """The body of a redirect is of no interest; it is not read."""
    sent = 0

    def endless(handler: BaseHTTPRequestHandler) -> None:
        nonlocal sent
        handler.send_response(302)
        handler.send_header("Location", f"/{PAGE}/")
        handler.end_headers()
        handler.close_connection = True
        while not server.release.is_set() and sent < 1 << 28:
            sent += handler.wfile.write(bytes(1 << 20))

    server.moods[PAGE] = [endless]
    arrives(server, store, case)
    assert sent < 1 << 28


@pytest.fixture
def encrypted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """An https server that redirects to ``to``; its certificate is trusted."""
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    try:
        subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2",
             "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost",
             "-keyout", str(key), "-out", str(certificate)],
            check=True, capture_output=True,
        )  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no openssl to make a certificate with")
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    told: dict[str, Any] = {}

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            return

        def do_GET(self) -> None:
            self.send_response(302)
            self.send_header("Location", told["to"])
            self.send_header("Content-Length", "0")
            self.end_headers()

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    told["url"] = f"https://localhost:{server.server_port}/simple/"
    yield told
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_redirect_that_gives_up_encryption(
    server: BadServer, case: Case, encrypted: dict[str, Any]
) -> None:
    encrypted["to"] = f"{server.url}demo/?secret=x"
    index = PackageIndex(IndexConfig(indexes=(encrypted["url"],)), HASTY)
    with pytest.raises(FetchError, match="not on the package index") as caught:
        index.find("demo", case.artifact.filename)
    assert "unencrypted address" in caught.value.why
    assert server.log == []


def test_a_page_of_the_network_names_no_file_of_this_machine(tmp_path: Path) -> None:
    page = b'{"files": [{"filename": "a-1.tar.gz", "url": "file:///etc/passwd"}]}'
    anchor = b'<a href="file:///etc/passwd">x</a><a href="javascript:x/a-1.tar.gz">x</a>'
    assert parse_page("https://index/simple/a/", JSON, page) == ()
    assert parse_page("https://index/simple/a/", "text/html", anchor) == ()
    # The user's own index on the disk may.
    (link,) = parse_page((tmp_path / "a" / "index.html").as_uri(), JSON, page)
    assert link.local == Path("/etc/passwd")
