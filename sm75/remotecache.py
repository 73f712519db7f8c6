"""A compiler cache that several builders share: a Redis server or a directory.

The build itself has no network. ccache is given a Unix socket, which the orchestrator, outside the
build's network namespace, forwards to the server: the build reaches that one server and no other.

Whoever can write to the shared cache decides what ends up in a package. ``build --recompile`` and
``build --check`` take nothing from it.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

from sm75.errors import UsageError
from sm75.progress import Reporter

# Redis' own default (https://redis.io/docs/latest/operate/oss_and_stack/management/config/).
REDIS_PORT = 6379
# Seconds to wait for the server before the build goes on without it.
PATIENCE = 5.0
_CHUNK = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Remote:
    """Where the shared cache is.

    Attributes:
        directory: A directory all builders see; empty for a server.
        host: The Redis server.
        port: Its TCP port.
        user: For its authentication, where it asks for any.
        password: Likewise; never shown.
        database: Number of its database.
    """

    directory: str = ""
    host: str = ""
    port: int = REDIS_PORT
    user: str = ""
    password: str = ""
    database: int = 0

    def __str__(self) -> str:
        return self.directory or f"redis://{self.host}:{self.port}/{self.database}"


def parse(url: str) -> Remote:
    """Read ``--remote-cache``.

    Args:
        url: ``redis://[[USER:]PASSWORD@]HOST[:PORT][/DATABASE]`` or ``file:///DIRECTORY``.

    Raises:
        UsageError: It is neither, or incomplete.
    """

    def refused(why: str) -> UsageError:
        return UsageError(
            "--remote-cache is not understood",
            why=why,
            fix="give redis://HOST[:PORT][/DATABASE] or file:///DIRECTORY",
        )

    try:
        parts = urlsplit(url)
        port = parts.port or REDIS_PORT
    except ValueError as err:
        raise refused(str(err)) from err
    if parts.scheme == "file":
        if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
            raise refused("a directory is named by its absolute path")
        return Remote(directory=unquote(parts.path))
    if parts.scheme != "redis" or not parts.hostname:
        raise refused(f"it begins with {parts.scheme or 'no scheme'}, or names no host")
    database = parts.path.strip("/") or "0"
    if not database.isdecimal():
        raise refused(f"a database of Redis is a number, not {database!r}")
    user, password = unquote(parts.username or ""), unquote(parts.password or "")
    if user and not password:  # as in redis://PASSWORD@HOST
        user, password = "", user
    return Remote(
        host=parts.hostname, port=port, user=user, password=password, database=int(database)
    )


@contextlib.contextmanager
def shared(url: str, reporter: Reporter) -> Iterator[str]:
    """Make a shared cache reachable from a build without network, while the block runs.

    Args:
        url: As for :func:`parse`; empty: there is none.
        reporter: Is told when the server is out of reach.

    Yields:
        The value of ccache's ``remote_storage``; empty: without.

    Raises:
        UsageError: The URL is not understood.
    """
    remote = parse(url) if url else None
    if remote is None:
        yield ""
    elif remote.directory:
        yield f"file:{remote.directory}"
    elif trouble := _unreachable(remote):
        reporter.line(f"cache: {remote} is out of reach ({trouble}); going on without it")
        yield ""
    else:
        with _forwarded(remote) as place:
            reporter.line(f"cache: shared with {remote}")
            yield _setting(remote, place)


def _setting(remote: Remote, place: Path) -> str:
    words = [quote(word, safe="") for word in (remote.user, remote.password) if word]
    login = ":".join(words) + "@" if words else ""
    return f"redis+unix://{login}localhost{quote(str(place))}?db={remote.database}"


def _unreachable(remote: Remote) -> str:
    try:
        socket.create_connection((remote.host, remote.port), timeout=PATIENCE).close()
    except OSError as err:
        return err.strerror or str(err)
    return ""


@contextlib.contextmanager
def _forwarded(remote: Remote) -> Iterator[Path]:
    """Forward a Unix socket to the server."""
    # The path of a Unix socket has at most 107 bytes; a project's may be longer.
    with tempfile.TemporaryDirectory(prefix="sm75-cache-") as directory:
        place = Path(directory) / "socket"
        loop = asyncio.new_event_loop()
        ready = threading.Event()
        thread = threading.Thread(target=_serve, args=(loop, place, remote, ready), daemon=True)
        thread.start()
        ready.wait()
        try:
            yield place
        finally:
            loop.call_soon_threadsafe(loop.stop)
            thread.join(timeout=PATIENCE)


def _serve(
    loop: asyncio.AbstractEventLoop, place: Path, remote: Remote, ready: threading.Event
) -> None:
    async def connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there = await asyncio.wait_for(
                asyncio.open_connection(remote.host, remote.port), PATIENCE
            )
        except (OSError, TimeoutError):  # ccache compiles when its cache hangs up
            writer.close()
            return
        await asyncio.gather(_pump(reader, there[1]), _pump(there[0], writer))

    asyncio.set_event_loop(loop)
    loop.run_until_complete(asyncio.start_unix_server(connection, place))
    ready.set()
    loop.run_forever()
    for task in asyncio.all_tasks(loop):
        task.cancel()
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while block := await reader.read(_CHUNK):
            writer.write(block)
            await writer.drain()
    with contextlib.suppress(OSError):
        writer.close()
