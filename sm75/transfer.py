"""HTTP with resumption and retries: bytes of a link into a file.

Nothing here decides whether bytes are the right ones; that is the hash's work, in
``sm75.fetch`` and ``sm75.remotezip``.
"""

from __future__ import annotations

import asyncio
import email.utils
import functools
import os
import re
import ssl
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import unquote, urlsplit, urlunsplit

import httpx

from sm75 import __version__
from sm75.errors import FetchError
from sm75.store import disk_errors
from sm75.words import counted

_RETRY_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})
_CHUNK = 1 << 18
# As many as httpx follows.
_REDIRECTS = 20
# PyPI's largest pages have some 20 MB; what is compressed counts as it is unpacked.
_PAGE_LIMIT = 64 << 20
_CONTENT_RANGE = re.compile(r"^bytes (\d+)-(\d+)/(\d+|\*)$")


@dataclass(frozen=True, kw_only=True)
class TransferOptions:
    """How patient a transfer is.

    Attributes:
        connect_timeout: Seconds to wait for a connection.
        read_timeout: Seconds without a byte after which a connection counts as stalled.
        page_timeout: Seconds that an index page may take, however often a byte of it comes.
        attempts: Tries before giving up; counted anew from a try that brings something.
        backoff: Seconds before the second try; doubled each time.
        backoff_max: Longest wait between tries, in seconds.
        retry_after_max: Longest ``Retry-After`` that is obeyed, in seconds; beyond, the
            fetch ends and says so.
        parallel: Files fetched at once.
    """

    connect_timeout: float = 15.0
    read_timeout: float = 30.0
    page_timeout: float = 120.0
    attempts: int = 5
    backoff: float = 1.0
    backoff_max: float = 30.0
    retry_after_max: float = 120.0
    parallel: int = 6


@dataclass(frozen=True, kw_only=True)
class FileLink:
    """A file somewhere.

    Attributes:
        filename: Its name.
        url: ``https:``, ``http:`` or ``file:``.
        sha256: As the index states it; None when it does not.
        size: In bytes, as the index states it; None when it does not.
    """

    filename: str
    url: str
    sha256: str | None = None
    size: int | None = None

    @property
    def local(self) -> Path | None:
        """The path of a ``file:`` link, else None."""
        parts = urlsplit(self.url)
        return Path(unquote(parts.path)) if parts.scheme == "file" else None


class RangeIgnored(Exception):
    """The server answers a range request with the whole file."""


class _Retry(Exception):
    """This try failed in a way that another may not."""

    def __init__(self, reason: str, wait: float | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.wait = wait


def redact(url: str) -> str:
    """The URL without user name and password."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit(parts._replace(netloc=host))


def tls_context() -> ssl.SSLContext:
    """Certificates as the user has set them up.

    OpenSSL itself honours SSL_CERT_FILE and SSL_CERT_DIR; PIP_CERT and REQUESTS_CA_BUNDLE
    are honoured here; without any, the system's certificates, else certifi's.

    Raises:
        FetchError: The named file cannot be read.
    """
    own = os.environ.get("SSL_CERT_FILE") or os.environ.get("SSL_CERT_DIR") or ""
    return _tls_context(own, os.environ.get("PIP_CERT") or os.environ.get("REQUESTS_CA_BUNDLE"))


@functools.cache  # reading all certificates takes a tenth of a second
def _tls_context(own: str, named: str | None) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context()
    except (OSError, ssl.SSLError) as error:
        raise FetchError(
            f"cannot load the certificates in {own}", why=str(error), fix="correct SSL_CERT_FILE"
        ) from error
    if own:
        return context
    try:
        if named:
            folder = Path(named).is_dir()
            context.load_verify_locations(
                cafile=None if folder else named, capath=named if folder else None
            )
        elif not context.cert_store_stats()["x509_ca"]:
            import certifi

            context.load_verify_locations(certifi.where())
    except (OSError, ssl.SSLError) as error:
        raise FetchError(
            f"cannot load the certificates in {named}",
            why=str(error),
            fix="correct PIP_CERT or REQUESTS_CA_BUNDLE, or set SSL_CERT_FILE",
        ) from error
    return context


class Transfer:
    """A client for one run; an async context manager.

    Args:
        options: How patient it is.
    """

    def __init__(self, options: TransferOptions | None = None) -> None:
        self.options = options or TransferOptions()
        self.requests = 0
        """Requests made so far, each try counted."""
        self.received = 0
        """Bytes of files received so far; index pages are not counted."""
        self._client: httpx.AsyncClient | None = None
        self._netrc = _netrc()

    async def __aenter__(self) -> Self:
        options = self.options
        self._client = httpx.AsyncClient(
            verify=tls_context(),
            follow_redirects=False,  # see _answer
            timeout=httpx.Timeout(options.read_timeout, connect=options.connect_timeout),
            limits=httpx.Limits(max_connections=2 * options.parallel),
            headers={
                "User-Agent": f"vllm-sm75/{__version__}",
                # The bytes that are hashed are the file's own.
                "Accept-Encoding": "identity",
            },
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._client is not None:
            await self._client.aclose()

    async def page(self, url: str, accept: str) -> tuple[str, str, bytes]:
        """Read a page of an index.

        Returns:
            Final URL, content type, body.

        Raises:
            FetchError: It cannot be had; ``status`` 404 and 410 too.
        """
        failures = 0
        while True:
            try:
                async with (
                    asyncio.timeout(self.options.page_timeout),
                    self._open(url, {"Accept": accept}) as response,
                ):
                    body = bytearray()
                    async for chunk in response.aiter_bytes():
                        body += chunk
                        if len(body) > _PAGE_LIMIT:
                            raise FetchError(
                                f"{redact(url)} is larger than any index page",
                                why=f"more than {_PAGE_LIMIT >> 20} MiB, unpacked",
                                fix="check the index settings of pip or uv",
                            )
                    kind = response.headers.get("content-type", "")
                    return str(response.url), kind, bytes(body)
            except TimeoutError:
                failures += 1
                spent = f"it did not come within {self.options.page_timeout:g} s"
                await self._pause(url, failures, _Retry(spent))
            except _Retry as retry:
                failures += 1
                await self._pause(url, failures, retry)

    async def size(self, link: FileLink) -> int:
        """Size in bytes of a file, asked of whoever serves it.

        Raises:
            FetchError: It cannot be had, or the server does not say.
        """
        if link.local is not None:
            try:
                return link.local.stat().st_size
            except OSError as error:
                raise FetchError(f"cannot read {link.local}", why=str(error)) from error
        failures = 0
        while True:
            try:
                async with self._open(link.url, {"Range": "bytes=0-0"}) as response:
                    if (found := _content_range(response)) is not None and found[2] is not None:
                        return found[2]
                    if response.status_code == 200 and "content-length" in response.headers:
                        return int(response.headers["content-length"])
                    raise FetchError(f"the server does not say the size of {link.filename}")
            except _Retry as retry:
                failures += 1
                await self._pause(link.url, failures, retry)

    async def download(
        self,
        link: FileLink,
        part: Path,
        *,
        total: int,
        start: int = 0,
        length: int | None = None,
        on_bytes: Callable[[int], None] = lambda amount: None,
    ) -> None:
        """Bring bytes ``start`` .. ``start + length`` of a file into ``part``.

        What ``part`` already holds is taken as the beginning and not read again. When this
        returns, ``part`` has ``length`` bytes on disk.

        Args:
            link: The file.
            part: Where its bytes go.
            total: Size of the whole file, in bytes; a server that states another is refused.
            start: First byte.
            length: How many; None: to the end.
            on_bytes: Told of each amount that ``part`` grows by; negative on a fresh start.

        Raises:
            FetchError: The bytes cannot be had.
            DiskError: ``part`` cannot be written.
            RangeIgnored: A part of the file was asked for and the server sends it whole.
        """
        length = total - start if length is None else length
        have = _size(part)
        if have > length:
            part.unlink()
            have = 0
        best = have
        on_bytes(have)
        failures = 0
        while have < length:
            reason: _Retry | None = None
            try:
                await self._append(link, part, start, length, total, on_bytes)
            except _Retry as retry:
                reason = retry
            have = _size(part)
            if have >= length:
                break
            reason = reason or _Retry(f"the connection ended after {have} of {length} bytes")
            failures = failures + 1 if have <= best else 1
            best = max(best, have)
            await self._pause(link.url, failures, reason, have=have, length=length)

    async def _append(
        self,
        link: FileLink,
        part: Path,
        start: int,
        length: int,
        total: int,
        on_bytes: Callable[[int], None],
    ) -> None:
        have = _size(part)
        if link.local is not None:
            await _copy(link.local, part, start, length, on_bytes)
            return
        whole = start == 0 and length == total
        first = start + have
        headers = {} if whole and not have else {"Range": f"bytes={first}-{start + length - 1}"}
        async with self._open(link.url, headers) as response:
            if response.status_code == 200:
                if headers and not whole:
                    raise RangeIgnored(link.filename)
                if (said := response.headers.get("content-length")) not in (None, str(total)):
                    raise _other_file(link, f"expected {total} bytes, the server announces {said}")
                on_bytes(-have)
                have = 0
            else:
                found = _content_range(response)
                if found is None or found[0] != first or found[2] not in (None, total):
                    said = response.headers.get("content-range", "no Content-Range")
                    raise _other_file(
                        link, f"asked for bytes from {first} of {total}, got '{said}'"
                    )
            with disk_errors(part):
                stream = part.open("ab" if have else "wb")
            try:
                async for chunk in response.aiter_raw():
                    self.received += len(chunk)
                    if have + len(chunk) > length:
                        raise FetchError(
                            f"{link.filename}: the server sends more than the {length} bytes asked",
                            fix="run fetch again; if it stays so, the package index (or a "
                            "proxy) serves another file",
                        )
                    with disk_errors(part):
                        stream.write(chunk)
                    have += len(chunk)
                    on_bytes(len(chunk))
                with disk_errors(part):
                    stream.flush()
                    os.fsync(stream.fileno())
            finally:
                with disk_errors(part):
                    stream.close()

    @asynccontextmanager
    async def _open(self, url: str, headers: dict[str, str]) -> AsyncIterator[httpx.Response]:
        """A streamed answer of status 200 or 206; else _Retry or FetchError."""
        if self._client is None:
            raise RuntimeError("Transfer is used outside its context")
        self.requests += 1
        auth = self._netrc if self._netrc and "@" not in urlsplit(url).netloc else None
        try:
            response = await self._answer(
                self._client.build_request("GET", url, headers=headers),
                auth or httpx.USE_CLIENT_DEFAULT,
            )
            try:
                _check_status(url, response)
                yield response
            finally:
                await response.aclose()
        except httpx.TimeoutException as error:
            what = "connect" if isinstance(error, httpx.ConnectTimeout) else "bytes"
            raise _Retry(f"timed out waiting for {what}") from error
        except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
            raise FetchError(f"cannot read {redact(url)}", why=str(error)) from error
        except httpx.DecodingError as error:
            raise _Retry(f"the answer cannot be unpacked: {error}") from error
        except httpx.TransportError as error:
            if isinstance(error.__cause__ and error.__cause__.__cause__, ssl.SSLError):
                raise FetchError(
                    f"no trusted connection to {redact(url)}",
                    why=str(error),
                    fix="behind a proxy with its own certificate, set SSL_CERT_FILE",
                ) from error
            raise _Retry(str(error) or type(error).__name__) from error

    async def _answer(
        self, request: httpx.Request, auth: httpx.Auth | httpx._client.UseClientDefault
    ) -> httpx.Response:
        """The answer at the end of all redirects, streamed.

        httpx would read the body of each redirect, however long, and go from https to http.
        """
        first = request.url
        for _ in range(_REDIRECTS + 1):
            client = self._client
            if client is None:
                raise RuntimeError("Transfer is used outside its context")
            response = await client.send(request, auth=auth, stream=True)
            following = response.next_request
            if following is None:
                return response
            await response.aclose()
            if request.url.scheme == "https" and following.url.scheme == "http":
                raise FetchError(
                    f"{redact(str(request.url))} redirects to an unencrypted address",
                    why=f"{redact(str(following.url))}: anybody on the way could answer there",
                    fix="check the index settings of pip or uv",
                )
            request = following
        raise FetchError(
            f"{redact(str(first))} redirects without end",
            why=f"after {_REDIRECTS} redirects: {redact(str(request.url))}",
            fix="check the index settings of pip or uv",
        )

    async def _pause(
        self, url: str, failures: int, retry: _Retry, *, have: int = 0, length: int = 0
    ) -> None:
        options = self.options
        wait = min(options.backoff * 2 ** (failures - 1), options.backoff_max)
        if retry.wait is not None:
            wait = max(wait, retry.wait)
        if failures >= options.attempts or wait > max(options.retry_after_max, options.backoff_max):
            name = unquote(urlsplit(url).path.rstrip("/").rpartition("/")[2])
            if have:
                what = f"{name} is truncated: {have} of {length} bytes came"
            else:
                what = f"cannot read {name}"
            why = f"{redact(url)}: {retry.reason}; tried {counted(failures, 'time')}"
            if retry.wait is not None and failures < options.attempts:
                why = f"{redact(url)}: {retry.reason}, come back in {retry.wait:.0f} s"
            raise FetchError(
                what, why=why, fix="check the network, then run fetch again: it resumes"
            )
        await asyncio.sleep(wait)


def _other_file(link: FileLink, why: str) -> FetchError:
    return FetchError(
        f"{link.filename}: the server's file is not the one that the lock pins",
        why=why,
        fix="run fetch again; if it stays so, the package index serves another file",
    )


def _check_status(url: str, response: httpx.Response) -> None:
    status = response.status_code
    if status in (200, 206):
        return
    said = f"HTTP {status} {response.reason_phrase}".rstrip()
    if status in _RETRY_STATUS:
        raise _Retry(said, _retry_after(response))
    fix = ""
    if status in (401, 403, 407):
        fix = "check the credentials of the package index (netrc, or in the index URL)"
    raise HttpStatusError(f"{redact(url)} cannot be had", why=said, fix=fix, status=status)


class HttpStatusError(FetchError):
    """A final answer other than success.

    Args:
        status: The HTTP status.
    """

    def __init__(self, what: str, *, why: str, fix: str, status: int) -> None:
        super().__init__(what, why=why, fix=fix)
        self.status = status


def _retry_after(response: httpx.Response) -> float | None:
    value = response.headers.get("retry-after")
    if value is None:
        return None
    if value.isdecimal():
        return float(value)
    try:
        moment = email.utils.parsedate_to_datetime(value).timestamp()
    except (ValueError, OverflowError):
        return None
    return max(0.0, moment - time.time())


def _content_range(response: httpx.Response) -> tuple[int, int, int | None] | None:
    found = _CONTENT_RANGE.match(response.headers.get("content-range", ""))
    if response.status_code != 206 or found is None:
        return None
    first, last, total = found.groups()
    return int(first), int(last), None if total == "*" else int(total)


async def _copy(
    source: Path, part: Path, start: int, length: int, on_bytes: Callable[[int], None]
) -> None:
    have = _size(part)
    try:
        stream = source.open("rb")
    except OSError as error:
        raise FetchError(f"cannot read {source}", why=str(error)) from error
    with stream:
        stream.seek(start + have)
        with disk_errors(part), part.open("ab") as out:
            while have < length and (chunk := stream.read(min(_CHUNK, length - have))):
                out.write(chunk)
                have += len(chunk)
                on_bytes(len(chunk))
                await asyncio.sleep(0)
            out.flush()
            os.fsync(out.fileno())
    if have < length:
        raise FetchError(f"{source} is truncated", why=f"{have} of {length} bytes are there")


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _netrc() -> httpx.NetRCAuth | None:
    import netrc

    try:
        return httpx.NetRCAuth()
    except (OSError, netrc.NetrcParseError):
        return None
