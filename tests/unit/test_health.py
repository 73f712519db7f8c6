"""``health`` against real HTTP servers: sane ones pass, all others fail for the right reason."""

from __future__ import annotations

import json
import random
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from pytest_httpserver import HTTPServer
from werkzeug import Request, Response

from sm75.errors import UsageError
from sm75.health import check, client, text
from sm75.health.client import Answer, Server, base_url
from sm75.health.questions import choose
from tests.unit import healthcorpus
from tests.unit.commandkit import Runner

SKY = healthcorpus.written()[18:]


def sane(question: str, r: random.Random) -> str:
    """What a working model says."""
    if numbers := re.findall(r"\d+", question):
        number = sum(map(int, numbers))
        return r.choice(["{}", "{}.", "**{}**", "The answer is {}."]).format(number)
    return r.choice(["Paris", "Paris.", "**Paris**"]) if "France" in question else r.choice(SKY)


def completion(said: Any, finish: Any = "stop") -> dict[str, Any]:
    return {"choices": [{"message": {"content": said}, "finish_reason": finish}]}


def stream(said: str, finish: Any = "stop", *, done: bool = True) -> Response:
    pieces = [said[n : n + 7] for n in range(0, len(said), 7)]
    events = [{"choices": [{"delta": {"content": piece}}]} for piece in pieces]
    events.append({"choices": [{"delta": {}, "finish_reason": finish}]})
    lines = [f"data: {json.dumps(event)}\n\n" for event in events]
    return Response("".join(lines) + ("data: [DONE]\n\n" if done else ""))


Speaker = Callable[[str], tuple[Any, Any]]


@pytest.fixture
def serve(httpserver: HTTPServer) -> Callable[[Speaker], str]:
    """Serve what a speaker says, whole or in a stream as it is asked for; the server's URL."""

    def start(speaker: Speaker) -> str:
        def handle(request: Request) -> Response:
            asked = json.loads(request.data)
            assert asked["model"] == "tiny"
            assert asked["temperature"] == 0
            said, finish = speaker(asked["messages"][0]["content"])
            if asked["stream"]:
                return stream(said or "", finish)
            return Response(json.dumps(completion(said, finish)))

        httpserver.expect_request("/v1/models").respond_with_json({"data": [{"id": "tiny"}]})
        httpserver.expect_request(client.CHAT, method="POST").respond_with_handler(handle)
        return httpserver.url_for("").rstrip("/")

    return start


def ask(url: str, timeout: float = 5.0) -> check.Health:
    return check.check(Server(url, timeout=timeout))


def test_a_sane_server_passes_a_hundred_times(serve: Callable[[Speaker], str]) -> None:
    r = random.Random(1)
    url = serve(lambda question: (sane(question, r), "stop"))
    verdicts = [ask(url) for _ in range(100)]
    assert [one.verdict for one in verdicts if not one.well] == []
    assert verdicts[0].exit_code == 0


@pytest.mark.parametrize("kind", healthcorpus.BROKEN)
def test_every_kind_of_broken_model_fails_every_time(
    serve: Callable[[Speaker], str], kind: str
) -> None:
    """Words in no order have the statistics of English; the known answers see them."""
    texts = iter(healthcorpus.broken(kind, 60, seed=7))
    url = serve(lambda question: (next(texts), "length"))
    assert [ask(url).exit_code for _ in range(20)] == [1] * 20


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize(
    ("said", "finish", "says"),
    [
        ("", "stop", "it is empty"),
        (None, "stop", "it is empty"),
        (": ok" * 12, "stop", "it repeats itself: : ok"),
        ("<pad><pad><pad>", "stop", "control tokens: <pad>"),
        ("!!!!!!!!!!!!!!!!!!", "length", "it repeats one character"),
        ("sky\x00\x01", "stop", "control characters: U+0000"),
        (None, None, "does not say why it ended"),
        ("RIGHT", "abort", "it ended by 'abort'"),
        ("RIGHT", "error", "it ended by 'error'"),
        ("RIGHT", "content_filter", "it ended by 'content_filter'"),
        ("RIGHT", None, "does not say why it ended"),
        ("I cannot say.", "stop", "it is not the answer"),
    ],
)
def test_one_bad_answer_of_three_is_enough(
    serve: Callable[[Speaker], str], said: Any, finish: Any, says: str, place: int
) -> None:
    r = random.Random(2)
    asked: list[str] = []

    def speak(question: str) -> tuple[Any, Any]:
        asked.append(question)
        right = sane(question, r)
        if len(asked) != place + 1:
            return right, "stop"
        return (right if said == "RIGHT" else said), finish

    health = ask(serve(speak))
    assert health.exit_code == 1
    assert [bool(one.faults) for one in health.judged] == [n == place for n in range(3)]
    assert says in " ".join(health.judged[place].faults)
    assert "NOT well" in health.verdict


def test_a_cut_explanation_is_good_and_a_cut_word_is_not(serve: Callable[[Speaker], str]) -> None:
    r = random.Random(3)
    health = ask(serve(lambda question: (sane(question, r), "length")))
    assert [bool(one.faults) for one in health.judged] == [True, True, False]
    assert "did not end within 48 tokens" in health.judged[0].faults[0]


def test_a_canned_answer_fails(serve: Callable[[Speaker], str]) -> None:
    """One that was right once."""
    first, second = choose(1), choose(2)
    assert first[0].text != second[0].text
    answer = Answer(text=first[0].expected, finish="stop", seconds=0.1)
    assert check.judge(first[0], answer) == ()
    assert check.judge(second[0], answer)


@contextmanager
def raw_server(behave: Callable[[socket.socket, bytes], None]) -> Iterator[str]:
    """A server that does what HTTP servers do not; the models it lists are right."""
    listener = socket.create_server(("127.0.0.1", 0))
    over = threading.Event()

    def one(peer: socket.socket) -> None:
        with peer:
            head = peer.recv(65536)
            if head.startswith(b"GET /v1/models"):
                body = b'{"data": [{"id": "tiny"}]}'
                length = b"Content-Length: %d\r\n\r\n" % len(body)
                peer.sendall(b"HTTP/1.1 200 OK\r\n" + length + body)
            else:
                behave(peer, head)

    def loop() -> None:
        while not over.is_set():
            try:
                peer, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=one, args=(peer,), daemon=True).start()

    threading.Thread(target=loop, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        over.set()
        listener.close()


def _hang(peer: socket.socket, head: bytes) -> None:
    time.sleep(30)


def _drip(peer: socket.socket, head: bytes) -> None:
    """A byte now and then: no time limit of a socket ends it."""
    peer.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
    with suppress(OSError):
        for _ in range(600):
            peer.sendall(b" ")
            time.sleep(0.05)


def _drip_head(peer: socket.socket, head: bytes) -> None:
    with suppress(OSError):
        for _ in range(600):
            peer.sendall(b"H")
            time.sleep(0.05)


def _die(peer: socket.socket, head: bytes) -> None:
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")


def _half(peer: socket.socket, head: bytes) -> None:
    peer.sendall(b'HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n{"choices": [{"mes')


def _half_closed(peer: socket.socket, head: bytes) -> None:
    """It says that no more will come, and stays."""
    peer.shutdown(socket.SHUT_WR)
    time.sleep(5)


def _no_http(peer: socket.socket, head: bytes) -> None:
    peer.sendall(b"220 smtp ready\r\n")


def _http_503(peer: socket.socket, head: bytes) -> None:
    peer.sendall(b"HTTP/1.1 503 Unavailable\r\nContent-Length: 7\r\n\r\nloading")


@pytest.mark.parametrize(
    ("behave", "says"),
    [
        (_hang, "within 1 s"),
        (_drip, "within 1 s"),
        (_drip_head, ""),
        (_die, "no answer"),
        (_half, "no answer"),
        (_half_closed, "no answer"),
        (_no_http, "no answer"),
        (_http_503, "HTTP 503: loading"),
    ],
)
def test_servers_that_do_not_answer(
    behave: Callable[[socket.socket, bytes], None], says: str
) -> None:
    with raw_server(behave) as url:
        started = time.monotonic()
        health = ask(url, timeout=1.0)
        assert time.monotonic() - started < 3
    assert health.exit_code == 11
    assert "explain LOG" in health.next
    assert says in health.silent
    assert health.silent.startswith("no answer from http://127.0.0.1")


def test_nobody_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    health = ask(f"http://127.0.0.1:{port}")
    assert health.exit_code == 11
    assert "refused" in health.silent
    assert "is it running" in health.next


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        (b'{"object": "error", "message": "no such model"}', 200, "no chat completion"),
        (b'{"choices": []}', 200, "no chat completion"),
        (b"<html>It works!</html>", 200, "no chat completion"),
        (b"\xff\xfe\x00", 200, "no chat completion"),
        (b'{"choices": [{"message": {"content": 42}, "finish_reason": "stop"}]}', 200, "no text"),
        (b'{"detail": "Not Found"}', 404, "HTTP 404"),
        (b"x" * (3 << 20), 200, "more than 1 MiB"),
        (b"", 302, "HTTP 302"),
    ],
)
def test_servers_that_lie(httpserver: HTTPServer, body: bytes, status: int, says: str) -> None:
    httpserver.expect_request("/v1/models").respond_with_json({"data": [{"id": "tiny"}]})
    httpserver.expect_request(client.CHAT).respond_with_data(body, status=status)
    health = ask(httpserver.url_for("").rstrip("/"))
    assert health.exit_code == 1
    assert says in health.judged[0].faults[0]


@pytest.mark.parametrize("status", [401, 403])
@pytest.mark.parametrize("path", ["/v1/models", client.CHAT])
def test_a_key_that_is_refused_says_nothing_of_the_server(
    httpserver: HTTPServer, run: Runner, status: int, path: str
) -> None:
    """Neither well nor ill: a restart would mend nothing, so that it is another exit code."""
    httpserver.expect_request(path).respond_with_data('{"error": "Unauthorized"}', status=status)
    httpserver.expect_request("/v1/models").respond_with_json({"data": [{"id": "tiny"}]})
    url = httpserver.url_for("").rstrip("/")
    ended = run("health", "--url", url)
    assert ended.code == 2
    assert f"lets nobody in with this key: HTTP {status}" in ended.out
    assert "NOT well" not in ended.out
    (after,) = [line for line in ended.out.splitlines() if line.startswith("  next: ")]
    assert "VLLM_API_KEY" in after
    found = run("health", "--url", url, "--json").json
    assert (found["exit_code"], found["well"]) == (2, False)
    assert found["next"] == after.removeprefix("  next: ")
    # Nobody waits for a key to become right, and one question is enough.
    assert run("health", "--url", url, "--wait", "60").code == 2
    assert len([r for r, _ in httpserver.log if r.path == client.CHAT]) == 3 * (path == client.CHAT)


@pytest.mark.parametrize(
    ("models", "says", "does"),
    [
        ('{"object": "list", "data": []}', "it lists no model", "look at its start"),
        ("<!doctype html><title>Welcome to nginx!</title>", "is a web page: <!doctype", "ss -ltnp"),
        ('{"status": "ok"}', 'is no list of models: {"status": "ok"}', "ss -ltnp"),
        ("pong", "is no list of models: pong", "Another program"),
    ],
)
def test_another_program_is_not_a_server_without_models(
    httpserver: HTTPServer, models: str, says: str, does: str
) -> None:
    httpserver.expect_request("/v1/models").respond_with_data(models)
    health = ask(httpserver.url_for("").rstrip("/"))
    assert health.exit_code == 1
    assert says in health.verdict
    assert does in health.next
    assert (f":{httpserver.port}'" in health.next) == (does != "look at its start")


@pytest.mark.parametrize(
    ("status", "path", "does"),
    [
        (404, "/v1/models", "is this vLLM's address"),
        (404, client.CHAT, "--model NAME"),
        (400, client.CHAT, "does not speak the protocol"),
        (429, client.CHAT, "more questions than it takes"),
        (500, client.CHAT, "explain LOG"),
        (503, "/v1/models", "--wait 900"),
    ],
)
def test_each_status_has_a_next_step(
    httpserver: HTTPServer, status: int, path: str, does: str
) -> None:
    httpserver.expect_request(path).respond_with_data("{}", status=status)
    httpserver.expect_request("/v1/models").respond_with_json({"data": [{"id": "tiny"}]})
    health = ask(httpserver.url_for("").rstrip("/"))
    assert health.exit_code == (11 if status in (429, 500, 503) else 1)
    assert does in health.next


TEMPLATE = (
    "As of transformers v4.44, default chat template is no longer allowed, so you must provide a "
    "chat template if the tokenizer does not define one."
)


def _document(message: str, status: int) -> dict[str, Any]:
    """As vLLM 0.33.0 sends it (vllm/entrypoints/serve/engine/protocol.py:79-87)."""
    kind = "BadRequestError" if status == 400 else "NotFoundError"
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


@pytest.mark.parametrize(
    ("status", "said", "does", "code"),
    [
        (400, TEMPLATE, "-- --chat-template FILE", 1),
        (404, "The model `x` does not exist. Valid aliases: tiny.", "--model NAME", 1),
        (400, "This model's maximum context length is 16 tokens. However, your request has 60.",
         "--max-model-len", 1),
        (501, "The model does not support Chat Completions API", "does not chat", 1),
        (400, "temperature must be non-negative, got -1.", "refuses the question", 1),
        (422, "image cannot be loaded", "refuses the question", 1),
        (500, "EngineCore encountered an issue. See stack trace (above) for the root cause.",
         "explain LOG", 11),
        (503, "The engine is currently busy and cannot accept new requests.", "--wait 900", 11),
        (429, "slow down", "more questions than it takes", 11),
    ],
)  # fmt: skip
def test_what_the_server_says_is_read(
    httpserver: HTTPServer, run: Runner, status: int, said: str, does: str, code: int
) -> None:
    httpserver.expect_request("/v1/models").respond_with_json({"data": [{"id": "tiny"}]})
    document = _document(said, status)
    httpserver.expect_request(client.CHAT).respond_with_json(document, status=status)
    ended = run("health", "--url", httpserver.url_for(""))
    assert ended.code == code
    assert f"HTTP {status}: it says: {said}" in ended.out
    assert "{" not in ended.out
    assert "protocol" not in ended.out
    assert does in ended.out.splitlines()[-1]


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ({"error": TEMPLATE}, TEMPLATE),
        ({"object": "error", "message": TEMPLATE, "type": "BadRequestError"}, TEMPLATE),
        ({"detail": TEMPLATE}, TEMPLATE),
        ({"detail": [{"loc": ["body", "model"], "msg": "Field required"}]},
         "Field required (body.model)"),
        ({"error": {"message": "y" * 1000}}, "y" * 399 + "…"),
    ],
)  # fmt: skip
def test_error_documents_of_other_kinds(
    httpserver: HTTPServer, document: dict[str, Any], said: str
) -> None:
    httpserver.expect_request("/v1/models").respond_with_json({"data": [{"id": "tiny"}]})
    httpserver.expect_request(client.CHAT).respond_with_json(document, status=400)
    health = ask(httpserver.url_for("").rstrip("/"))
    assert health.verdict == f"is NOT well: HTTP 400: it says: {said}"
    assert ("--chat-template" in health.next) == (said == TEMPLATE)


@pytest.mark.parametrize("body", ["[]", "7", '{"error": {"message": 7}}', '{"detail": [7]}', "{"])
def test_a_document_of_nothing(httpserver: HTTPServer, body: str) -> None:
    httpserver.expect_request("/v1/models").respond_with_json({"data": [{"id": "tiny"}]})
    httpserver.expect_request(client.CHAT).respond_with_data(body, status=400)
    health = ask(httpserver.url_for("").rstrip("/"))
    assert health.verdict == f"is NOT well: HTTP 400: {body}"
    assert "does not speak the protocol" in health.next


# Right as far as it goes.
CUT = 'data: {"choices": [{"delta": {"content": "Air scatters blue light"}}]}\n\n'


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("data: {\n\ndata: [DONE]\n\n", "stream is none of chat"),
        ('data: {"choices": 5}\n\ndata: [DONE]\n\n', "stream is none of chat"),
        ('data: {"error": "out of memory"}\n\ndata: [DONE]\n\n', "stream has an error"),
        ('data: {"choices": [{"delta": {"content": "The sk"}}]}\n\n', "without [DONE]"),
        ("", "without [DONE]"),
        ("data: [DONE]\n\n", "it is empty"),
        ("garbage\x00\x01" * 50, "without [DONE]"),
        (CUT, "without [DONE]"),
    ],
)
def test_streams_of_garbage(httpserver: HTTPServer, body: str, says: str) -> None:
    r = random.Random(4)

    def handle(request: Request) -> Response:
        asked = json.loads(request.data)
        if asked["stream"]:
            return Response(body)
        return Response(json.dumps(completion(sane(asked["messages"][0]["content"], r))))

    httpserver.expect_request("/v1/models").respond_with_json({"data": [{"id": "tiny"}]})
    httpserver.expect_request(client.CHAT).respond_with_handler(handle)
    health = ask(httpserver.url_for("").rstrip("/"))
    assert health.exit_code == 1
    assert says in health.judged[2].faults[0]


def test_a_stream_that_says_why_it_ended_needs_no_done(httpserver: HTTPServer) -> None:
    """``transformers serve`` sends no [DONE]."""
    r = random.Random(8)

    def handle(request: Request) -> Response:
        asked = json.loads(request.data)
        said = sane(asked["messages"][0]["content"], r)
        return (
            stream(said, done=False) if asked["stream"] else Response(json.dumps(completion(said)))
        )

    httpserver.expect_request("/v1/models").respond_with_json({"data": [{"id": "tiny"}]})
    httpserver.expect_request(client.CHAT).respond_with_handler(handle)
    assert ask(httpserver.url_for("").rstrip("/")).exit_code == 0


@pytest.mark.parametrize("models", [{}, {"data": []}, {"data": [{"id": 5}]}, [1]])
def test_a_server_without_models(httpserver: HTTPServer, models: Any) -> None:
    httpserver.expect_request("/v1/models").respond_with_json(models)
    health = ask(httpserver.url_for("").rstrip("/"))
    assert health.exit_code == 1
    assert "model" in health.verdict


@pytest.mark.parametrize(
    ("given", "base"),
    [
        ("127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("http://h:8000/", "http://h:8000"),
        ("http://h/v1", "http://h"),
        ("https://h/x/v1/chat/completions", "https://h/x"),
    ],
)
def test_urls(given: str, base: str) -> None:
    assert base_url(given) == base


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("http://h:8000/v1/completions", "without the chat template"),
        ("http://h:8000/health", "while its process lives"),
        ("ftp://h", ""),
        ("http://", ""),
        ("http://h:99999", ""),
    ],
)
def test_what_is_no_sign_of_health_is_refused(run: Runner, given: str, why: str) -> None:
    with pytest.raises(UsageError) as caught:
        base_url(given)
    assert why in caught.value.why
    assert run("health", "--url", given).code == 2


def test_rates_of_the_judgement_of_text_alone() -> None:
    """docs/health.md has the figures of a larger run; these are its bounds.

    The corpus follows the documentation, so a seed does not fix the texts: a kind that is drawn at
    random has a bound that its rate (0.1 % of each missed) passes whatever is drawn.
    """
    assert [one for one in healthcorpus.written() if text.faults(one)] == []
    prose = healthcorpus.prose()
    assert len(prose) > 1000
    assert sum(bool(text.faults(one)) for one in prose) / len(prose) < 0.01
    least = {
        "random words": 0.93,
        "random unicode": 0.97,
        "random English tokens": 0.97,
        "shuffled words": 0.0,
        "said by random models": 0.97,
    }
    for kind in healthcorpus.BROKEN:
        texts = healthcorpus.broken(kind, 200, seed=3)
        seen = sum(bool(text.faults(one)) for one in texts) / len(texts)
        assert seen >= least.get(kind, 1.0), kind


def test_what_random_models_said() -> None:
    """The file does not change: the figures of docs/health.md, exactly.

    One in eight tokens of that small vocabulary is a single byte. Without what these leave behind,
    pieces of English words in no order are harder to tell; the known answers see them.
    """
    said = healthcorpus.said_by_random_models()
    missed = [one for one in said if not text.faults(one)]
    whole = [re.sub(r"[^\t\n\r\x20-\x7e\u00a0-\ufffc]", "", one) for one in said]
    missed_whole = [one for one in whole if not text.faults(one)]
    assert (len(said), len(missed), len(missed_whole)) == (304, 1, 45)
    r = random.Random(9)
    for question in choose(3):
        answers = [Answer(text=r.choice(said), finish="stop", seconds=0.1) for _ in range(100)]
        assert all(check.judge(question, answer) for answer in answers)


def test_hostile_texts_are_judged_soon() -> None:
    for hostile in ("ab" * 500_000, "a " * 300_000, "<" * 500_000, "<|" * 300_000, "x" * 1_000_000):
        started = time.process_time()
        assert text.faults(hostile)
        assert time.process_time() - started < 10


def health_of(code: int, verdict: str = "x") -> check.Health:
    faults = ("it is empty",) if code == 1 else ()
    judged = check.Judged(question="?", answer=None, faults=faults)
    return check.Health(url="u", model="m", judged=(judged,), silent=verdict if code == 11 else "")


def test_watch_ends_after_failures_in_a_row_and_speaks_of_changes() -> None:
    codes = [0, 0, 1, 0, 1, 1, 11]
    answers = iter(map(health_of, codes))
    said: list[int] = []
    slept: list[float] = []
    last = check.watch(
        lambda: next(answers), lambda h: said.append(h.exit_code), interval=7, failures=3,
        sleep=slept.append,
    )  # fmt: skip
    assert last.exit_code == 11
    assert said == [0, 1, 0, 1, 11]
    assert slept == [7.0] * 6


def test_waiting_is_for_an_answer_not_for_sense() -> None:
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    answers = iter([health_of(11), health_of(11), health_of(1)])
    assert check.wait(lambda: next(answers), 60, clock=lambda: now[0], sleep=sleep).exit_code == 1
    now[0] = 0.0
    assert check.wait(lambda: health_of(11), 10, clock=lambda: now[0], sleep=sleep).silent
    assert now[0] == 10.0


def test_the_run(
    run: Runner, serve: Callable[[Speaker], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    r = random.Random(6)
    wrong: list[str] = []

    def speak(question: str) -> tuple[str, str]:
        return (wrong[0] if wrong else sane(question, r)), "stop"

    url = serve(speak)
    # Proxies are for the internet.
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    ended = run("health", "--url", url)
    assert ended.code == 0
    assert "is well (3 answers read" in ended.out
    assert "next:" not in ended.out
    assert run("health", "--url", url, "--json").json["well"] is True
    wrong.append("ok: " * 20)
    ended = run("health", "--url", url, "--watch", "--interval", "0", "--failures", "2")
    assert ended.code == 1
    assert ended.out.count("NOT well") == 1
    found = run("health", "--url", url, "--json").json
    assert found["exit_code"] == 1
    assert found["questions"][0]["answer"] == "ok: " * 20
    assert found["next"].startswith("look at its log")
    assert found["next"] in ended.out


def test_a_key_is_sent(
    httpserver: HTTPServer, run: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    httpserver.expect_request(
        "/v1/models", headers={"Authorization": "Bearer secret"}
    ).respond_with_json({"data": []})
    ended = run("health", "--url", httpserver.url_for("").rstrip("/"))
    assert "lists no model" in ended.out
    assert "secret" not in ended.out + ended.err
