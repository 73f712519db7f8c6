"""report.html as a browser and a screen reader take it, and where it lies."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import itertools
import json
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element

import click
import msgspec
import pytest

import orchestrator
from sm75 import channel as channels
from sm75 import publish, sbom
from sm75.channelcheck import REPORT, read_sums, verify_channel
from sm75.channeltools import exported
from sm75.errors import UsageError
from sm75.progress import SilentReporter
from sm75.publishtargets import opened
from sm75.report import attention, claims, commands, gather, page, palette, records, write
from sm75.report.facts import Facts, Missing
from tests.unit import elfkit, reportkit
from tests.unit.commandkit import Runner, take_for_project
from tests.unit.projectkit import ROOT
from tests.unit.reportkit import LOCK, attributes, elements, parse, tag, text

SECTIONS = ["summary", "origin", "arches", "rules", "smem", "attention", "timeline", "sizes",
            "sbom", "claims", "next"]  # fmt: skip
HOSTILE = "\"'><script>alert(1)</script><img src=x onerror=alert(2)>\u202e\x00{{7*7}}"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root").mkdir()
    return reportkit.project(tmp_path / "root")


@pytest.fixture
def channel(root: Path) -> Path:
    """A channel with all that a report shows."""
    elf = elfkit.extension("spinloop", elfkit.with_device_code("sm75.fatbin"))
    reportkit.whole(root, root / "channel", elf)
    return root / "channel"


@pytest.fixture
def facts(root: Path, channel: Path) -> Facts:
    return gather.gather(root, LOCK, channel)


@pytest.fixture
def empty(root: Path) -> Facts:
    return gather.gather(root, LOCK, root / "nothing")


@pytest.fixture(params=["whole", "empty", "hostile"])
def any_page(request: pytest.FixtureRequest) -> bytes:
    """The page with everything, with nothing, and with hostile text everywhere."""
    if request.param == "empty":
        return page.render(request.getfixturevalue("empty"))
    found: Facts = request.getfixturevalue("facts")
    return page.render(reportkit.poison(found, HOSTILE) if request.param == "hostile" else found)


def test_everything_is_there(facts: Facts) -> None:
    assert facts.missing == ()
    assert all(getattr(facts, field.name) is not None for field in dataclasses.fields(facts))


def test_headings_are_in_order(any_page: bytes) -> None:
    tree = parse(any_page)
    levels = [int(tag(e)[1]) for e in elements(tree, *(f"h{n}" for n in range(1, 7)))]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
    assert [e.get("id") for e in elements(tree, "h2")] == SECTIONS
    assert tree.get("lang") == "en"
    assert text(elements(tree, "title")[0])


def test_references_lead_somewhere(any_page: bytes) -> None:
    tree = parse(any_page)
    ids = [value for _, name, value in attributes(tree) if name == "id"]
    assert len(ids) == len(set(ids))
    for element, name, value in attributes(tree):
        if name in ("aria-labelledby", "aria-describedby"):
            assert set(value.split()) <= set(ids)
        if name == "href" and value.startswith("#"):
            assert value[1:] in ids, text(element)


def test_the_skip_link_is_first_and_leads_to_the_content(any_page: bytes) -> None:
    tree = parse(any_page)
    first = elements(tree, "a")[0]
    (main,) = elements(tree, "main")
    assert first.get("href") == f"#{main.get('id')}"
    assert main.get("tabindex") == "-1"  # so that the focus goes there


def test_tables_have_captions_and_scopes(any_page: bytes) -> None:
    for table in elements(parse(any_page), "table"):
        (caption,) = elements(table, "caption")
        assert text(caption)
        head, *rows = elements(table, "tr")
        assert all(tag(cell) == "th" and cell.get("scope") == "col" for cell in head)
        assert all(text(cell) for cell in head)
        for row in rows:
            assert [cell.get("scope") for cell in row] == ["row"] + [None] * (len(row) - 1)
            assert sum(int(cell.get("colspan") or 1) for cell in row) == len(head)


def test_what_scrolls_can_be_reached_and_has_a_name(any_page: bytes) -> None:
    tree = parse(any_page)
    regions = [e for e in elements(tree, "div") if e.get("class") == "scroll"]
    wide = [child for region in regions for child in region]
    assert {id(e) for e in elements(tree, "table")} <= {id(e) for e in wide}
    for region in regions:
        assert region.get("role") == "region"
        assert region.get("tabindex") == "0"
        assert region.get("aria-label") or region.get("aria-labelledby")


def test_drawings_have_words(any_page: bytes) -> None:
    for svg in elements(parse(any_page), "svg"):
        if svg.get("aria-hidden") == "true":
            continue
        assert svg.get("role") == "img"
        title, desc = svg[0], svg[1]
        assert (tag(title), tag(desc)) == ("title", "desc")
        assert text(title)
        assert text(desc)
        assert (svg.get("aria-labelledby") or "").split() == [title.get("id"), desc.get("id")]


def test_it_loads_nothing_and_runs_nothing(any_page: bytes) -> None:
    tree = parse(any_page)
    assert elements(tree, "script", "link", "img", "iframe", "object", "embed", "form", "base",
                    "image", "use", "audio", "video", "foreignObject") == []  # fmt: skip
    for element, name, value in attributes(tree):
        assert not name.startswith("on")
        assert name not in ("src", "srcset", "style", "action", "formaction", "background")
        if name == "href":
            assert tag(element) == "a"
            assert re.match(r"#|https://|http://", value)
    (style,) = elements(tree, "style")
    assert "url(" not in (style.text or "")
    assert "@import" not in (style.text or "")
    (policy,) = (e.get("content") for e in elements(tree, "meta") if e.get("http-equiv"))
    digest = base64.b64encode(hashlib.sha256((style.text or "").encode()).digest()).decode()
    assert policy == (
        f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    )


def test_hostile_text_stays_text(facts: Facts) -> None:
    plain, hostile = (
        parse(page.render(f)) for f in (facts, reportkit.poison(facts, HOSTILE))
    )  # fmt: skip
    kinds, hostile_kinds = (
        [tag(e) for e in tree.iter() if isinstance(e.tag, str)] for tree in (plain, hostile)
    )  # fmt: skip
    assert set(hostile_kinds) <= set(kinds)
    assert hostile_kinds.count("td") == kinds.count("td")
    words = text(hostile)
    assert words.count("<script>alert(1)</script>") > 100
    assert "{{7*7}}" in words
    assert "\u202e" not in words
    assert "\x00" not in words


@pytest.mark.parametrize("address", ["javascript:alert(1)", "data:text/html,x", "//x.org", "x"])
def test_only_web_addresses_are_links(facts: Facts, address: str) -> None:
    assert facts.origin is not None
    (change, *rest) = facts.origin.changes
    assert change.entry is not None
    entry = dataclasses.replace(change.entry, upstream=(address,))
    changes = (dataclasses.replace(change, entry=entry), *rest)
    origin = dataclasses.replace(facts.origin, changes=changes)
    tree = parse(page.render(dataclasses.replace(facts, origin=origin)))
    assert address in text(tree)
    assert not [e for e in elements(tree, "a") if e.get("href") == address]


def test_each_kind_of_a_claim_is_explained_once() -> None:
    made = claims.read(ROOT / "docs" / "claims.md")
    assert made is not None
    kinds = re.findall(r"<em>([^<]+)</em>:", made.before)
    assert len(kinds) == len(set(kinds))
    used = {str(row[-1]).partition(",")[0] for row in made.rows}
    assert used <= set(kinds), "explain it in the list at the top"
    unused = set(kinds) - used
    assert unused == {"seen on T4G"}


def test_claims_are_rendered_without_links_to_files_that_are_not_beside_it(
    root: Path, facts: Facts
) -> None:
    assert facts.claims is not None
    (docs := root / "docs").unlink()
    docs.mkdir()
    (docs / "claims.md").write_text(
        "# T\n\nWhat it means.\n\n| claim | proof |\n|---|---|\n"
        "| <script>x</script> | [a](b.md) `c` [d](https://e.org/) ![i](https://e.org/i.png) "
        "[j](javascript:1) |\n\nNot claimed:\n\n- [x](../y.md) **z**\n"
    )
    made = claims.read(docs / "claims.md")
    assert made is not None
    assert made.rows[0][0] == "&lt;script&gt;x&lt;/script&gt;"
    assert made.rows[0][1] == ('a <code>c</code> <a href="https://e.org/">d</a>  [j](javascript:1)')
    assert "<li>x <strong>z</strong></li>" in made.after
    assert made.before == "<p>What it means.</p>\n"
    (docs / "claims.md").write_text("no table")
    assert claims.read(docs / "claims.md") is None


def test_each_missing_part_names_a_command_that_there_is(empty: Facts) -> None:
    sections = [gap.section for gap in empty.missing]
    assert set(sections) == {*SECTIONS} - {"summary", "attention", "claims", "next"}
    tree = parse(page.render(empty))
    shown = [text(e) for e in elements(tree, "code")]
    for gap in empty.missing:
        assert gap.command in shown
    for step in empty.steps:
        assert step.command in shown


def test_every_command_shown_is_one_of_the_orchestrator(
    root: Path, channel: Path, facts: Facts, empty: Facts
) -> None:
    shutil.rmtree(root / ".sm75")
    bare = gather.gather(root, LOCK, channel)
    assert {gap.section for gap in bare.missing} == {"rules", "smem", "timeline"}
    assert facts.verification is not None
    assert facts.subject is not None
    kept = msgspec.structs.replace(facts.verification, ok=True)
    records.keep(root, channel / facts.subject.file, kept)
    sound = gather.gather(root, LOCK, channel)
    assert [s for s in sound.steps if "conda create" in s.command]
    every = (facts, empty, bare, sound)
    lines = {gap.command for f in every for gap in f.missing}
    lines |= {step.command for f in every for step in f.steps}
    ours = [line for line in sorted(lines) if line.startswith("python3 orchestrator.py ")]
    assert len(ours) > 6
    for line in ours:
        command: click.Command = orchestrator.cli
        words = shlex.split(line)[2:]
        while isinstance(command, click.Group):
            assert words[0] in command.commands, line
            command = command.commands[words.pop(0)]
        options = {flag for option in command.params for flag in option.opts}
        assert {word for word in words if word.startswith("--")} <= options, line


def test_a_broken_rule_is_no_package_to_install(facts: Facts) -> None:
    # the small package breaks rules indeed: it has one extension of five
    assert facts.verification is not None
    assert not facts.verification.ok
    assert not [s for s in facts.steps if "conda create" in s.command]
    words = text(parse(page.render(facts)))
    assert "Do not install this package" in words
    assert "device extensions" in words or "_C_stable_libtorch" in words


def test_figures_are_those_of_the_records(facts: Facts) -> None:
    tree = parse(page.render(facts))
    cells = {text(row[0]): [text(c) for c in row[1:]] for row in elements(tree, "tr")}
    assert cells["h512, decode"] == ["98,304 over", "65,536"]
    assert cells["h256, prefill"] == ["not audited", "32,768"]
    assert cells["csrc/b.cu"] == ["CUDA", "12 s", "1 min 10 s", "yes"]
    name = "site-packages/vllm/spinloop.abi3.so"
    assert cells[name][1:4] == ["aarch64", "sm_75×1", "none"]
    patches = [p.name for p in sorted((ROOT / "patches" / LOCK.vllm).glob("*.patch"))]
    shown = [k.split(" ")[0].removesuffix("…") for k in cells]
    assert [n for n in shown if any(n.startswith(p) for p in patches)]
    on_path = [e for e in elements(tree, "rect") if e.get("class") == "critical"]
    assert len(on_path) == 3  # two steps, and the key


EVIDENCE = ROOT / "docs" / "evidence" / "attention-h200-2026-12-01.json"


def test_the_chart_of_attention_is_the_evidence(facts: Facts) -> None:
    """Every figure and every length, computed here from the file that is named."""
    tree = parse(page.render(facts))
    times: dict[str, dict[str, float]] = {}
    for one in json.loads(EVIDENCE.read_bytes())["results"]:
        if "ms" in one:
            times.setdefault(one["trial"], {})[one["side"]] = one["ms"]
    (table,) = (e for e in elements(tree, "table") if e.get("id") == "attention-table")
    rows = {text(row[0]): [text(cell) for cell in row[1:]] for row in elements(table, "tr")[1:]}
    assert len(rows) >= 15
    drawn = _bars(tree)
    assert list(drawn) == list(rows)
    for trial, cells in rows.items():
        sides = times[trial]
        field, ahead = sides["4 warps"], sides["ahead of time"]
        best = min(ms for side, ms in sides.items() if side not in ("ahead of time", "unpatched"))
        assert cells == [f"{n:,.3f}" for n in (field, best, ahead)] + [
            f"{field / ahead:,.1f}", f"{best / ahead:,.1f}",
        ]  # fmt: skip
        longest = max(field, best, ahead)
        assert drawn[trial] == pytest.approx(
            [n / longest * 1000 for n in (field, best, ahead)], abs=0.02
        )
    assert "h512 8:1, prefill 4 x 512 of 2048" in rows
    # Said in the text, in the drawing and its description, and in the table's caption.
    words = text(tree)
    assert words.count("sm_75 PTX on an H200; no T4G has been timed") >= 4
    assert EVIDENCE.name in words


def _bars(tree: Element) -> dict[str, list[float]]:
    """Widths of a trial's three bars, from the top, by its label."""
    (svg,) = (e for e in elements(tree, "svg") if "attention-title" in str(e.attrib.values()))
    labels = {
        float(e.get("y") or 0): text(e) for e in elements(svg, "text")
        if e.get("class") is None and e.get("x") == "0"
    }  # fmt: skip
    rects = [(float(e.get("y") or 0), e) for e in elements(svg, "rect")]
    found = {}
    for y, label in labels.items():
        own = sorted((at, e) for at, e in rects if y < at < y + 40)
        assert [e.get("class") for _, e in own] == ["before", "cxx", "after"]
        found[label.rpartition(": ")[0]] = [float(e.get("width") or 0) for _, e in own]
    return found


def _evidence(root: Path, name: str, edit: Callable[[dict[str, Any]], None]) -> None:
    """Put changed evidence beside the committed one, in documents of the project's own."""
    if (root / "docs").is_symlink():
        (root / "docs").unlink()
        (root / "docs" / "evidence").mkdir(parents=True)
        shutil.copy(ROOT / "docs" / "claims.md", root / "docs")
        shutil.copy(EVIDENCE, root / "docs" / "evidence")
    made = json.loads(EVIDENCE.read_bytes())
    edit(made)
    (root / "docs" / "evidence" / name).write_text(json.dumps(made))


def test_the_newest_evidence_of_the_release_counts(root: Path) -> None:
    def newer(made: dict[str, Any]) -> None:
        made |= {"date": "2027-01-02T00:00:00+00:00", "gpu": "NVIDIA T4G", "capability": "7.5"}

    def other(made: dict[str, Any]) -> None:
        made |= {"date": "2028-01-02T00:00:00+00:00", "vllm": "0.34.0"}

    found = attention.find(root, LOCK.vllm)
    assert found is not None
    assert found.standing == "sm_75 PTX on an H200; no T4G has been timed"
    _evidence(root, "attention-a.json", newer)
    _evidence(root, "attention-b.json", other)
    (root / "docs" / "evidence" / "attention-c.json").write_text("{")
    (root / "docs" / "evidence" / "attention-d.json").write_text("[]")
    (root / "docs" / "evidence" / "attention-e.json").mkdir()
    found = attention.find(root, LOCK.vllm)
    assert found is not None
    assert (found.date, found.standing) == ("2027-01-02", "sm_75 PTX on a T4G")
    newest = attention.find(root, "0.34.0")
    assert newest is not None
    assert newest.file == "docs/evidence/attention-b.json"
    assert attention.find(root, "0.35.0") is None
    assert attention.standing("NVIDIA L4", "8.9").startswith("sm_75 PTX on an L4; no T4G")


def test_a_trial_that_was_wrong_or_has_no_time_is_not_drawn(root: Path) -> None:
    trial = "h512 8:1, prefill 4 x 512 of 2048"

    def wrong(made: dict[str, Any]) -> None:
        made["date"] = "2027-01-02T00:00:00+00:00"
        for one in made["results"]:
            if one["trial"] == trial and one["side"] == "ahead of time":
                one["max_error"] = 1.0
            if one["trial"] == "h512 8:1, decode 8 x 4096" and one["side"] == "4 warps":
                one["ms"] = 0

    before = attention.find(root, LOCK.vllm)
    _evidence(root, "attention-a.json", wrong)
    after = attention.find(root, LOCK.vllm)
    assert before is not None
    assert after is not None
    gone = {row.trial for row in before.rows} - {row.trial for row in after.rows}
    assert gone == {trial, "h512 8:1, decode 8 x 4096"}


def test_without_evidence_the_chart_names_what_makes_it(root: Path, channel: Path) -> None:
    _evidence(root, EVIDENCE.name, lambda made: made.update(vllm="0.34.0"))
    bare = gather.gather(root, LOCK, channel)
    (gap,) = bare.missing
    assert gap.section == "attention"
    words = text(parse(page.render(bare)))
    assert f"docs/evidence has no run of vLLM {LOCK.vllm} that timed both" in words
    assert gap.command in words


def test_commands_name_the_channel_and_the_page_names_no_directory(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Runner
) -> None:
    take_for_project(monkeypatch, root)
    elf = elfkit.extension("spinloop", elfkit.with_device_code("sm75.fatbin"))
    place = tmp_path / "my channel"
    reportkit.whole(root, place, elf)
    shutil.rmtree(root / ".sm75")
    said = run("report", "--channel", place)
    assert "DIR" not in said.out
    assert f"verify --channel '{place}'" in said.out
    found = run("report", "--channel", place, "--json").json["missing"]
    assert len(found) == 3
    for gap in found:
        words = shlex.split(gap["command"])
        assert words[words.index("--channel") + 1] == str(place)
    data = (place / REPORT).read_bytes()
    assert str(tmp_path).encode() not in data
    words_of_page = text(parse(data))
    assert "verify --channel DIR" in words_of_page
    assert "DIR in a command is the directory of this channel" in words_of_page
    ours = page.render(gather.gather(root, LOCK, root / "channel"))
    assert "DIR" not in text(parse(ours))


def test_a_file_of_the_channel_is_named_in_its_command() -> None:
    gap = Missing(section="arches", what="x", why="", command=f"inspect {commands.PLACE}/a/b.conda")
    assert commands.named(gap, Path("/x y")).command == "inspect '/x y/a/b.conda'"
    assert commands.file("a/b.conda", ours=True) == "channel/a/b.conda"


def test_records_of_another_package_or_other_patches_do_not_count(
    root: Path, channel: Path, facts: Facts
) -> None:
    for kept in (root / ".sm75" / "records").glob("*.verify.json"):
        kept.rename(kept.with_name(f"{'0' * 64}.verify.json"))
    smem = records.find_smem(root)
    assert smem is not None
    for change in ({"series": "0" * 64}, {"vllm": "0.1"}, {"package": "other.conda"}):
        fields = {n: getattr(smem, n) for n in smem.__struct_fields__} | change
        records.keep_smem(root, records.SmemRecord(**fields))
        now = gather.gather(root, LOCK, channel)
        assert {gap.section for gap in now.missing} == {"rules", "smem"}


def test_the_timeline_outlives_the_build_directory(root: Path, channel: Path) -> None:
    assert gather.gather(root, LOCK, channel).timeline is not None
    shutil.rmtree(root / ".sm75" / "native")
    assert gather.gather(root, LOCK, channel).timeline is not None
    for kept in (root / ".sm75" / "records").glob("*.timeline.json"):
        kept.write_text("no record")
    assert gather.gather(root, LOCK, channel).timeline is None


def test_the_same_inputs_give_the_same_bytes(root: Path, channel: Path) -> None:
    one = write.report(root, LOCK, channel)
    data = (channel / REPORT).read_bytes()
    two = write.report(root, LOCK, channel)
    assert (channel / REPORT).read_bytes() == data
    assert one.sha256 == two.sha256 == hashlib.sha256(data).hexdigest()
    for place in (root, ROOT, Path.home()):
        assert f"{place}/".encode() not in data


def test_a_channel_with_a_report_is_sound_and_goes_where_channels_go(
    root: Path, channel: Path, tmp_path: Path
) -> None:
    write.report(root, LOCK, channel)
    assert verify_channel(channel) == []
    assert REPORT not in read_sums(channel)
    assert sbom.SBOM in read_sums(channel)
    assert {REPORT, sbom.SBOM} <= {path.name for path in exported(channel)}
    with opened(root, str(tmp_path / "there"), channel, dry_run=False) as place:
        publish.publish(channel, place, SilentReporter())
    assert (tmp_path / "there" / REPORT).read_bytes() == (channel / REPORT).read_bytes()
    assert verify_channel(tmp_path / "there") == []
    # The sums do not know of it, so that two builds have the same.
    sums = (channel / "SHA256SUMS").read_bytes()
    (channel / REPORT).write_bytes(b"another")
    channels.publish([], channel)
    assert (channel / "SHA256SUMS").read_bytes() == sums
    assert (channel / REPORT).read_bytes() == b"another"


def test_a_directory_of_that_name_is_extra(channel: Path, root: Path) -> None:
    (channel / REPORT).mkdir()
    (channel / REPORT / "x").touch()
    assert f"{REPORT}/x" in [p.path for p in verify_channel(channel) if p.kind == "extra"]
    with pytest.raises(UsageError, match="no file to write to"):
        write.report(root, LOCK, channel)


def test_the_bill_of_materials_is_renewed_where_it_is_old(root: Path, channel: Path) -> None:
    (channel / sbom.SBOM).unlink()
    assert write.report(root, LOCK, channel, dry_run=True).bill
    assert not (channel / sbom.SBOM).exists()
    out = root / "out.html"
    write.report(root, LOCK, channel, out)
    assert "The channel has no sbom.cdx.json" in text(parse(out.read_bytes()))
    assert not (channel / sbom.SBOM).exists()
    assert write.report(root, LOCK, channel).bill
    assert verify_channel(channel) == []
    assert not write.report(root, LOCK, channel).bill


def files(root: Path) -> dict[Path, bytes]:
    return {p: p.read_bytes() for p in root.rglob("*") if p.is_file()}


def test_the_command(
    root: Path, channel: Path, monkeypatch: pytest.MonkeyPatch, run: Runner,
) -> None:  # fmt: skip
    take_for_project(monkeypatch, root)
    before = files(root)
    dry = run("report", "--channel", channel, "--dry-run", "--json")
    assert (dry.code, dry.json["missing"]) == (0, [])
    assert files(root) == before
    done = run("report", "--channel", channel, "--json")
    assert done.code == 0
    assert done.json["sha256"] == dry.json["sha256"]
    assert Path(done.json["file"]) == channel / REPORT
    out = root / "elsewhere" / "r.html"
    said = run("report", "--channel", root / "none", "--out", out)
    assert said.code == 0
    assert "without the verdict of verify: python3 orchestrator.py build" in said.out
    parse(out.read_bytes())


@pytest.mark.parametrize(
    ("arguments", "said", "code"),
    [(["--channel", "none"], "there is no channel", 8),
     (["--channel", "made"], "there is no channel", 8),
     (["--out", "channel/noarch/r.html"], "would lie in the channel", 2),
     (["--out", "channel/r.html"], "would lie in the channel", 2),
     (["--out", "made"], "is no file to write to", 2)],
)  # fmt: skip
def test_where_it_cannot_be_written(
    root: Path, channel: Path, monkeypatch: pytest.MonkeyPatch, run: Runner,
    arguments: list[str], said: str, code: int,
) -> None:  # fmt: skip
    take_for_project(monkeypatch, root)
    monkeypatch.chdir(root)
    before = files(root)
    ended = run("report", "--channel", channel, *arguments)
    assert (ended.code, said in ended.err) == (code, True), ended.err
    assert files(root) == before


def test_verify_writes_it_and_a_report_that_cannot_be_written_fails_nothing(
    root: Path, channel: Path, monkeypatch: pytest.MonkeyPatch, run: Runner,
) -> None:  # fmt: skip
    take_for_project(monkeypatch, root)
    for kept in (root / ".sm75" / "records").glob("*.verify.json"):
        kept.unlink()
    store = root / "store"
    assert run("verify", "--channel", channel, "--store", store).code == 1  # it breaks rules
    assert (channel / REPORT).is_file()
    assert gather.gather(root, LOCK, channel).verification is not None
    (channel / REPORT).unlink()
    (channel / REPORT).mkdir()
    ended = run("verify", "--channel", channel, "--store", store)
    assert ended.code == 1
    assert "report.html was not written" in ended.err


def _contrast(one: str, two: str) -> float:
    """WCAG 2.2, 'contrast ratio' and 'relative luminance'."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return sum(w * p for w, p in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    light, dark = sorted((luminance(one), luminance(two)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_contrast_of_known_pairs() -> None:
    assert _contrast("#000000", "#ffffff") == pytest.approx(21)
    assert _contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_contrast(empty: Facts, theme: str) -> None:
    """The colours that the page has, in pairs as its rules set them."""
    (style,) = elements(parse(page.render(empty)), "style")
    sheet = style.text or ""
    blocks = re.findall(r":root\{([^}]*)\}", sheet)  # light, then dark
    colours = dict(re.findall(r"--(\w+):(#[0-9a-f]{6});", blocks[["light", "dark"].index(theme)]))
    assert colours == palette.PALETTE[theme]
    for ink, paper in palette.TEXT:
        assert _contrast(colours[ink], colours[paper]) >= 4.5, (ink, paper)
    for ink, paper in palette.DRAWN:
        assert _contrast(colours[ink], colours[paper]) >= 3, (ink, paper)


def test_every_colour_of_the_rules_is_in_a_pair() -> None:
    rules = (Path(page.__file__).parent / "templates" / "style.css").read_text()
    assert set(re.findall(r"var\(--(\w+)\)", rules)) == set(palette.PALETTE["light"])
    assert not re.findall(r"(?:color|fill|stroke|background)\s*:\s*(?!var)[#a-z]+", rules)
    inked = {n for pair in (*palette.TEXT, *palette.DRAWN) for n in pair}
    assert inked == set(palette.PALETTE["light"])
