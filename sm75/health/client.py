"""Ask a server of the OpenAI protocol, and get an answer or a reason within a given time."""

from __future__ import annotations

import queue
import ssl
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx

from sm75 import jsontext
from sm75.errors import ServerError, UsageError
from sm75.health import advice
from sm75.health.events import Events
from sm75.health.questions import Question

# More than any answer to our questions; a server that sends for ever must not fill the memory.
_MOST_BYTES = 1 << 20
# Seconds by which a socket waits longer than we do: ours is the message to be read.
_LONGER = 2.0
# Characters of a server's own message that are shown.
_SHOWN = 400
# What vLLM says of a model that does not chat: it is well, and waiting mends nothing.
_NOT_IMPLEMENTED = 501
CHAT = "/v1/chat/completions"
_NOT_HEALTH = {
    "/v1/completions": "it continues raw text without the chat template: a working chat model "
    "answers such a prompt with repetitions or nothing (': ok: ok: ok'), and what it says tells "
    "nothing of what users get",
    "/health": "vLLM answers it while its process lives, whatever the model says",
    "/ping": "vLLM answers it while its process lives, whatever the model says",
}


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a server said to one question.

    Attributes:
        text: The message's content.
        finish: Why it ended, as the server says.
        seconds: From the question to the end of the answer.
    """

    text: str
    finish: str
    seconds: float


class BadAnswer(Exception):
    """The server answered, but not as the protocol wants; the message says what is wrong.

    Args:
        what: The message.
        fix: What to do next; empty: nothing of its own.
    """

    def __init__(self, what: str, *, fix: str = "") -> None:
        super().__init__(what)
        self.fix = fix


class KeyRefused(BadAnswer):
    """The server lets nobody in with this key, or without one. Whether it is well is not known."""


class _Unwell(BadAnswer):
    """The server answered that it cannot now."""


def base_url(url: str) -> str:
    """The server's base, of what was given: with or without ``/v1`` or the chat's path.

    Raises:
        UsageError: It is no URL, or names an endpoint that says nothing of health.
    """
    parts = urlsplit(url if "://" in url else f"http://{url}")
    path = parts.path.rstrip("/")
    for refused, why in _NOT_HEALTH.items():
        if path.endswith(refused) and not path.endswith(CHAT):
            raise UsageError(
                f"{refused} is no sign of health",
                why=why,
                fix=f"give the server alone: --url {parts.scheme}://{parts.netloc}",
            )
    for known in (CHAT, "/v1"):
        if path.endswith(known):
            path = path.removesuffix(known)
            break
    try:
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        good = False
    if not good:
        raise UsageError(f"{url} is no server", fix="for instance: --url http://127.0.0.1:8000")
    return f"{parts.scheme}://{parts.netloc}{path}"


class Server:
    """A server that is asked.

    Args:
        url: Its base, from :func:`base_url`.
        api_key: Sent as a bearer token where given.
        timeout: Seconds for each question, to the last byte of its answer.
    """

    def __init__(self, url: str, *, api_key: str = "", timeout: float = 60.0) -> None:
        self.url = url
        self._timeout = timeout
        # Made once: reading the certificates takes longer than asking.
        self._tls = ssl.create_default_context()
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    def model(self) -> str:
        """The first model that the server lists.

        Raises:
            ServerError: No answer.
            BadAnswer: It lists none, or what answers is no server of the protocol.
        """
        body = self._ask("GET", "/v1/models", None)[0]
        try:
            data = jsontext.loads(body)["data"]
            if not isinstance(data, list):
                raise TypeError
        except (ValueError, LookupError, TypeError) as error:
            page = body.lstrip()[:1] == b"<"
            raise BadAnswer(
                f"what answers at /v1/models is {'a web page' if page else 'no list of models'}: "
                f"{_start(body)}",
                fix=advice.stranger(self.url),
            ) from error
        if not data:
            raise BadAnswer("it lists no model at /v1/models", fix=advice.EMPTY)
        try:
            name = data[0]["id"]
        except (LookupError, TypeError):
            name = None
        if not isinstance(name, str) or not name:
            raise BadAnswer(
                "it lists a model without a name at /v1/models", fix=advice.stranger(self.url)
            )
        return name

    def chat(self, model: str, question: Question) -> Answer:
        """Ask one question.

        Args:
            model: Its name.
            question: The question.

        Raises:
            ServerError: No answer in time, or none at all.
            BadAnswer: Something that is no answer.
        """
        asked = {
            "model": model,
            "messages": [{"role": "user", "content": question.text}],
            "temperature": 0,
            "max_tokens": question.max_tokens,
            "stream": question.stream,
        }
        body, seconds = self._ask("POST", CHAT, asked)
        text, finish = _streamed(body) if question.stream else _whole(body)
        return Answer(text=text, finish=finish, seconds=seconds)

    def _ask(self, method: str, path: str, data: Any) -> tuple[bytes, float]:
        """Send a request and read all of its answer, within the time for both.

        The time limits of sockets begin anew with each byte; a thread is waited for instead.
        """
        # Proxies of the environment are for the internet, not for the server at hand.
        client = httpx.Client(
            timeout=self._timeout + _LONGER,
            trust_env=False,
            headers=self._headers,
            verify=self._tls,
        )
        done: queue.Queue[bytes | Exception] = queue.Queue()
        started = time.monotonic()
        thread = threading.Thread(
            target=_fetch, args=(client, method, self.url + path, data, done), daemon=True
        )
        thread.start()
        try:
            found = done.get(timeout=self._timeout)
        except queue.Empty:
            raise ServerError(
                f"no answer from {self.url}{path} within {self._timeout:g} s",
                why="it is too slow, it hangs, or it is loading a model",
                fix=advice.SLOW,
            ) from None
        finally:
            # Ends the thread's request where it still runs.
            with suppress(Exception):
                client.close()
        if isinstance(found, httpx.HTTPError | _Unwell):
            raise ServerError(
                f"no answer from {self.url}{path}",
                why=str(found) or type(found).__name__,
                fix=found.fix if isinstance(found, _Unwell) else advice.ABSENT,
            ) from found
        if isinstance(found, Exception):
            raise found
        return found, time.monotonic() - started


def _fetch(
    client: httpx.Client, method: str, url: str, data: Any, done: queue.Queue[bytes | Exception]
) -> None:
    try:
        with client.stream(method, url, json=data) as answer:
            body = b""
            for chunk in answer.iter_bytes():
                body += chunk
                if len(body) > _MOST_BYTES:
                    raise BadAnswer(f"its answer has more than {_MOST_BYTES >> 20} MiB")
            status = answer.status_code
            if status != 200:
                said = _error(body)
                what = f"HTTP {status}: {f'it says: {said}' if said else _start(body)}"
                fix = advice.of_status(status, url, said=said, listing=data is None)
                # What a starting, dying or overloaded server says: as good as no answer.
                if status == 429 or (status >= 500 and status != _NOT_IMPLEMENTED):
                    raise _Unwell(what, fix=fix)
                raise (KeyRefused if status in (401, 403) else BadAnswer)(what, fix=fix)
            done.put(body)
    except (BadAnswer, httpx.HTTPError) as error:
        done.put(error)
    except Exception as error:
        done.put(BadAnswer(f"{type(error).__name__}: {error}"))


def _start(body: bytes) -> str:
    return " ".join(body[:200].decode("utf-8", errors="replace").split()) or "no text"


def _error(body: bytes) -> str:
    """The message of an error document: OpenAI's, vLLM's before 0.10, FastAPI's; else nothing."""
    try:
        data = jsontext.loads(body)
    except ValueError:
        return ""
    return _message(data)


def _message(data: Any) -> str:
    found = data.get("error", data.get("detail", "")) if isinstance(data, dict) else ""
    if isinstance(data, dict) and data.get("object") == "error":
        found = data.get("message", "")
    if isinstance(found, dict):
        found = found.get("message", "")
    if isinstance(found, list):
        # FastAPI of a request that does not fit: one entry a fault.
        found = "; ".join(
            f"{one.get('msg', '')} ({'.'.join(map(str, one.get('loc', ())))})"
            for one in found
            if isinstance(one, dict) and isinstance(one.get("loc", ()), list | tuple)
        )
    flat = " ".join(found.split()) if isinstance(found, str) else ""
    return flat if len(flat) <= _SHOWN else flat[: _SHOWN - 1] + "…"


def _whole(body: bytes) -> tuple[str, str]:
    try:
        choice = jsontext.loads(body)["choices"][0]
        text, finish = choice["message"]["content"], choice["finish_reason"]
    except (ValueError, LookupError, TypeError) as error:
        raise BadAnswer(f"its answer is no chat completion: {_start(body)}") from error
    return _text(text), _finish(finish)


def _streamed(body: bytes) -> tuple[str, str]:
    text, finish, over = "", "", False
    events = Events()
    for event in (*events.feed(body), *events.close()):
        if event == "[DONE]":
            over = True
            break
        try:
            part = jsontext.loads(event)
            if "error" in part:
                said = _message(part)
                raise BadAnswer(
                    f"its stream has an error: {said or _start(event.encode())}",
                    fix=advice.of_status(200, "", said=said, listing=False) if said else "",
                )
            for choice in part["choices"]:
                text += _text(choice.get("delta", {}).get("content"))
                finish = _finish(choice.get("finish_reason")) or finish
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise BadAnswer(f"its stream is none of chat: {_start(event.encode())}") from error
    # Some servers (transformers serve, 5.20.2 and 5.24.0) end without [DONE]; who says why it ended
    # has said all. A connection that breaks off is an error of HTTP before this.
    if not over and not finish:
        raise BadAnswer("its stream ended without [DONE] and without a finish_reason")
    return text, finish


def _text(value: Any) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise BadAnswer("the content of its answer is no text")
    return value


def _finish(value: Any) -> str:
    return value if isinstance(value, str) else ""
