"""``explain LOG``: every known failure in every shape, silence on healthy logs, hostile logs."""

from __future__ import annotations

import io
import time
import tomllib
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sm75.errors import LockError
from sm75.explain import knowledge, lines, logs, page, scan
from tests.unit.commandkit import Runner
from tests.unit.projectkit import ROOT

DATA = ROOT / "tests" / "data" / "logs"
BASE = knowledge.load()
SHAPES: list[dict[str, Any]] = tomllib.loads((DATA / "shapes.toml").read_text())["shape"]
HEALTHY = sorted((DATA / "healthy").glob("*.log"))
# What is in a healthy log and looks bad.
NOTES = {"build.log": ["pytorch-version-note"]}
NAMES = [f"{shape['entry']}-{n}" for n, shape in enumerate(SHAPES)]


def found(text: str | bytes) -> scan.Report:
    data = text.encode() if isinstance(text, str) else text
    return scan.scan(io.BytesIO(data), BASE)


def ids(report: scan.Report) -> list[str]:
    return [finding.entry.id for finding in report.findings]


def told(report: scan.Report) -> str:
    return "\n".join(logs.LogExplanation(subject="x.log", report=report).lines())


@pytest.mark.parametrize("shape", SHAPES, ids=NAMES)
def test_every_shape_is_found_with_its_line_and_numbers(shape: dict[str, Any]) -> None:
    text = shape["log"].removeprefix("\n")
    before = "" if shape.get("alone") else (DATA / "healthy" / "serve.log").read_text()
    report = found(before + text + before)
    assert ids(report) == [shape["entry"]], "this entry and no other"
    (finding,) = report.findings
    assert finding.number == before.count("\n") + shape.get("line", 1)
    assert finding.evidence.strip("…") in text
    words = told(report)
    assert "(not said)" not in words or shape["entry"] in ("no-network", "cuda-version-mismatch")
    for part in shape.get("expect", ()):
        assert part in words


def _family(entry: str) -> str:
    """Prefixes say whose log it is, and with that what was killed."""
    return "killed" if entry.startswith("killed") else entry


@pytest.mark.parametrize("shape", SHAPES, ids=NAMES)
def test_every_shape_survives_what_terminals_and_supervisors_add(shape: dict[str, Any]) -> None:
    """Colours, CRLF, progress before it, and four kinds of prefix."""
    text = shape["log"].removeprefix("\n")
    for change in (
        lambda line: f"\x1b[31m{line}\x1b[0m\r",
        lambda line: f"  3% |#   | 1/9\r 99% |####| 9/9\r{line}",
        lambda line: f"(EngineCore_0 pid=123) {line}",
        lambda line: f"vllm-1  | {line}",
        lambda line: f"2026-11-30T21:20:13.123456Z {line}",
        lambda line: f"Nov 30 21:20:13 ip-10-0-0-1 vllm[812]: {line}",
    ):
        changed = "\n".join(map(change, text.splitlines())) + "\n"
        assert _family(shape["entry"]) in map(_family, ids(found(changed))), changed


@pytest.mark.parametrize(
    ("log", "entry"), [("build.log", "killed-build"), ("serve.log", "killed-serve")]
)
@pytest.mark.parametrize("line", ["Killed", "exit status 137", "x.sh: line 3: 7 Killed python3 x"])
def test_one_line_means_another_thing_in_another_log(log: str, entry: str, line: str) -> None:
    healthy = (DATA / "healthy" / log).read_text()
    assert entry in ids(found(healthy + line + "\n"))
    assert ids(found(line + "\n" + healthy))[0] == "killed", "what stands before decides"
    # Both in one log, as of `docker compose up --build`.
    whole = "".join(f"{(DATA / 'healthy' / one).read_text()}{line}\n" for one in ("build.log", log))
    assert ids(found(whole))[0] == "killed-build"
    assert entry in ids(found(whole))


@pytest.mark.parametrize("area", ["build", "serve"])
def test_who_asks_knows_what_was_running(area: knowledge.Area) -> None:
    """`build` and `serve` look at their own program's end."""
    report = scan.scan(io.BytesIO(b"(EngineCore pid=1) nvcc\nKilled\n"), BASE, (area,))
    assert ids(report) == [f"killed-{area}"]


def test_every_entry_has_two_shapes_and_every_pattern_one() -> None:
    counts = Counter(shape["entry"] for shape in SHAPES)
    assert {entry.id for entry in BASE.entries} == set(counts)
    assert min(counts.values()) >= 2
    texts = {
        entry.id: [
            lines.bare(line)
            for shape in SHAPES
            if shape["entry"] == entry.id
            for line in shape["log"].splitlines()
        ]
        for entry in BASE.entries
    }
    unused = [
        (entry.id, pattern.match)
        for entry in BASE.entries
        for pattern in entry.pattern
        if not any(pattern.search(text) for text in texts[entry.id])
    ]
    assert unused == []
    assert all(shape["source"].startswith(("https://", "made here", "format")) for shape in SHAPES)


@pytest.mark.parametrize("log", HEALTHY, ids=lambda path: path.name)
def test_healthy_logs_have_no_failure(log: Path) -> None:
    assert ids(found(log.read_bytes())) == NOTES.get(log.name, [])


def test_the_texts_of_an_entry_fit_its_groups() -> None:
    """A name in braces that no pattern gives would be shown as 'not said' each time."""
    for entry in BASE.entries:
        groups = {
            name
            for pattern in entry.pattern
            for regex in (pattern.regex, pattern.following)
            if regex
            for name in regex.groupindex
        }
        for text in (entry.title, entry.cause):
            probe = text.format_map(dict.fromkeys(groups, "x"))
            assert "{" not in probe
        assert all("{" not in step for step in entry.fix)
        assert entry.link.startswith("https://")


def test_failures_stand_before_warnings_and_in_the_order_of_the_log() -> None:
    report = found(
        "WARNING Unknown vLLM environment variable detected: VLLM_X\n"
        "RuntimeError: Could not find nvcc\n"
        "no kernel image is available for execution on the device\n"
    )
    assert ids(report) == ["nvcc-missing", "no-kernel-image", "unknown-variable"]


def test_the_second_half_is_looked_for_in_the_next_lines_only() -> None:
    first = "The detected CUDA version (12.2) mismatches the version that was used to compile\n"
    near = found(first + "\n\nPyTorch (11.7).\n")
    assert near.findings[0].variants == [{"nvcc": "12.2", "torch": "11.7"}]
    far = found(first + "\n" * 4 + "PyTorch (11.7).\n")
    assert far.findings[0].variants == [{"nvcc": "12.2"}]
    assert "torch of (not said)" in told(far)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"\x00\xff\xfe\x80" * 5000,
        b"a" * 3_000_000,
        b"Killed" * 200_000,
        b"Feature '" * 50_000 + b"requires .target sm_80",
        b"CUDA target architectures: " + b"7.5;" * 100_000,
        b"Command 'cmake " * 60_000 + b"status 9",
        b"/.so: undefined symbol " * 50_000,
        b"(EngineCore pid=1) " * 100_000 + b"137",
        b"\x1b]" * 200_000,
        b"nvcc\r" * 200_000,
    ],
    ids=range(11),
)
def test_hostile_logs_end_soon(text: bytes) -> None:
    started = time.process_time()
    found(text)
    assert time.process_time() - started < 5


def test_speed_and_memory_of_a_large_log() -> None:
    """Streaming: a log of 15 MB that is made as it is read."""
    chunk = (DATA / "healthy" / "serve.log").read_bytes()

    class Endless(io.RawIOBase):
        left = 15_000_000 // len(chunk)

        def readable(self) -> bool:
            return True

        def readinto(self, buffer: Any) -> int:
            if not self.left:
                return 0
            self.left -= 1
            buffer[: len(chunk)] = chunk
            return len(chunk)

    stream = io.BufferedReader(Endless(), buffer_size=len(chunk))
    tracemalloc.start()
    started = time.process_time()
    report = scan.scan(stream, BASE)
    took = time.process_time() - started
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert report.findings == ()
    assert report.lines == chunk.count(b"\n") * (15_000_000 // len(chunk))
    assert peak < 20_000_000
    assert took < 30


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=4000))
def test_any_bytes_can_be_read(data: bytes) -> None:
    report = found(data)
    assert report.lines == len(data.splitlines(keepends=True)) or b"\r" in data or b"\n" in data
    told(report)


def test_numbers_of_lines_are_those_of_the_file() -> None:
    text = b"a\r\nb\rc\rd\n" + b"x" * (3 * lines.PIECE) + b"\nlast"
    numbers = [(line.number, line.text[:4]) for line in lines.read(io.BytesIO(text))]
    assert numbers[:4] == [(1, "a"), (2, "b"), (2, "c"), (2, "d")]
    assert numbers[-1] == (4, "last")


def test_a_long_line_is_cut_around_the_match() -> None:
    report = found("x" * 5000 + " RuntimeError: Could not find nvcc " + "y" * 5000)
    evidence = report.findings[0].evidence
    assert "Could not find nvcc" in evidence
    assert len(evidence) < 420


def test_the_run(run: Runner, tmp_path: Path) -> None:
    log = tmp_path / "serve.log"
    log.write_text("fine\n(EngineCore_0 pid=123) RuntimeError: Could not find nvcc\n")
    ended = run("explain", log)
    assert ended.code == 0
    assert "line 2: (EngineCore_0 pid=123)" in ended.out
    assert "cause: There is no CUDA compiler" in ended.out
    (finding,) = run("explain", log, "--json").json["findings"]
    assert (finding["id"], finding["line"], finding["count"]) == ("nvcc-missing", 2, 1)
    assert finding["fix"]
    log.write_text("fine\n")
    ended = run("explain", log)
    assert ended.code == 1
    assert "nothing known in 1 line\n" in ended.out
    assert run("explain", log, "--json").json["findings"] == []


def test_standard_input(run: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    text = io.TextIOWrapper(io.BytesIO(b"x: No space left on device\n"))
    monkeypatch.setattr("sys.stdin", text)
    assert "the disk is full" in run("explain", "-").out


@pytest.mark.parametrize("name", ["gone.log", "a/b", "."])
def test_what_is_no_log(run: Runner, name: str) -> None:
    ended = run("explain", name)
    assert ended.code == 2
    assert ended.err.startswith("error: ")
    assert "next:" in ended.err


def test_the_page_is_current() -> None:
    made = page.markdown(BASE)
    assert (ROOT / page.PAGE).read_text() == made, "python3 orchestrator.py explain --write-page"
    assert all(entry.link in made for entry in BASE.entries)


def test_the_page_is_written_when_it_changes(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    assert page.write(tmp_path, BASE)
    assert not page.write(tmp_path, BASE)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("schema = 1", "schema = 2", "schema 2"),
        ('severity = "failure"', 'severity = "sad"', "severity"),
        ("match = 'Could not find nvcc'", "match = 'Could.*nvcc'", "unbounded"),
        ("match = 'Could not find nvcc'", "match = 'Could[^x]+nvcc'", "unbounded"),
        ("match = 'Could not find nvcc'", "match = 'Could('", "unterminated"),
        ('id = "killed"', 'id = "nccl"', "one id"),
        ('build = "killed-build"', 'build = "gone"', "there is no entry gone"),
        ('arithmetic = "shared-memory"', 'arithmetic = "none"', "no arithmetic"),
        ('link = "', 'lnk = "', "lnk"),
    ],
)
def test_a_malformed_knowledge_base(tmp_path: Path, old: str, new: str, says: str) -> None:
    text = knowledge.FILE.read_text()
    assert old in text
    (tmp_path / "knowledge.toml").write_text(text.replace(old, new, 1))
    with pytest.raises(LockError) as caught:
        knowledge.load(tmp_path / "knowledge.toml")
    assert says in caught.value.why


def test_every_field_is_used() -> None:
    """A field that no entry has is a field too many."""
    for name in ("unless", "then"):
        assert any(getattr(p, name) for entry in BASE.entries for p in entry.pattern)
    assert any(entry.arithmetic for entry in BASE.entries)
    assert msgspec.to_builtins(BASE.entries[0])["id"]


def test_a_failed_build_explains_itself(tmp_path: Path) -> None:
    log = tmp_path / "build.log"
    log.write_text("one\nnvcc error   : 'cicc' died due to signal 9 (Kill signal)\n")
    assert "(line 2)" in logs.brief(log, ["not read"])
    assert "build --jobs 1" in logs.brief(log, ["not read"])
    assert "cicc" not in logs.brief(tmp_path / "gone.log", ["all is well"])
    assert logs.brief(tmp_path / "gone.log", ["x: No space left on device"])
    # What only a server can have is none of a build's business.
    assert logs.brief(tmp_path / "gone.log", ["Free memory on device (1/2 GiB)"]) == ""
