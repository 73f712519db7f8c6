"""oras, made fit for a long run: it repeats, asks anew for tokens, and says what was refused.

oras 0.2 waits without end, repeats after status 500 only, sends a token that is for another
repository, reads no ``DOCKER_CONFIG`` and knows no registry that wants a plain login. What it knows
of registries, tokens, Docker's settings and credential helpers is used as it is.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import requests

from sm75 import publishtools
from sm75.errors import FetchError, Sm75Error, UsageError

# Of an answer that another try may change (RFC 9110, RFC 6585).
_PASSING = frozenset({408, 429, 500, 502, 503, 504})
# Tries of one request and seconds between them, doubled: what obstore does for object stores.
TRIES = 10
PAUSE, PAUSE_MAX = 0.1, 15.0
# Seconds that a registry's Retry-After is obeyed for at most.
RETRY_AFTER_MAX = 60.0
# Seconds until a connection is there, and until the next bytes come.
TIMEOUTS = (10.0, 60.0)
# Bytes of an answer that is no blob: registries take manifests of 4 MiB at most (the distribution
# specification, "Pushing Manifests"), and lists of tags come in pages.
ANSWER_MAX = 16 << 20
# Pages of a list of tags, which have 50 to 1,000 tags: more than a repository of ours will have.
PAGES_MAX = 100

T = TypeVar("T")


class Refused(Exception):
    """An answer that is no success.

    Attributes:
        status: Of HTTP.
        wait: Seconds that the registry asks to wait.
    """

    def __init__(self, response: requests.Response) -> None:
        super().__init__(f"status {response.status_code}: {_said(response)}")
        self.status = response.status_code
        after = response.headers.get("Retry-After", "")
        self.wait = min(float(after), RETRY_AFTER_MAX) if after.isdecimal() else 0.0


class _Patient(requests.adapters.HTTPAdapter):
    """Waits for no answer without end, and takes none that has none."""

    def send(
        self, request: requests.PreparedRequest, stream: bool = False, *args: Any, **options: Any
    ) -> requests.Response:
        response = super().send(request, stream, *args, **{**options, "timeout": TIMEOUTS})
        if not stream:
            _bounded(response)
        return response


def _bounded(response: requests.Response) -> None:
    """Read an answer's body, where requests itself would read it whatever its size."""
    body = bytearray()
    for chunk in response.iter_content(1 << 16):
        body += chunk
        if len(body) > ANSWER_MAX:
            response.close()
            raise requests.exceptions.ContentDecodingError(
                f"an answer of more than {ANSWER_MAX} bytes where a short one belongs"
            )
    response._content = bytes(body)


def module(root: Path) -> Any:
    """Import oras; what it would print is said by errors.

    Args:
        root: The project's directory.

    Raises:
        ToolchainError: It cannot be had.
    """
    oras: Any = publishtools.client(root, "oras", "oras.provider", "oras.auth.token")
    oras.logger.logger.logger.setLevel(logging.CRITICAL)
    return oras


def make(root: Path, host: str, *, insecure: bool, like: Any = None) -> Any:
    """Make oras's client of a registry.

    Args:
        root: The project's directory.
        host: Of the registry, with the port where it has another one.
        insecure: Use http.
        like: Another client of it, which has read Docker's settings and asked the helpers.

    Raises:
        ToolchainError: oras cannot be had.
        UsageError: Docker's settings cannot be read.
    """
    oras = module(root)
    token_auth: Any = oras.auth.token.TokenAuth
    registry: Any = oras.provider.Registry

    class Login(token_auth):  # type: ignore[misc]
        """Asks anew whenever the registry does: a token is for one repository and one use."""

        scheme = "Bearer"

        def get_auth_header(self) -> dict[str, str]:
            return {"Authorization": f"{self.scheme} {self.token}"} if self.token else {}

        def authenticate_request(
            self, original: requests.Response, headers: dict[str, str], refresh: bool = False
        ) -> tuple[dict[str, str], bool]:
            asked = original.headers.get("Www-Authenticate", "")
            known = getattr(self, "_basic_auth", "")
            if asked.lower().startswith("basic"):
                if not known or headers.get("Authorization") == f"Basic {known}":
                    raise Refused(original)
                self.scheme, self.token = "Basic", known
                return {**headers, **self.get_auth_header()}, True
            realm = re.search(r'realm="([^"]*)"', asked)
            if not realm or (urlsplit(realm[1]).scheme != "https" and not insecure):
                raise Refused(original)  # a login would go there in the clear
            headers, changed = super().authenticate_request(original, headers, refresh=True)
            if not changed:
                raise Refused(original)
            return headers, True

    class Registry(registry):  # type: ignore[misc]
        def do_request(self, *args: Any, **options: Any) -> requests.Response:
            response: requests.Response = super().do_request.__wrapped__(self, *args, **options)
            if response.status_code >= 400 and response.status_code != 404:
                raise Refused(response)
            return response

        def _do_paginated_request(
            self, url: str, callable: Callable[[requests.Response], bool]
        ) -> None:
            pages = itertools.count(1)

            def one(response: requests.Response) -> bool:
                if next(pages) > PAGES_MAX:
                    raise ValueError(f"its list of tags has more than {PAGES_MAX} pages")
                return callable(response)

            super()._do_paginated_request(url, one)

        def _check_200_response(self, response: requests.Response) -> None:
            if not 200 <= response.status_code < 300:
                raise Refused(response)

    made = Registry(host, insecure, os.environ.get("SSL_CERT_FILE") or True)
    made.auth = Login()
    made.auth.session, made.auth.prefix = made.session, made.prefix
    made.auth._tls_verify = made._tls_verify
    made.session.mount("https://", _Patient())
    made.session.mount("http://", _Patient())
    if like:
        made.auth._auth_config = like.auth._auth_config
    try:
        if not like and (folder := os.environ.get("DOCKER_CONFIG")):
            made.auth._auth_config = _settings(Path(folder) / "config.json")
        made.auth.load_configs(made.get_container(f"{host}/any"))
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        raise UsageError(
            "Docker's config.json, or what its credential helper says, cannot be read",
            why=str(error)[:200],
            fix=f"see ~/.docker or DOCKER_CONFIG, or log in anew: docker login {host}",
        ) from error
    return made


def _settings(file: Path) -> dict[str, Any]:
    """Docker's settings as oras keeps them, of this file alone."""
    found = json.loads(file.read_bytes()) if file.is_file() else {}
    return {"auths": found.get("auths", {}), "credsStore": found.get("credsStore"),
            "credHelpers": found.get("credHelpers", {})}  # fmt: skip


def persist(what: str, host: str, do: Callable[[], T]) -> T:
    """Do something with a registry, again when it fails in passing.

    Args:
        what: What is done, for the message.
        host: The registry.
        do: Does it; may be repeated.

    Raises:
        FetchError: It fails for good.
    """
    for turn in range(1, TRIES + 1):
        wait = min(PAUSE * 2 ** (turn - 1), PAUSE_MAX)
        try:
            return do()
        except Refused as error:
            if error.status not in _PASSING or turn == TRIES:
                raise _failed(what, host, error) from error
            wait = max(wait, error.wait)
        except (
            requests.exceptions.ConnectionError, requests.exceptions.Timeout,
            requests.exceptions.ChunkedEncodingError,
        ) as error:  # fmt: skip
            if isinstance(error, requests.exceptions.SSLError) or turn == TRIES:
                raise _failed(what, host, error) from error
        except Sm75Error:
            raise
        # oras says with these that an answer is not what the protocol has.
        except (
            requests.exceptions.RequestException,
            ValueError,
            LookupError,
            TypeError,
            AttributeError,
        ) as error:
            raise _failed(what, host, error) from error
        time.sleep(wait)
    raise AssertionError  # the last turn returns or raises


def _failed(what: str, host: str, error: Exception) -> FetchError:
    fix = "check the network, then run the same command again: it goes on where it ended"
    if isinstance(error, Refused) and error.status in (401, 403):
        fix = (
            f"log in with a client that writes Docker's config.json (docker login {host}), see "
            "that the credential helper it names is on PATH, and what this login may do there"
        )
    elif isinstance(error, requests.exceptions.SSLError):
        fix = "name the registry's certificate authority in SSL_CERT_FILE"
    return FetchError(f"{what} failed at {host}", why=_short(error), fix=fix)


def _short(error: Exception) -> str:
    """What an error says, without signatures of the store behind a registry."""
    return re.sub(r"\?\S*", "", str(error) or type(error).__name__)[:300]


def _said(response: requests.Response) -> str:
    try:
        first = response.json()["errors"][0]
        return f"{first.get('code', '')} {first.get('message', '')}".strip()[:200]
    except (ValueError, LookupError, TypeError, AttributeError, requests.RequestException):
        return response.reason or "no reason given"
