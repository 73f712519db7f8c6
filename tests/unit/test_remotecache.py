"""The compiler cache that builders share, with a real Redis server."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from sm75.errors import UsageError
from sm75.progress import SilentReporter
from sm75.remotecache import Remote, parse, shared


class Said(SilentReporter):
    """Keeps the lines."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def line(self, text: str) -> None:
        self.lines.append(text)


@pytest.fixture(scope="module")
def redis_server() -> Iterator[int]:
    """A real Redis with a password; its port."""
    program = redis_program()
    if program is None:
        pytest.skip("no redis-server here, and none may be installed")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    server = subprocess.Popen(
        [program, "--port", str(port), "--bind", "127.0.0.1", "--save", "",
         "--requirepass", "a b:c"],
        stdout=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        for _ in range(100):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.05)
        yield port
    finally:
        server.terminate()
        server.wait()


def redis_program() -> str | None:
    """The server; installed where that is allowed (root on Debian or Ubuntu)."""
    if not shutil.which("redis-server") and os.geteuid() == 0 and shutil.which("apt-get"):
        for command in (["update", "-qq"], ["install", "-y", "-qq", "redis-server"]):
            subprocess.run(
                ["apt-get", *command], check=False, stdout=subprocess.DEVNULL,
                env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
            )  # fmt: skip
    return shutil.which("redis-server")


def _ask(setting: str, command: bytes) -> bytes:
    """Do what ccache does with its setting: connect, log in, choose the database, ask."""
    parts = urlsplit(setting)
    assert parts.scheme == "redis+unix"
    with socket.socket(socket.AF_UNIX) as link:
        link.settimeout(5)
        link.connect(parts.path)
        link.sendall(b'AUTH "a b:c"\r\n')
        assert link.recv(100) == b"+OK\r\n"
        link.sendall(f"SELECT {parse_qs(parts.query)['db'][0]}\r\n".encode())
        assert link.recv(100) == b"+OK\r\n"
        link.sendall(command + b"\r\n")
        return link.recv(1 << 16)


def test_a_real_server_is_reached_through_the_socket(redis_server: int) -> None:
    said = Said()
    with shared(f"redis://a%20b%3Ac@127.0.0.1:{redis_server}/3", said) as setting:
        assert setting.startswith("redis+unix://a%20b%3Ac@localhost/")
        assert _ask(setting, b"SET key value") == b"+OK\r\n"
        assert _ask(setting, b"GET key") == b"$5\r\nvalue\r\n"
        place = Path(urlsplit(setting).path)
    assert said.lines == [f"cache: shared with redis://127.0.0.1:{redis_server}/3"]
    assert not place.exists()
    with shared(f"redis://a%20b%3Ac@127.0.0.1:{redis_server}/4", said) as setting:
        assert _ask(setting, b"GET key") == b"$-1\r\n"


def test_a_build_without_network_reaches_it(redis_server: int) -> None:
    if subprocess.run(["unshare", "-n", "true"], check=False, capture_output=True).returncode:
        pytest.skip("this kernel gives no network namespace")
    probe = (
        "import socket, sys\n"
        "link = socket.socket(socket.AF_UNIX); link.connect(sys.argv[1])\n"
        "link.sendall(b'AUTH \"a b:c\"\\r\\nPING\\r\\n'); print(link.recv(99))\n"
    )
    with shared(f"redis://:a%20b%3Ac@127.0.0.1:{redis_server}", Said()) as setting:
        done = subprocess.run(
            ["unshare", "-n", sys.executable, "-c", probe, urlsplit(setting).path],
            check=True, capture_output=True, text=True,
        )  # fmt: skip
    assert "+OK" in done.stdout


def test_a_server_that_is_away_is_said_and_not_used() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # bound, not listening
        port = held.getsockname()[1]
        said = Said()
        with shared(f"redis://secret@127.0.0.1:{port}", said) as setting:
            assert setting == ""
    assert len(said.lines) == 1
    assert f"redis://127.0.0.1:{port}/0 is out of reach" in said.lines[0]
    assert "secret" not in said.lines[0]


def test_a_directory_is_ccaches_own_business(tmp_path: Path) -> None:
    with shared(f"file://{tmp_path}", Said()) as setting:
        assert setting == f"file:{tmp_path}"


def test_none() -> None:
    with shared("", Said()) as setting:
        assert setting == ""


@pytest.mark.parametrize(
    ("url", "remote"),
    [
        ("redis://h", Remote(host="h")),
        ("redis://h:7/2", Remote(host="h", port=7, database=2)),
        ("redis://p@h", Remote(host="h", password="p")),
        ("redis://u:p%40@h", Remote(host="h", user="u", password="p@")),
        ("file:///a%20b", Remote(directory="/a b")),
    ],
)
def test_what_is_understood(url: str, remote: Remote) -> None:
    assert parse(url) == remote
    assert "p@" not in str(remote)


@pytest.mark.parametrize(
    "url", ["h:6379", "http://h", "redis://", "redis://h/x", "redis://h:x", "file://h/a", "file:a"]
)
def test_what_is_not(url: str) -> None:
    with pytest.raises(UsageError, match="--remote-cache is not understood") as caught:
        parse(url)
    assert "redis://HOST" in caught.value.fix
