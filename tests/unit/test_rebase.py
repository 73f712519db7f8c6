"""A series made into another release's: what is written, and when nothing is."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sm75 import atomic, rebase
from sm75.errors import DiskError, PatchError, UsageError
from sm75.hunks import apply_hunks, parse_patch, split_lines
from sm75.patching import State, apply, check
from sm75.series import all_series, load_series
from sm75.trees import DirectoryTree
from tests.unit.test_patching import A, diff

OLD = b"".join(b"line %d\n" % number for number in range(1, 31))
OURS = OLD.replace(b"line 5\n", b"five\n").replace(b"line 20\n", b"twenty\n")
HEADER = '# A comment of the old release.\nschema = 1\nrelease = "1.0"\n'


class Project:
    """Releases 1.0 and 2.0 of a tree, and a series of 1.0 with a patch and a file of our own."""

    def __init__(self, root: Path) -> None:
        self.patches = root / "patches"
        self.rows = [HEADER]
        self.trees = {release: root / release for release in ("1.0", "2.0")}
        for tree in self.trees.values():
            (tree / "pkg").mkdir(parents=True)
            (tree / "pkg/a.py").write_bytes(OLD)
        self.home = self.patches / "1.0"
        self.home.mkdir(parents=True)
        self.patch(diff(OLD, OURS))
        self.overlay("pkg/ours.py")

    def patch(self, data: bytes, name: str = "0001-x.patch", drop: str = 'present = "-"') -> None:
        (self.home / name).write_bytes(data)
        self.rows.append(
            f'[[patch]]\nfile = "{name}"\nsha256 = "{hashlib.sha256(data).hexdigest()}"\n'
            f'purpose = "Why {name}."\nproof = "t"\n'
            f'[[patch.drop_when]]\nfile = "pkg/a.py"\n{drop}\n'
        )

    def overlay(self, dest: str, home: str = "", more: str = "") -> None:
        content = f"ours, {dest}\n".encode()
        path = self.patches / (home or "1.0") / "overlay" / dest
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        self.rows.append(
            f'[[overlay]]\nfile = "{dest}"\ndest = "{dest}"\npurpose = "Ours."\n'
            f'sha256 = "{hashlib.sha256(content).hexdigest()}"\n'
            + (f'from = "{home}"\n' if home else "")
            + more
        )

    def new(self, content: bytes, name: str = "pkg/a.py") -> None:
        (self.trees["2.0"] / name).write_bytes(content)

    def propose(self) -> rebase.Proposal:
        (self.home / "series.toml").write_text("\n".join(self.rows))
        old, new = (DirectoryTree(self.trees[release]) for release in ("1.0", "2.0"))
        return rebase.propose(load_series(self.home), old, new, "2.0")

    def write(self, **options: Any) -> Path:
        return rebase.write(
            self.propose(), DirectoryTree(self.trees["2.0"]), self.patches, **options
        )

    def files(self) -> dict[str, bytes]:
        """Everything below the directory of all series."""
        return {
            path.relative_to(self.patches).as_posix(): path.read_bytes()
            for path in self.patches.rglob("*")
            if path.is_file()
        }


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


def test_what_applies_is_written_at_once(project: Project) -> None:
    made = project.write()
    assert made == project.patches / "2.0"
    assert sorted(path.name for path in made.iterdir()) == ["0001-x.patch", "series.toml"]
    series = load_series(made)
    assert series.release == "2.0"
    assert [(o.file, o.home) for o in series.overlays] == [("pkg/ours.py", "1.0")]
    assert [(p.purpose, p.proof) for p in series.patches] == [("Why 0001-x.patch.", "t")]
    apply(series, project.trees["2.0"])
    assert (project.trees["2.0"] / "pkg/ours.py").read_bytes() == b"ours, pkg/ours.py\n"
    text = (made / "series.toml").read_text()
    assert text.startswith("# What this project changes in vLLM 2.0.")
    assert "Made of 1.0's" in text
    assert "# A comment" not in text


def test_a_move_is_written_when_it_is_accepted(project: Project) -> None:
    new = b"zero\n" + OLD.replace(b"line 12\n", b"line 12\nmore\nand more\n")
    project.new(new)
    project.propose()
    before = project.files()
    with pytest.raises(PatchError, match="nothing is written: 1 change to be reviewed") as refused:
        project.write()
    assert refused.value.why == "0001-x.patch (applies elsewhere)"
    assert "--accept" in refused.value.fix
    assert project.files() == before
    made = project.write(accept=True)
    assert b"@@ -5,3 +5,3 @@\n" in (made / "0001-x.patch").read_bytes()
    assert b"@@ -22,3 +22,3 @@\n" in (made / "0001-x.patch").read_bytes()
    series = load_series(made)
    assert {r.state for r in check(series, project.trees["2.0"])} == {State.APPLIES}
    apply(series, project.trees["2.0"])
    expected = new.replace(b"line 5\n", b"five\n").replace(b"line 20\n", b"twenty\n")
    assert (project.trees["2.0"] / "pkg/a.py").read_bytes() == expected


def test_what_is_not_needed_is_dropped_when_that_is_accepted(project: Project) -> None:
    project.patch(diff(OURS, OURS + b"end\n"), "0002-y.patch", drop='present = "fixed"')
    project.new(OLD + b"fixed\n")
    with pytest.raises(PatchError, match=r"0002-y\.patch \(no longer needed\)"):
        project.write()
    made = project.write(accept=True)
    assert [patch.file for patch in load_series(made).patches] == ["0001-x.patch"]
    assert not (made / "0002-y.patch").exists()


def test_nothing_is_written_of_what_conflicts(project: Project) -> None:
    project.new(OLD.replace(b"line 20\n", b"LINE 20\n"))
    with pytest.raises(PatchError, match=r"cannot be made into one of 2\.0: 1 conflict") as refused:
        project.write(accept=True)
    assert refused.value.why == "0001-x.patch"
    assert sorted(path.name for path in project.patches.iterdir()) == ["1.0"]


def test_a_patched_tree_is_no_release(project: Project) -> None:
    project.new(OURS)
    with pytest.raises(PatchError, match="give unpatched sources"):
        project.write(accept=True)


def test_a_series_that_is_there_is_kept(project: Project) -> None:
    project.write()
    (project.patches / "2.0/own.txt").write_text("mine")
    before = project.files()
    with pytest.raises(UsageError, match="is there already") as refused:
        project.write()
    assert "--replace" in refused.value.fix
    assert project.files() == before
    project.write(replace=True)
    assert not (project.patches / "2.0/own.txt").exists()
    assert sorted(path.name for path in project.patches.iterdir()) == ["1.0", "2.0"]


def test_files_that_others_take_are_not_lost(project: Project) -> None:
    """3.0 has a file from 2.0, which the new series of 2.0 would not hold."""
    project.write()
    own = project.patches / "2.0/overlay/pkg/second.py"
    own.parent.mkdir(parents=True)
    own.write_bytes(b"second\n")
    digest = hashlib.sha256(b"second\n").hexdigest()
    third = project.patches / "3.0"
    third.mkdir()
    (third / "series.toml").write_text(
        'schema = 1\nrelease = "3.0"\n[[overlay]]\nfile = "pkg/second.py"\ndest = "s.py"\n'
        f'sha256 = "{digest}"\npurpose = "p"\nfrom = "2.0"\n'
    )
    text = (project.patches / "2.0/series.toml").read_text()
    (project.patches / "2.0/series.toml").write_text(
        f'{text}\n[[overlay]]\nfile = "pkg/second.py"\ndest = "t.py"\nsha256 = "{digest}"\n'
        'purpose = "p"\n'
    )
    before = project.files()
    with pytest.raises(PatchError, match=r"patches/3\.0 takes pkg/second\.py from it"):
        project.write(replace=True)
    assert project.files() == before


def test_files_stay_with_the_release_that_has_them(project: Project) -> None:
    """A file of a third release is taken from there; one of the new release's stays its own."""
    project.overlay("pkg/third.py", home="0.5", more='[[overlay.needs]]\nfile = "pkg/a.py"\n'
                    'present = "line 1"\n')  # fmt: skip
    project.overlay("pkg/back.py", home="2.0")
    made = project.write(replace=True)
    series = load_series(made)
    assert {o.file: o.home for o in series.overlays} == {
        "pkg/ours.py": "1.0", "pkg/third.py": "0.5", "pkg/back.py": "",
    }  # fmt: skip
    assert (made / "overlay/pkg/back.py").read_bytes() == b"ours, pkg/back.py\n"
    assert [rule.present for o in series.overlays for rule in o.needs] == ["line 1"]
    assert [one.release for one in all_series(project.patches)] == ["1.0", "2.0"]


def test_a_file_of_upstreams_in_our_place_conflicts(project: Project) -> None:
    project.new(b"theirs\n", "pkg/ours.py")
    with pytest.raises(PatchError, match="1 conflict"):
        project.write(accept=True)


def test_a_renamed_file(project: Project) -> None:
    (project.trees["2.0"] / "pkg/a.py").unlink()
    project.new(b"#\n" + OLD, "pkg/b.py")
    made = project.write(accept=True)
    (patch,) = load_series(made).patches
    assert [d.path for d in patch.diffs] == ["pkg/b.py"]
    assert [rule.file for rule in patch.drop_when] == ["pkg/b.py"]


def test_full_disk_leaves_nothing(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    project.write()
    before = project.files()
    count = 0

    def full(path: Path, data: bytes, *, mode: int = 0o644) -> None:
        nonlocal count
        count += 1
        if count == 2:
            raise OSError(28, "No space left on device")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    monkeypatch.setattr(atomic, "write_bytes", full)
    with pytest.raises(DiskError):
        project.write(replace=True)
    assert project.files() == before
    assert sorted(path.name for path in project.patches.iterdir()) == ["1.0", "2.0"]


def test_a_failed_rename_brings_the_old_series_back(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    project.write()
    before = project.files()
    real = Path.rename

    def rename(path: Path, target: Path) -> Path:
        if target == project.patches / "2.0" and path.name.startswith(atomic.TMP_PREFIX):
            raise OSError(28, "No space left on device")
        return real(path, target)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(DiskError):
        project.write(replace=True)
    assert project.files() == before


PATCH = b"""Text before it, with a line
index of things
that looks like more.

diff --git a/a.py b/a.py
index 0123abc..456def0 100644
--- a/a.py
+++ b/a.py
@@ -2,3 +2,4 @@ def f():
 two
--- a/three
+++ b/THREE
+@@ -1 +1 @@
 four
@@ -9 +10 @@
-nine
+NINE
\\ No newline at end of file
--- /dev/null
+++ b/new.py
@@ -0,0 +1,2 @@
+x
+y
"""


def test_relocated_patches_keep_their_text() -> None:
    made = rebase.relocate(PATCH, {("a.py", 1): ("b.py", 7), ("a.py", 2): ("b.py", 30)})
    expected = PATCH.replace(b"index 0123abc..456def0 100644\n", b"")
    for old, new in ((b"a/a.py b/a.py", b"a/b.py b/b.py"), (b"-- a/a.py", b"-- a/b.py"),
                     (b"++ b/a.py", b"++ b/b.py")):  # fmt: skip
        expected = expected.replace(old, new)
    expected = expected.replace(b"@@ -2,3 +2,4 @@ def f()", b"@@ -7,3 +7,4 @@ def f()")
    expected = expected.replace(b"@@ -9 +10 @@", b"@@ -30 +31 @@")
    assert made == expected
    assert rebase.relocate(PATCH, {}) == PATCH.replace(b"index 0123abc..456def0 100644\n", b"")


def test_a_hunk_that_stays_is_counted_on_from_those_that_moved() -> None:
    first = diff(A, A.replace(b"two\n", b"two\nand\n").replace(b"six\n", b"6\n"))
    made = rebase.relocate(first, {("pkg/a.py", 1): ("pkg/a.py", 1)})
    (parsed,) = parse_patch(made, name="x")
    assert [(h.old_start, h.new_start) for h in parsed.hunks] == [(1, 1), (5, 6)]


@given(
    st.lists(st.integers(0, 39), min_size=1, max_size=4, unique=True),
    st.lists(st.integers(0, 40), max_size=5),
)
@settings(max_examples=100, deadline=None)
def test_relocated_is_what_was_meant(changed: list[int], inserted: list[int]) -> None:
    """Lines put anywhere between hunks: the relocated patch makes what it should of them."""
    old = [b"line %d\n" % n for n in range(40)]
    ours = [line.upper() if n in changed else line for n, line in enumerate(old)]
    (patch,) = parse_patch(data := diff(b"".join(old), b"".join(ours)), name="x")
    inside = {n for h in patch.hunks for n in range(h.old_start, h.old_start + len(h.old) - 1)}
    places = [n for n in inserted if n not in inside]

    def grown(lines: list[bytes]) -> list[bytes]:
        return [
            text for n in range(41) for text in [*[b"new\n"] * places.count(n), *lines[n : n + 1]]
        ]

    moved = {
        ("pkg/a.py", h.number): ("pkg/a.py", h.old_start + sum(n < h.old_start for n in places))
        for h in patch.hunks
    }
    (made,) = parse_patch(rebase.relocate(data, moved), name="x")
    assert apply_hunks(grown(old), made.hunks) == split_lines(b"".join(grown(ours)))


@pytest.mark.parametrize("name", ["0.34.0", "0.34.0rc1", "1"])
def test_names_of_releases(name: str) -> None:
    assert rebase.is_name(name)


@pytest.mark.parametrize("name", ["", "../x", ".hidden", "a/b", "0.1/..", "x", "0.1 "])
def test_names_of_nothing(name: str) -> None:
    assert not rebase.is_name(name)
