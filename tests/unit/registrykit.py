"""A real OCI registry on this machine: Debian's docker-registry; and a proxy that misbehaves.

``program`` installs it where that is allowed, as test_remotecache does with Redis.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import os
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from tests.unit.localserver import LocalServer, body_of

_NEEDED = ("docker-registry", "openssl")
# `htpasswd -Bbn user word`: a login of the tests and of nothing else.
LOGIN = "dXNlcjp3b3Jk"  # base64 of user:word
_HTPASSWD = "user:$2b$05$0KS0hIMf0CvO3N9iOWoRQ.02xVz9bz9lphGSEw7EwSGFQ/FnFJeUe"


def program() -> str:
    """The registry; skips where there is none."""
    missing = [name for name in _NEEDED if not shutil.which(name)]
    if missing and os.geteuid() == 0 and shutil.which("apt-get"):
        for command in (["update", "-qq"], ["install", "-y", "-qq", *missing]):
            subprocess.run(
                ["apt-get", *command], check=False, stdout=subprocess.DEVNULL,
                env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
            )  # fmt: skip
    found = shutil.which("docker-registry")
    if not found or not shutil.which("openssl"):
        pytest.skip("no docker-registry or no openssl here, and none may be installed")
    return found


@dataclass(frozen=True)
class Certificate:
    """A certificate and its key, and who signed it."""

    authority: Path
    file: Path
    key: Path


def certificate(where: Path, address: str) -> Certificate:
    """Make an authority and a certificate for an address, with openssl."""
    where.mkdir()

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], check=True, capture_output=True, cwd=where)

    new = ("req", "-newkey", "rsa:2048", "-nodes")
    openssl(*new, "-x509", "-days", "2", "-subj", "/CN=test authority",
            "-keyout", "ca.key", "-out", "ca.pem")  # fmt: skip
    openssl(*new, "-subj", "/CN=registry", "-keyout", "key.pem", "-out", "ask.pem")
    (where / "ext").write_text(f"subjectAltName=IP:{address}\nextendedKeyUsage=serverAuth\n")
    openssl("x509", "-req", "-in", "ask.pem", "-CA", "ca.pem", "-CAkey", "ca.key",
            "-CAcreateserial", "-days", "2", "-extfile", "ext", "-out", "cert.pem")  # fmt: skip
    return Certificate(where / "ca.pem", where / "cert.pem", where / "key.pem")


@contextlib.contextmanager
def registry(
    where: Path, *, address: str = "127.0.0.1", port: int = 0, delete: bool = True,
    login: bool = False, tls: Certificate | None = None, tokens: Tokens | None = None,
) -> Iterator[str]:  # fmt: skip
    """Run a registry that keeps what it has in ``where``; gives its HOST[:PORT]."""
    found = program()
    where.mkdir(parents=True, exist_ok=True)
    if not port:
        with socket.socket() as probe:
            probe.bind((address, 0))
            port = int(probe.getsockname()[1])
    settings = [
        "version: 0.1", "log: {level: error, accesslog: {disabled: true}}",
        "storage:", f"  filesystem: {{rootdirectory: {where}}}",
        f"  delete: {{enabled: {str(delete).lower()}}}",
        "http:", f"  addr: {address}:{port}", "  secret: of-the-tests",
    ]  # fmt: skip
    if tls:
        settings.append(f"  tls: {{certificate: {tls.file}, key: {tls.key}}}")
    if login:
        (where / "htpasswd").write_text(_HTPASSWD + "\n")
        settings.append(f"auth: {{htpasswd: {{realm: tests, path: {where / 'htpasswd'}}}}}")
    if tokens:
        settings.append(
            f"auth: {{token: {{realm: {tokens.base}/token, service: tests, issuer: tests, "
            f"rootcertbundle: {tokens.signer.authority}}}}}"
        )
    config = where / "config.yml"
    config.write_text("\n".join(settings) + "\n")
    with (where / "log").open("wb") as log:
        server = subprocess.Popen(
            [found, "serve", str(config)], stdout=log, stderr=log,
            env={k: v for k, v in os.environ.items() if not k.startswith(("REGISTRY_", "OTEL_"))},
        )  # fmt: skip
    try:
        for _ in range(600):
            with socket.socket() as probe:
                if probe.connect_ex((address, port)) == 0:
                    break
            assert server.poll() is None, (where / "log").read_text()
            time.sleep(0.05)
        yield address if port == 443 else f"{address}:{port}"
    finally:
        server.terminate()
        server.wait()


@dataclass
class Asked:
    """A request that came by."""

    method: str
    path: str
    headers: dict[str, str] = field(repr=False)


class Proxy(LocalServer):
    """Hands requests on to a registry.

    Attributes:
        log: What was asked, in order.
        moods: Statuses that the next requests of ``METHOD PART-OF-THE-PATH`` get instead, in order;
            0: the connection is closed halfway through the answer.
    """

    def __init__(self, registry: str) -> None:
        super().__init__()
        self.registry = registry
        self.log: list[Asked] = []
        self.moods: dict[str, list[int]] = {}

    def respond(self, handler: BaseHTTPRequestHandler) -> None:
        body = body_of(handler)
        headers = dict(handler.headers.items())
        self.log.append(Asked(handler.command, handler.path, headers))
        mood = self._mood(handler)
        if mood:
            said = b'{"errors": [{"code": "TESTS", "message": "say so"}]}'
            self.send(handler, mood, {"Content-Length": str(len(said))}, said)
            return
        link = http.client.HTTPConnection(self.registry, timeout=60)
        link.request(handler.command, handler.path, body, headers)
        answer = link.getresponse()
        content = answer.read()
        given = {
            name: value for name, value in answer.getheaders()
            if name.lower() not in ("date", "server", "connection", "transfer-encoding")
        }  # fmt: skip
        if handler.command != "HEAD":
            given["Content-Length"] = str(len(content))
        if mood == 0:
            content, handler.close_connection = content[: len(content) // 2], True
        self.send(handler, answer.status, given, content)
        link.close()

    def _mood(self, handler: BaseHTTPRequestHandler) -> int | None:
        for asked, queue in self.moods.items():
            method, _, part = asked.partition(" ")
            if queue and method == handler.command and part in handler.path:
                return queue.pop(0)
        return None


class Tokens(LocalServer):
    """Gives the tokens that a registry asks for: for what is asked and no more, to ``LOGIN``;
    for reading, to anybody.

    Attributes:
        asked: (scope, whether logged in) of each request.
    """

    def __init__(self, signer: Certificate) -> None:
        super().__init__()
        self.signer = signer
        self.asked: list[tuple[str, bool]] = []

    def respond(self, handler: BaseHTTPRequestHandler) -> None:
        scope = parse_qs(urlsplit(handler.path).query)["scope"][0]
        _, repository, actions = scope.split(":")
        known = handler.headers.get("Authorization") == f"Basic {LOGIN}"
        self.asked.append((scope, known))
        allowed = [action for action in actions.split(",") if known or action == "pull"]
        claims = {
            "iss": "tests", "sub": "user", "aud": "tests", "jti": str(len(self.asked)),
            "nbf": int(time.time()) - 60, "iat": int(time.time()), "exp": int(time.time()) + 300,
            "access": [{"type": "repository", "name": repository, "actions": allowed}],
        }  # fmt: skip
        body = json.dumps({"token": self._signed(claims)}).encode()
        self.send(handler, 200, {"Content-Length": str(len(body))}, body)

    def _signed(self, claims: dict[str, object]) -> str:
        """A JSON Web Token (RFC 7519), by openssl."""
        chain = [base64.b64encode(ssl.PEM_cert_to_DER_cert(self.signer.file.read_text())).decode()]
        parts = ({"typ": "JWT", "alg": "RS256", "x5c": chain}, claims)
        text = b".".join(_base64url(json.dumps(part).encode()) for part in parts)
        signature = subprocess.run(
            ["openssl", "dgst", "-sha256", "-sign", self.signer.key],
            input=text, check=True, capture_output=True,
        ).stdout  # fmt: skip
        return (text + b"." + _base64url(signature)).decode()


def _base64url(data: bytes) -> bytes:
    return base64.urlsafe_b64encode(data).rstrip(b"=")


def may_listen(address: str, port: int) -> bool:
    """Whether this process may serve there."""
    try:
        with socket.socket() as probe:
            probe.bind((address, port))
    except OSError:
        return False
    return True
