"""``serve`` as a process, with a program in vLLM's place that logs, answers, dies or is killed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from sm75.serve.notify import notify
from sm75.serve.run import Tail
from tests.unit import servekit
from tests.unit.commandkit import Runner
from tests.unit.projectkit import ROOT

# Seconds for what takes one: a machine may be busy.
PATIENCE = 60.0
Start = Callable[..., "subprocess.Popen[bytes]"]

# A server that says what it was started with, loads for a moment, and answers the questions of
# ``health`` by the rule of its argument.
SERVER = """
import http.server, json, re, signal, sys, time
argument = dict(zip(sys.argv[3::2], sys.argv[4::2]))
print("loading", *sys.argv[1:], flush=True)
time.sleep(0.5)
class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_): pass
    def do_GET(self): self.send({"data": [{"id": "m"}]})
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        question = asked["messages"][-1]["content"]
        sum_ = re.search(r"(\\d+) \\+ (\\d+)", question)
        said = (str(int(sum_[1]) + int(sum_[2])) if sum_ else "Paris" if "France" in question else
                "The sky is blue because air scatters short waves of the light of the sun more "
                "than long ones. So blue comes from all sides.")
        if SICK: said = ": ok: ok: ok: ok: ok: ok"
        if asked["stream"]:
            piece = {"choices": [{"delta": {"content": said}, "finish_reason": "stop"}]}
            self.send(f"data: {json.dumps(piece)}\\n\\ndata: [DONE]\\n\\n", "text/event-stream")
        else:
            self.send({"choices": [{"message": {"content": said}, "finish_reason": "stop"}]})
    def send(self, what, kind="application/json"):
        body = (what if isinstance(what, str) else json.dumps(what)).encode()
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
server = http.server.ThreadingHTTPServer(("127.0.0.1", int(argument["--port"])), Handler)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
print("listening", flush=True)
server.serve_forever()
"""
# Waits for signals and says which came.
WAITS = """
import signal, sys, time
def got(number, _):
    print("got", signal.Signals(number).name, flush=True)
    if number == signal.SIGTERM: sys.exit(7)
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP): signal.signal(number, got)
print("waiting", flush=True)
while True: time.sleep(0.05)
"""
# vLLM's words on too little memory, as in tests/data/logs/shapes.toml, and its exit code.
NO_MEMORY = """
import sys
print("INFO starting")
for i in range(20): print("x" * 70)
print("ValueError: Free memory on device cuda:0 (11.00/14.58 GiB) on startup is less than desired "
      "GPU memory utilization (0.95, 13.85 GiB). Decrease GPU memory utilization or reduce GPU "
      "memory used by other processes.", file=sys.stderr)
sys.exit(1)
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return servekit.model(tmp_path / "model", servekit.LLAMA1)


@pytest.fixture
def start(tmp_path: Path, model: Path) -> Start:
    """Start ``orchestrator.py serve`` with a program in vLLM's place."""

    def begin(script: str, *arguments: str) -> subprocess.Popen[bytes]:
        text = f"#!{sys.executable}\n" + textwrap.dedent(script)
        prefix = servekit.prefix(tmp_path / "env", text)
        mine, _, theirs = " ".join(arguments).partition("-- ")
        # Nobody answers at port 1.
        theirs = theirs or f"--port {port() if SERVER in script else 1}"
        command = [sys.executable, str(ROOT / "orchestrator.py"), "serve", str(model), "--prefix",
                   str(prefix), *mine.split(), "--", *theirs.split()]  # fmt: skip
        dirty = ("VLLM_", "CUDA_VISIBLE", "TORCH_CUDA")
        clean = {k: v for k, v in os.environ.items() if not k.startswith(dirty)}
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=clean)

    return begin


def port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def line(process: subprocess.Popen[bytes], starts: bytes, *, stderr: bool = False) -> bytes:
    """The next line of its output that starts so."""
    stream = process.stderr if stderr else process.stdout
    assert stream is not None
    for found in stream:
        if found.startswith(starts):
            return found
    raise AssertionError(f"no line starts with {starts!r}")


def test_output_is_passed_on_unchanged_and_the_code_too(start: Start) -> None:
    process = start("""
        import os, sys
        os.write(1, b"caf\\xc3\\xa9 \\xff\\x00\\r 50%\\r\\n\\x1b[31mred\\x1b[0m no newline")
        os.write(2, b"to stderr\\n")
        sys.exit(42)
    """)
    out, err = process.communicate(timeout=PATIENCE)
    assert out == b"caf\xc3\xa9 \xff\x00\r 50%\r\n\x1b[31mred\x1b[0m no newline"
    assert b"to stderr\n" in err
    assert b"ended with exit code 42" in err
    assert process.returncode == 42


def test_the_arithmetic_is_said_before_and_the_command_is_what_runs(start: Start) -> None:
    process = start("import sys; print(*sys.argv[1:])", "-- --port 1 --max-num-seqs 3")
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0
    last = next(text for text in err.decode().splitlines() if "/bin/vllm serve " in text)
    assert out.decode().strip() == last.partition("/bin/vllm ")[2]
    assert "--max-num-seqs 3" in last
    assert "= KV cache" in err.decode()
    assert b"ended with" not in err


def test_a_known_failure_is_explained(start: Start) -> None:
    process = start(NO_MEMORY)
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    assert out.startswith(b"INFO starting\n")
    said = err.decode().partition("serve: the server ended with exit code 1")[2]
    assert "what is known of this" in said
    assert "--gpu-memory-utilization 0.75" in said


def test_an_unknown_failure_is_not(start: Start) -> None:
    _, err = (process := start("raise SystemExit(5)")).communicate(timeout=PATIENCE)
    assert process.returncode == 5
    assert b"nothing in its output is known" in err


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_killed_by_a_signal(start: Start, number: signal.Signals) -> None:
    process = start(f"""
        import os, resource
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.kill(os.getpid(), {int(number)})
    """)
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 128 + number
    assert f"killed by {number.name}".encode() in err
    assert (b"for RAM" in err) == (number == signal.SIGKILL)


def test_signals_are_forwarded_once_each(start: Start) -> None:
    process = start(WAITS)
    line(process, b"waiting")
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGINT):
        process.send_signal(number)
        assert line(process, b"got") == f"got {number.name}\n".encode()
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=PATIENCE)
    assert out == b"got SIGTERM\n"
    assert process.returncode == 7
    assert b"ended with" not in err  # it was told to end
    assert b"Traceback" not in err


def test_nothing_is_left_of_a_server_that_dies(start: Start) -> None:
    process = start("""
        import os, subprocess, sys
        left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        print("left", left.pid, flush=True)
        sys.exit(1)
    """)
    pid = int(line(process, b"left").split()[1])
    process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    assert gone(pid)


def test_the_server_ends_when_serve_is_killed(start: Start) -> None:
    process = start("""
        import os, time
        print("pid", os.getpid(), flush=True)
        time.sleep(600)
    """)
    pid = int(line(process, b"pid").split()[1])
    process.kill()
    process.communicate(timeout=PATIENCE)
    assert gone(pid)


def gone(pid: int) -> bool:
    """Whether a process ends within the time (a zombie has ended: nobody may reap it here)."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state in "ZX":
            return True
        time.sleep(0.05)
    return False


def test_a_terminal_that_is_gone_does_not_stop_the_server(start: Start) -> None:
    process = start("""
        import sys, time
        print("first", flush=True)
        sys.stdin.read()
        for i in range(3000): print("y" * 100)
        sys.exit(9)
    """)
    line(process, b"first")
    assert process.stdout is not None
    process.stdout.close()
    assert process.wait(timeout=PATIENCE) == 9


@pytest.mark.parametrize("sick", [False, True])
def test_health_is_said_and_the_server_stays(start: Start, sick: bool) -> None:
    process = start(f"SICK = {sick}\n" + SERVER, "--health --wait 50")
    line(process, b"listening")
    if sick:
        assert line(process, b"serve: ", stderr=True) == b"serve: NOT ready:\n"
        assert b"is NOT well" in line(process, b"health: ", stderr=True)
    else:
        said = line(process, b"serve: ", stderr=True)
        assert said.startswith(b"serve: ready: answers are right (http://127.0.0.1:")
    assert process.poll() is None
    process.terminate()
    assert process.wait(timeout=PATIENCE) == 3


def test_systemd_is_told(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Type=notify has it: ready when the answers are right, and the server knows no socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(PATIENCE)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        process = start(
            "import os; print('socket', os.environ.get('NOTIFY_SOCKET'), flush=True)\n"
            f"SICK = False\n{SERVER}", "--health --wait 50"
        )  # fmt: skip
        assert line(process, b"socket ") == b"socket None\n"
        assert systemd.recv(4096).startswith(b"STATUS=starting")
        assert systemd.recv(4096).splitlines()[0] == b"READY=1"
        assert process.poll() is None
        process.terminate()
        assert process.wait(timeout=PATIENCE) == 3


def test_systemd_is_not_told_of_nonsense(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(PATIENCE)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        process = start(f"SICK = True\n{SERVER}", "--health --wait 50")
        assert systemd.recv(4096).startswith(b"STATUS=starting")
        assert systemd.recv(4096) == b"STATUS=NOT ready: see the log"
        process.terminate()
        process.communicate(timeout=PATIENCE)


@pytest.mark.parametrize("address", ["", "relative", "/none", "@no-such-abstract-one"])
def test_no_systemd(address: str) -> None:
    notify({"NOTIFY_SOCKET": address}, "READY=1")
    notify({}, "READY=1")


def test_an_abstract_socket() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind("")  # Linux names it
        name = systemd.getsockname()[1:].decode()
        notify({"NOTIFY_SOCKET": f"@{name}"}, "READY=1", "STATUS=x")
        assert systemd.recv(100) == b"READY=1\nSTATUS=x"


def test_health_says_nothing_of_a_server_that_ended(start: Start) -> None:
    process = start("import time; time.sleep(0.5); raise SystemExit(4)", "--health")
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 4
    assert b"ready" not in err


def test_a_port_that_is_taken(start: Start) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        number = taken.getsockname()[1]
        process = start("print('started')", f"-- --port {number}")
        out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out) == (10, b"")
    assert f"--port {number + 1}".encode() in err


def test_a_program_that_cannot_start(tmp_path: Path, model: Path, run: Runner) -> None:
    prefix = servekit.prefix(tmp_path / "env", "#!/no/such/python\n")
    ended = run("serve", model, "--prefix", prefix, "--", "--port", "1")
    assert ended.code == 2
    assert "cannot be started" in ended.err


def test_dry_run_starts_nothing(tmp_path: Path, model: Path, run: Runner) -> None:
    mark = tmp_path / "mark"
    prefix = servekit.prefix(tmp_path / "env", f"#!/bin/sh\ntouch {mark}\n")
    ended = run("serve", model, "--prefix", prefix, "--dry-run", "--", "--port", "9")
    assert ended.code == 0
    assert ended.err == ""
    assert ended.out.splitlines()[-1].endswith(" --port 9")
    data = run("serve", model, "--prefix", prefix, "--dry-run", "--json").json
    assert data["command"][0] == str(prefix / "bin" / "vllm")
    assert data["line"] in run("serve", model, "--prefix", prefix, "--dry-run").out
    assert [row["what"] for row in data["rows"]][:1] == ["card"]
    assert not mark.exists()


@pytest.mark.parametrize("typed", ["--port", "-tp", "--max-model-len=8k"])
def test_vllms_flags_before_the_dashes(model: Path, run: Runner, typed: str) -> None:
    ended = run("serve", model, "--dry-run", typed, "2", "--", "--port", "9")
    assert ended.code == 2
    assert f"serve has no option {typed}\n" in ended.err
    assert f"next: python3 orchestrator.py serve MODEL -- {typed} ..." in ended.err


def test_a_typing_error_in_our_own_flag(model: Path, run: Runner) -> None:
    ended = run("serve", model, "--dryrun")
    assert ended.code == 2
    assert "did you mean --dry-run?" in ended.err


def test_json_goes_with_dry_run_only(tmp_path: Path, model: Path, run: Runner) -> None:
    ended = run("serve", model, "--prefix", tmp_path, "--json")
    assert ended.code == 2
    assert "--dry-run --json" in ended.err


def test_the_tail_is_bounded_and_keeps_both_ends() -> None:
    tail = Tail(100)
    for number in range(10_000):
        tail.add(b"%08d\n" % number)
    kept = tail.bytes()
    assert kept.startswith(b"00000000\n00000001\n")
    assert kept.endswith(b"00009998\n00009999\n")
    assert len(kept) < 400
    short = Tail(100)
    short.add(b"a" * 150)
    short.add(b"b" * 20)
    assert short.bytes() == b"a" * 150 + b"b" * 20
