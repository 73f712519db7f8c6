"""``bench`` against real HTTP servers: good ones are measured, of others it is said what is wrong.

Only lower bounds of times are looked at: the servers sleep, and machines may be slow.
"""

from __future__ import annotations

import json
import socket
import stat
import sys
import threading
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pytest_httpserver import HTTPServer

from sm75.bench import plot, report, vllmtool
from sm75.bench.client import Reply
from sm75.bench.command import Settings, bench, write
from sm75.bench.roofline import Roofline
from sm75.bench.run import Case, Measured, Round, plan_of
from sm75.errors import CheckFailed, ServerError, ToolchainError, UsageError
from sm75.health.client import CHAT
from sm75.progress import SilentReporter
from tests.unit import chatserver
from tests.unit.chatserver import ChatServer
from tests.unit.commandkit import Runner
from tests.unit.test_bench_sums import GEMMA, model


@pytest.fixture
def chat() -> Iterator[ChatServer]:
    with ChatServer() as server:
        yield server


def ask(
    server: ChatServer, prompts: str = "32", outputs: str = "8", streams: str = "1", *,
    repeats: int = 2, warmups: int = 0, seed: int = 5, **settings: Any,
) -> dict[str, Any]:  # fmt: skip
    plan = plan_of(prompts, outputs, streams, repeats=repeats, warmups=warmups, seed=seed)
    return bench(
        Settings(url=server.url, plan=plan, **{"health": False, "timeout": 20.0} | settings),
        SilentReporter(),
    )


def test_a_good_server(chat: ChatServer) -> None:
    chat.prefill, chat.delay = 0.05, 0.005
    data = ask(chat, "32,100", "5,8", "1,3", repeats=6, warmups=1, health=True)
    assert data["good"]
    # Of a guess by times nothing is asked on a machine that may stall.
    assert [note for note in data["notes"] if "caches prefixes" not in note] == []
    assert data["health"]["asked"]
    assert data["server"]["counts_tokens"]
    assert data["server"]["exact_lengths"]
    assert [(one["prompt_tokens"], one["output_tokens"], one["concurrency"])
            for one in data["cases"]] == [
        (p, o, c) for p in (32, 100) for o in (5, 8) for c in (1, 3)
    ]  # fmt: skip
    for one in data["cases"]:
        streams, output = one["concurrency"], one["output_tokens"]
        assert one["rounds"] == 6
        assert one["answers"] == 6 * streams
        assert one["prompt_tokens_counted"] == [one["prompt_tokens"]]
        assert one["output_tokens_counted"] == [output]
        assert one["tokens_a_piece"] == 1
        assert one["ttft_s"]["least"] >= 0.05
        assert one["itl_s"]["least"] > 0
        assert one["stream_tokens_s"]["least"] > 0
        # Answers of a round cannot end before the server has slept.
        most = streams * output / (0.05 + 0.005 * (output - 1))
        assert 0 < one["total_tokens_s"]["most"] <= most
        assert one["total_tokens_s"]["confidence"] == pytest.approx(0.96875)
        assert one["gap_s"]["most"] >= one["gap_s"]["p50"] > 0
    # Three at once were three at once.
    assert chat.busiest == 3
    for asked in chat.asked:
        assert asked["temperature"] == 0
        assert asked["min_tokens"] == asked["max_tokens"]
        assert asked["ignore_eos"] is True
    # Six rounds and a warm-up of four cases of one and of three, all different.
    measured = [text for text, asked in zip(chat.prompts, chat.asked, strict=True)
                if asked["max_tokens"] > 4]  # fmt: skip
    assert len(measured) == len(set(measured)) == 7 * 4 * (1 + 3)


@pytest.mark.parametrize("tokenizer", [chatserver.pieces, chatserver.letters])
def test_lengths_are_as_the_server_counts(chat: ChatServer, tokenizer: Any) -> None:
    chat.tokenizer = tokenizer
    (one,) = ask(chat, "200")["cases"]
    assert one["prompt_tokens_counted"] == [200]


def test_a_cache_of_prefixes_is_seen_and_helps_no_figure(chat: ChatServer) -> None:
    chat.cache, chat.tells, chat.prefill = True, True, 0.1
    data = ask(chat, "64", warmups=1)
    assert data["cases"][0]["ttft_s"]["least"] >= 0.1
    assert data["server"]["same_prompt_ttft_s"][0] >= 0.1
    assert data["server"]["same_prompt_cached_tokens"] == 64
    assert any("the server caches prefixes" in note for note in data["notes"])
    assert data["cases"][0]["cached_tokens"] == 0
    # The same seed again: now it knows them, and says so.
    data = ask(chat, "64", warmups=1)
    assert data["cases"][0]["cached_tokens"] == 64
    assert any("64 tokens of a prompt came from the server's cache" in n for n in data["notes"])


@pytest.mark.parametrize(("second", "known"), [(0.1, True), (0.2, False)])
def test_a_cache_that_is_not_told_of_shows_in_times(second: float, known: bool) -> None:
    measured = Measured(model="tiny", counts=True, exact=True, again=(0.3, second))
    said = "the same prompts again took 100 ms to the first text instead of 300"
    assert any(said in note for note in report.notes(measured, [])) == known


def test_times_of_an_answer() -> None:
    """Four tokens in three pieces: between the first and the last are 0.9 s and three tokens."""
    reply = Reply(asked=4, start=10.0)
    for now, delta, finish in ((10.4, {"role": "assistant", "content": ""}, None),
                               (10.5, {"content": "a"}, None), (10.8, {"content": "b c"}, None),
                               (11.3, {"reasoning": "d"}, None), (11.4, {}, "length")):  # fmt: skip
        reply.take(json.dumps({"choices": [{"delta": delta, "finish_reason": finish}]}), now)
    assert reply.itl is None
    reply.take('{"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 4}}', 99.0)
    assert reply.ttft == pytest.approx(0.5)
    assert reply.itl == pytest.approx(0.3)
    assert reply.gaps == pytest.approx([0.3, 0.5])
    assert (reply.pieces, reply.finish, reply.prompt_tokens, reply.short) == (3, "length", 9, False)


def test_a_case_is_summed_up_by_rounds() -> None:
    """Two rounds of two answers, ten tokens each; what a round has is the median of its answers."""
    case = Case(prompt=10, output=10, streams=2)

    def reply(start: float, first: float, last: float) -> Reply:
        return Reply(asked=10, start=start, first=first, last=last, pieces=10, prompt_tokens=10,
                     completion_tokens=10)  # fmt: skip

    rounds = [
        Round(replies=[reply(0.0, 0.2, 1.1), reply(0.0, 0.4, 2.2)]),
        Round(replies=[reply(5.0, 5.1, 6.0), reply(5.0, 5.3, 6.2)]),
        Round(replies=[reply(9.0, 9.1, 9.2)], faults=["gone"]),
    ]
    measured = Measured(model="tiny", counts=True, exact=True, rounds={case: rounds})
    (one,) = report.cases(measured, Roofline(bandwidth=277.0, bandwidth_from="", reads=None))
    assert one["ttft_s"]["median"] == pytest.approx((0.3 + 0.2) / 2)
    # 0.1 and 0.2 s a token, then 0.1 twice.
    assert one["itl_s"]["median"] == pytest.approx((0.15 + 0.1) / 2)
    assert one["stream_tokens_s"]["median"] == pytest.approx((7.5 + 10) / 2)
    assert one["total_tokens_s"]["median"] == pytest.approx((20 / 2.2 + 20 / 1.2) / 2)
    assert (one["rounds"], one["answers"], one["failed"]) == (2, 5, 1)


def test_without_usage_nothing_is_made_up(chat: ChatServer) -> None:
    chat.usage, chat.prefill = False, 0.02
    data = ask(chat)
    (one,) = data["cases"]
    assert one["ttft_s"]["least"] >= 0.02
    assert one["itl_s"] is one["stream_tokens_s"] is one["total_tokens_s"] is None
    assert one["prompt_tokens_counted"] == one["output_tokens_counted"] == []
    assert any("no usage" in note for note in data["notes"])


def test_a_server_that_refuses_what_it_does_not_know(chat: ChatServer) -> None:
    chat.strict = True
    data = ask(chat)
    assert not data["server"]["exact_lengths"]
    assert data["server"]["counts_tokens"]
    assert any("refuses ignore_eos" in note for note in data["notes"])
    assert "ignore_eos" not in chat.asked[-1]


def test_answers_that_are_too_short(chat: ChatServer) -> None:
    chat.most = 5
    data = ask(chat)
    assert data["cases"][0]["output_tokens_counted"] == [5]
    assert data["cases"][0]["short_answers"] == 2
    assert "2 of 2 answers have fewer tokens than were asked for" in data["notes"]


@pytest.mark.parametrize(
    ("says", "why"),
    [
        (lambda count: count * 2, "it counts 16 tokens, 8 were asked for"),
        (lambda count: max(1, count // 2), "it counts 4 tokens, and sent 8 pieces"),
    ],
)
def test_counts_that_cannot_be(chat: ChatServer, says: Any, why: str) -> None:
    chat.says_usage = says
    data = ask(chat)
    assert not data["good"]
    assert data["cases"][0]["lies"] == [why]


def test_tokens_are_not_pieces(chat: ChatServer) -> None:
    chat.together = 4
    data = ask(chat, outputs="16")
    (one,) = data["cases"]
    assert one["output_tokens_counted"] == [16]
    assert one["tokens_a_piece"] == 4
    assert any("several tokens" in note for note in data["notes"])


@pytest.mark.parametrize(
    ("mood", "says"),
    [
        (429, "HTTP 429"),
        (500, "HTTP 500"),
        (400, "HTTP 400"),
        ("die", "no whole answer"),
        ("half", "no whole answer"),
        ("error", "its stream has an error"),
        ("silent", "no text"),
        ("hang", "within 3 s"),
    ],
)
def test_a_failure_is_counted_and_its_round_left_out(
    chat: ChatServer, mood: int | str, says: str
) -> None:
    chat.moods = [mood]
    data = ask(chat, streams="2", timeout=3.0 if mood == "hang" else 20.0)
    (one,) = data["cases"]
    assert not data["good"]
    assert (one["failed"], one["answers"], one["rounds"]) == (1, 3, 1)
    assert says in one["faults"][0]
    assert any(note.startswith("1 of 4 requests failed") for note in data["notes"])


@pytest.mark.parametrize("mood", [500, 429, "die", "half", "error", "hang"])
def test_a_server_that_always_fails(chat: ChatServer, mood: int | str) -> None:
    chat.moods = [mood] * 20
    with pytest.raises(ServerError, match="no whole answer any more") as failed:
        ask(chat, repeats=20, timeout=2.0 if mood == "hang" else 20.0)
    assert failed.value.exit_code == 11
    # It was given up.
    assert len(chat.moods) == 17


def test_a_drip_does_not_outlast_the_timeout() -> None:
    """A byte now and then: no time limit of a socket ends it."""
    listener = socket.create_server(("127.0.0.1", 0))
    over = threading.Event()

    def drip() -> None:
        while not over.is_set():
            try:
                peer, _ = listener.accept()
            except OSError:
                return
            with peer:
                peer.recv(65536)
                peer.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
                while not over.wait(0.05):
                    try:
                        peer.sendall(b":\n")
                    except OSError:
                        break

    thread = threading.Thread(target=drip, daemon=True)
    thread.start()
    plan = plan_of("32", "8", "1", repeats=1, warmups=0, seed=1)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    started = time.monotonic()
    with pytest.raises(ServerError, match=r"within 0\.5 s"):
        bench(Settings(url=url, served="x", plan=plan, health=False, timeout=0.5), SilentReporter())
    assert time.monotonic() - started >= 0.5
    over.set()
    listener.close()


def test_nonsense_is_not_measured(chat: ChatServer) -> None:
    chat.nonsense = ": ok" * 12
    with pytest.raises(CheckFailed, match="nonsense") as refused:
        ask(chat, health=True)
    assert "no figure" in refused.value.why
    assert chat.asked == []
    data = ask(chat, health=False)
    assert data["health"] == {"asked": False}
    assert "speeds of nonsense" in data["notes"][0]


def test_the_ceiling_stands_beside(chat: ChatServer, tmp_path: Path) -> None:
    weights = {"model.layers.0.mlp.up_proj.weight": ("F16", [500, 1000])}
    home = model(tmp_path / "m", GEMMA, weights)
    (one,) = ask(chat, model=home)["cases"]
    context = 32 + 8 / 2
    read = 1_000_000 + context * (3 * 1024 + 2048)
    assert one["ceiling_stream_tokens_s"] == pytest.approx(277e9 / read)
    share = one["stream_tokens_s"]["median"] / one["ceiling_stream_tokens_s"]
    assert one["of_ceiling"] == pytest.approx(share)
    data = ask(chat, weight_bytes=2_000_000, bandwidth=100.0)
    assert data["cases"][0]["ceiling_stream_tokens_s"] == pytest.approx(100e9 / 2e6)
    assert "keys and values not counted" in data["roofline"]["weight_bytes_from"]


def test_the_command(run: Runner, chat: ChatServer, tmp_path: Path) -> None:
    out = tmp_path / "result"
    line = ("bench", "--url", chat.url, "--prompt-tokens", "32", "--output-tokens", "8",
            "--concurrency", "1,2", "--repeats", "2", "--warmups", "1", "--out", out,
            "--weight-bytes", "1000000000")  # fmt: skip
    ended = run(*line, "--dry-run", "--json")
    assert (ended.code, ended.json["requests"], ended.json["output_tokens"]) == (0, 9, 72)
    assert chat.asked == []
    assert not list(tmp_path.iterdir())
    ended = run(*line)
    assert ended.code == 0, ended.err
    assert "field report of a g5g, not ours" in ended.out
    assert "277 GB/s (read on a T4G, field report, not ours)" in ended.out
    data = json.loads((tmp_path / "result.json").read_text())
    assert len(data["cases"]) == 2
    assert run(*line, "--json").json["good"]
    chat.says_usage = lambda count: count * 2
    assert run(*line).code == 1
    chat.nonsense = "!" * 40
    assert run(*line).code == 1
    # Two runs have two seeds: the server may know the prompts of the first.
    first, second = (run(*line, "--no-health", "--json").json["plan"]["seed"] for _ in range(2))
    assert first != second


@pytest.mark.parametrize(
    "arguments",
    [("--prompt-tokens", "x"), ("--prompt-tokens", ""), ("--concurrency", "0"),
     ("--output-tokens", "1"), ("--tool", "vllm"), ("--prefix", "x"), ("--url", "ftp://x"),
     ("--model", "nowhere"), ("--repeats", "0")],
    ids=" ".join,
)  # fmt: skip
def test_wrong_options(run: Runner, arguments: tuple[str, ...]) -> None:
    assert run("bench", *arguments, "--dry-run").code == 2


@pytest.mark.parametrize(
    ("option", "such"),
    [("--concurrency", "1,4,8"), ("--prompt-tokens", "128,1024"), ("--output-tokens", "128,512")],
)
def test_the_example_of_a_list_is_the_option_s_own(run: Runner, option: str, such: str) -> None:
    ended = run("bench", option, "many", "--dry-run")
    assert f"next: {option} {such}" in ended.err


@pytest.mark.parametrize("path", ["/v1/models", CHAT])
def test_a_refused_key_is_no_illness(httpserver: HTTPServer, run: Runner, path: str) -> None:
    httpserver.expect_request(path).respond_with_data("{}", status=401)
    httpserver.expect_request("/v1/models").respond_with_json({"data": [{"id": "tiny"}]})
    ended = run("bench", "--url", httpserver.url_for("").rstrip("/"))
    assert ended.code == 2
    assert "lets nobody in with this key" in ended.err
    assert "VLLM_API_KEY" in ended.err


def test_nobody_there(run: Runner) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    ended = run("bench", "--url", f"http://127.0.0.1:{port}")
    assert ended.code == 11
    assert "refused" in ended.err


def test_the_picture(chat: ChatServer, tmp_path: Path) -> None:
    data = ask(chat, "32,64", "8", "1,2", weight_bytes=10**6, repeats=1)
    data["model"] = 'a <b> & "c"'
    _, picture = write(data, tmp_path / "result.x")
    assert picture.name == "result.x.svg"
    text = picture.read_text()
    root = ET.fromstring(text)  # noqa: S314
    name = "{http://www.w3.org/2000/svg}"
    assert root.find(f"{name}title") is not None
    said = root.findtext(f"{name}desc") or ""
    for one in data["cases"]:
        assert f"{one['stream_tokens_s']['median']:.1f} tokens/s a stream" in said
    words = " ".join(element.text or "" for element in root.iter(f"{name}text"))
    assert "43.1" in words
    assert "not ours" in words
    assert "32 in, 8 out" in words
    # Nothing from elsewhere, no program; dark where the reader is.
    assert text.count("http") == 1 + words.count("http")
    assert "<script" not in text
    assert "prefers-color-scheme: dark" in text
    marks = [e for e in root.iter() if e.get("class") in ("m0", "m1")]
    # In the legend, and in four panels at two points.
    assert len(marks) == 2 * (1 + 4 * 2)


def test_a_picture_of_nothing_known(chat: ChatServer) -> None:
    chat.usage = False
    text = plot.svg(ask(chat))
    ET.fromstring(text)  # noqa: S314
    assert text.count("not known</text>") == 3


@pytest.mark.parametrize(
    ("step", "found"), [(0.9, 1), (1, 1), (1.1, 2), (3, 5), (6, 10), (0.021, 0.05), (140, 200)]
)
def test_steps_of_axes(step: float, found: float) -> None:
    assert plot.nice(step) == pytest.approx(found)


# What `vllm bench serve` of 0.33.0 writes with --save-detailed, as far as it is read. The first two
# are those that are left out: the first prompt is that of its warm-ups, and was in a cache.
RESULT = {
    "output_throughput": 55.5,
    "errors": ["", "", "", "", "Traceback\nOSError: gone", ""],
    "start_times": [0.1, 0.0, 1.0, 1.0, 2.0, 2.0],
    "ttfts": [0.001, 0.002, 0.1, 0.3, 0.0, 0.2],
    "latencies": [0.7, 0.7, 0.8, 1.0, 0.0, 0.9],
    "itls": [[0.1] * 7, [0.1] * 7, [0.1] * 7, [0.1] * 7, [], [0.1] * 7],
    "input_lens": [44, 44, 40, 41, 32, 40],
    "output_lens": [8, 8, 8, 8, 0, 8],
}


def tool(home: Path, result: Any, code: int = 0) -> Path:
    """A program in the place of ``vllm``: keeps its arguments, writes a result."""
    program = home / "bin" / "vllm"
    program.parent.mkdir(parents=True)
    program.write_text(
        f"#!{sys.executable}\nimport json, sys, os\n"
        f"a = sys.argv\nopen({str(home / 'called')!r}, 'a').write(json.dumps(a) + '\\n')\n"
        "print('it says this')\n"
        "at = os.path.join(a[a.index('--result-dir') + 1], a[a.index('--result-filename') + 1])\n"
        f"open(at, 'w').write({json.dumps(result)!r})\nsys.exit({code})\n"
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return home


def test_with_vllms_own_tool(chat: ChatServer, tmp_path: Path) -> None:
    prefix = tool(tmp_path / "prefix", RESULT)
    weights = model(tmp_path / "m", GEMMA, {"a": ("F16", [500])})
    data = ask(chat, "32", "8", "2", prefix=prefix, model=weights)
    (one,) = data["cases"]
    assert data["tool"] == "vllm bench serve"
    assert (one["failed"], one["answers"], one["rounds"]) == (1, 3, 1)
    assert one["faults"] == ["OSError: gone"]
    assert one["ttft_s"]["median"] == pytest.approx(0.2)
    assert one["itl_s"]["median"] == pytest.approx(0.1)
    assert one["total_tokens_s"]["median"] == 55.5
    assert one["prompt_tokens_counted"] == [40, 41]
    assert chat.asked == []
    called = json.loads((prefix / "called").read_text())
    assert called[called.index("--base-url") + 1] == chat.url
    assert called[called.index("--num-prompts") + 1] == "6"
    assert called[called.index("--tokenizer") + 1] == str(weights)


def test_vllms_own_tool_fails(chat: ChatServer, tmp_path: Path) -> None:
    weights = model(tmp_path / "m", GEMMA, {"a": ("F16", [500])})
    with pytest.raises(ToolchainError, match="there is no vllm"):
        ask(chat, prefix=tmp_path, model=weights)
    with pytest.raises(ToolchainError, match="ended with code 3") as failed:
        ask(chat, prefix=tool(tmp_path / "a", RESULT, 3), model=weights)
    assert "it says this" in failed.value.why
    with pytest.raises(ToolchainError, match=r"not that of 0\.33\.0"):
        ask(chat, prefix=tool(tmp_path / "b", {"completed": 2}), model=weights)
    with pytest.raises(UsageError, match="needs --model"):
        ask(chat, prefix=tool(tmp_path / "c", RESULT))


def test_rounds_of_vllms_own_tool() -> None:
    found = vllmtool.rounds(RESULT, Case(prompt=32, output=8, streams=2))
    assert [len(one.replies) for one in found] == [2, 1]
    assert found[0].seconds == pytest.approx(1.0)
