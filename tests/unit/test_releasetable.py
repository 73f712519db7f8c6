"""The table of releases, the sdists it is made of, and the commands that show them."""

from __future__ import annotations

import hashlib
import shutil
import tarfile
from pathlib import Path

import pytest
from msgspec.structs import replace

from sm75 import patchcommands, proof, releases, sdists
from sm75.errors import CheckFailed, FetchError, LockError, PatchError, UsageError
from sm75.lockfile import ReleaseLock, known_releases, load_release
from sm75.patching import Result, State
from sm75.series import seal
from sm75.store import Store
from tests.unit.commandkit import Runner, take_for_project
from tests.unit.projectkit import RELEASE, ROOT
from tests.unit.test_rebase import OLD, Project

TREES = {
    "1.0": OLD,
    "1.1": b"zero\n" + OLD,
    "2.0": OLD.replace(b"line 20\n", b"LINE 20\n"),
    "10.0": OLD + b"fixed\n",
}


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with one series and four pinned releases, whose sdists are in the store."""
    project = Project(tmp_path / "project")
    project.rows[1] = project.rows[1].replace('present = "-"', 'present = "fixed"')
    project.propose()
    root = tmp_path / "project"
    store = Store(tmp_path / "store")
    (root / "lock").mkdir()
    rows = ["schema = 1\n"]
    for release, content in TREES.items():
        top = tmp_path / f"vllm-{release}" / "pkg"
        top.mkdir(parents=True)
        (top / "a.py").write_bytes(content)
        path = tmp_path / f"vllm-{release}.tar.gz"
        with tarfile.open(path, "w:gz") as archive:
            archive.add(top.parent, arcname=top.parent.name)
        digest, size = hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_size
        store.add(path, sha256=digest, filename=path.name, size=size)
        rows.append(f'[[sdist]]\nrelease = "{release}"\nsha256 = "{digest}"\nsize = {size}\n')
    (root / "lock/sdists.toml").write_text("\n".join(rows))
    page = root / releases.PAGE
    page.parent.mkdir()
    page.write_text(f"# By hand\n\n{releases.BEGIN}\n{releases.END}\n\nMore by hand.\n")
    take_for_project(monkeypatch, root)
    monkeypatch.setenv("SM75_STORE", str(store.root))
    return root


def test_the_committed_table_is_that_of_the_committed_series() -> None:
    releases.check(ROOT)


def test_every_release_of_the_table_is_pinned() -> None:
    pins = sdists.pinned(ROOT)
    assert set(known_releases(ROOT)) <= set(pins)
    named = {path.parent.name for path in (ROOT / "patches").glob("*/series.toml")}
    assert {RELEASE, "0.28.0"} <= named <= set(pins)


def test_table(root: Path, run: Runner) -> None:
    shown = run("patches", "releases")
    assert shown.code == 0
    lines = shown.out.splitlines()
    assert "| 1.0 | **1 apply** | yes |" in lines
    assert "| 1.1 | **1 elsewhere** | no |" in lines
    assert "| 2.0 | **1 conflict** | no |" in lines
    assert "| 10.0 | **1 not needed** | no |" in lines
    # Versions, not text: 10.0 comes last.
    assert "|  | 1.0 | 1.1 | 2.0 | 10.0 |" in lines
    row = "| `0001-x.patch` | applies | applies elsewhere | conflicts | no longer needed |"
    assert row in lines
    assert "- `0001-x.patch` (`pkg/a.py` 19): 2.0" in lines
    assert not any("ours.py" in line for line in lines)
    plain = run("patches", "releases", "--json").json
    assert plain["1.0"]["2.0"] == {"pkg/ours.py": "applies", "0001-x.patch": "conflicts"}


def test_written_table_leaves_the_rest_of_the_page(root: Path, run: Runner) -> None:
    assert run("patches", "releases", "--check").code == 1
    assert run("patches", "releases", "--write").out.endswith("is written\n")
    text = (root / releases.PAGE).read_text()
    assert text.startswith(f"# By hand\n\n{releases.BEGIN}\n     Series: 1.0 ")
    assert text.endswith(f"{releases.END}\n\nMore by hand.\n")
    assert run("patches", "releases", "--check").code == 0
    assert run("patches", "releases", "--write").out.endswith("is as it was\n")
    assert (root / releases.PAGE).read_text() == text


@pytest.mark.parametrize("what", ["patch", "overlay", "condition", "needs", "sdist", "new series"])
def test_a_stale_table_is_told(root: Path, run: Runner, what: str) -> None:
    run("patches", "releases", "--write")
    home = root / "patches/1.0"
    series, listed = home / "series.toml", root / "lock/sdists.toml"
    if what == "patch":
        path = home / "0001-x.patch"
        path.write_bytes(path.read_bytes().replace(b"+five", b"+FIVE"))
    elif what == "overlay":
        (home / "overlay/pkg/ours.py").write_text("changed\n")
    elif what == "condition":
        series.write_text(series.read_text().replace('present = "fixed"', 'present = "done"'))
    elif what == "needs":
        series.write_text(series.read_text() + '[[overlay.needs]]\nfile = "a"\nexists = true\n')
    elif what == "sdist":
        listed.write_text(listed.read_text().rpartition("[[sdist]]")[0])
    else:
        shutil.copytree(home, root / "patches/1.1")
    seal(home)
    ended = run("patches", "releases", "--check")
    assert ended.code == 1
    assert "is stale" in ended.err
    assert "patches releases --write" in ended.err


def test_texts_for_people_do_not_make_it_stale(root: Path, run: Runner) -> None:
    run("patches", "releases", "--write")
    series = root / "patches/1.0/series.toml"
    series.write_text(series.read_text().replace('purpose = "Ours."', 'purpose = "Still ours."'))
    assert run("patches", "releases", "--check").code == 0


@pytest.mark.parametrize("text", ["", "# By hand\n", f"{releases.END}\n{releases.BEGIN}\n"])
def test_a_page_without_a_place_for_it(root: Path, run: Runner, text: str) -> None:
    (root / releases.PAGE).write_text(text)
    for option in ("--write", "--check"):
        ended = run("patches", "releases", option)
        assert ended.code == CheckFailed.exit_code
        assert "has no place for the table" in ended.err
    assert (root / releases.PAGE).read_text() == text


def test_rebase(root: Path, run: Runner) -> None:
    asked = ("patches", "rebase", "--release", "1.1", "--from", "1.0")
    shown = run(*asked, "--dry-run")
    assert shown.code == 0
    assert "pkg/a.py, hunk 1: line 4 -> 5" in shown.out
    refused = run(*asked)
    assert refused.code == PatchError.exit_code
    assert refused.out == shown.out
    assert "1 change to be reviewed" in refused.err
    assert not (root / "patches/1.1").exists()
    assert run(*asked, "--accept").out.endswith("rebase: wrote patches/1.1, made of 1.0's\n")
    assert run(*asked, "--accept").code == UsageError.exit_code
    # A second time from there: nothing is left to accept.
    assert run("patches", "rebase", "--release", "1.0", "--from", "1.1", "--accept",
               "--replace").code == 0  # fmt: skip
    assert (root / "patches/1.0/overlay/pkg/ours.py").is_file()


def test_rebase_shows_a_conflict_and_writes_nothing(root: Path, run: Runner) -> None:
    ended = run("patches", "rebase", "--release", "2.0", "--from", "1.0", "--accept", "--json")
    assert ended.code == PatchError.exit_code
    conflict = ended.json[-1]["faults"][-1]
    assert (conflict["line"], conflict["old_line"], conflict["found_line"]) == (19, 16, 16)
    assert "line 20" in conflict["expected"]
    assert "line 20" in conflict["old"]
    assert "LINE 20" in conflict["found"]
    assert not (root / "patches/2.0").exists()


def test_rebase_to_a_tree_by_path(root: Path, run: Runner, tmp_path: Path) -> None:
    """A release that nothing pins yet."""
    asked = ("patches", "rebase", "--release", "3.0", "--from", "1.0")
    unknown = run(*asked)
    assert unknown.code == UsageError.exit_code
    assert "no sdist of vLLM 3.0 is pinned" in unknown.err
    assert run(*asked, "--tree", tmp_path / "vllm-1.0").code == 0
    assert (root / "patches/3.0/series.toml").is_file()


@pytest.mark.parametrize(
    ("release", "source", "why"),
    [("1.0", "1.0", "made of itself"), ("../x", "1.0", "is no release"), ("1.1", "9", "no series")],
)
def test_rebase_of_nothing(root: Path, run: Runner, release: str, source: str, why: str) -> None:
    ended = run("patches", "rebase", "--release", release, "--from", source)
    assert ended.code == UsageError.exit_code
    assert why in ended.err


def test_check_against_another_release(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the series' own sources at hand it shows all three sides; without, it says so."""
    lock = replace(load_release(ROOT, RELEASE), vllm="1.0")
    offline: list[bool] = []

    def sdist(_root: Path, lock: ReleaseLock, _store: Store, against: str | None) -> Path:
        if offline and not against:
            raise FetchError("no network")
        return tmp_path / f"vllm-{against or lock.vllm}"

    monkeypatch.setattr(proof, "sdist", sdist)
    said: list[str] = []

    def check(against: str | None) -> list[Result]:
        return patchcommands.check(root, lock, Store(tmp_path / "store"), against, said.append)

    assert patchcommands.applies(check(None))
    conflict = check("2.0")[-1]
    assert (conflict.state, conflict.faults[-1].old_line) == (State.CONFLICTS, 16)
    assert not patchcommands.applies(check("1.1"))
    assert said == []
    offline.append(True)
    assert check("2.0")[-1].faults[-1].old == ()
    assert said == ["without the sources of 1.0 a hunk is known by its text alone: no network"]


def test_a_changed_file_that_another_release_takes_is_told(root: Path, run: Runner) -> None:
    run("patches", "rebase", "--release", "1.1", "--from", "1.0", "--accept")
    assert patchcommands.left_behind(root, "1.0") == []
    (root / "patches/1.0/overlay/pkg/ours.py").write_text("changed\n")
    seal(root / "patches/1.0")
    (said,) = patchcommands.left_behind(root, "1.0")
    assert said.startswith("patches/1.1 is not valid now: ")
    assert "pkg/ours.py" in said


def pins(root: Path, text: str) -> None:
    (root / "lock").mkdir(exist_ok=True)
    (root / "lock/sdists.toml").write_text(text)


ROW = f'[[sdist]]\nrelease = "1.0"\nsha256 = "{"0" * 64}"\nsize = 1\n'


@pytest.mark.parametrize(
    "text",
    ["schema = 2\n" + ROW, "schema = 1\n" + ROW + ROW, "schema = 1\n", "[",
     "schema = 1\nx = 1\n" + ROW, "schema = 1\n" + ROW.replace("00", "0", 1)],
)  # fmt: skip
def test_bad_pins(tmp_path: Path, text: str) -> None:
    pins(tmp_path, text)
    with pytest.raises(LockError):
        sdists.pinned(tmp_path)


def test_no_pins(tmp_path: Path) -> None:
    assert sdists.pinned(tmp_path) == {}
    with pytest.raises(UsageError, match=r"no sdist of vLLM 1\.0 is pinned"):
        sdists.obtain(tmp_path, Store(tmp_path / "store"), "1.0")


def test_a_lock_and_the_list_must_agree(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "lock" / RELEASE, tmp_path / "lock" / RELEASE)
    assert list(sdists.pinned(tmp_path)) == [RELEASE]
    pins(tmp_path, "schema = 1\n" + ROW.replace("1.0", RELEASE))
    with pytest.raises(LockError, match="another sdist"):
        sdists.pinned(tmp_path)


def test_what_is_fetched_is_what_is_pinned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pins(tmp_path, "schema = 1\n" + ROW)
    monkeypatch.setenv("PIP_INDEX_URL", (tmp_path / "nowhere").as_uri())
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    with pytest.raises(FetchError):
        sdists.obtain(tmp_path, Store(tmp_path / "store"), "1.0")
    found = sdists.artifact(sdists.pinned(tmp_path)["1.0"])
    assert (found.filename, found.sha256, found.size) == ("vllm-1.0.tar.gz", "0" * 64, 1)
