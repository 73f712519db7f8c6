"""Strict application of patch series: every way in which one is refused, and what passes."""

from __future__ import annotations

import difflib
import hashlib
import io
import json
import os
import subprocess
import tarfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sm75.errors import DiskError, PatchError
from sm75.hunks import apply_hunks, parse_patch, split_lines
from sm75.patching import Result, State, apply, check, main
from sm75.series import Series, load_series, seal
from sm75.trees import DirectoryTree

A = b"one\ntwo\nthree\nfour\nfive\nsix\nseven\n"
CHANGE = b"""Text before the patch is free.

--- a/pkg/a.py
+++ b/pkg/a.py
@@ -2,3 +2,3 @@
 two
-three
+THREE
 four
"""


class Kit:
    """A patch directory and a tree to try it on."""

    def __init__(self, root: Path) -> None:
        self.dir = root / "patches"
        self.tree = root / "tree"
        (self.dir / "overlay").mkdir(parents=True)
        self.rows: list[str] = ['schema = 1\nrelease = "1.0"\n']
        self.put("pkg/a.py", A)

    def put(self, path: str, content: bytes) -> Path:
        target = self.tree / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
        return target

    def patch(self, data: bytes, name: str = "0001-x.patch", drop: str = 'present = "-"') -> None:
        (self.dir / name).write_bytes(data)
        digest = hashlib.sha256(data).hexdigest()
        self.rows.append(
            f'[[patch]]\nfile = "{name}"\nsha256 = "{digest}"\npurpose = "p"\nproof = "t"\n'
            f'[[patch.drop_when]]\nfile = "pkg/a.py"\n{drop}\n'
        )

    def overlay(
        self, dest: str, content: bytes = b"ours\n", file: str = "", home: str = ""
    ) -> None:
        file = file or dest
        path = (self.dir.parent / home if home else self.dir) / "overlay" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        digest = hashlib.sha256(content).hexdigest()
        self.rows.append(
            f'[[overlay]]\nfile = "{file}"\ndest = "{dest}"\nsha256 = "{digest}"\npurpose = "p"\n'
            + (f'from = "{home}"\n' if home else "")
        )

    def series(self) -> Series:
        (self.dir / "series.toml").write_text("\n".join(self.rows))
        return load_series(self.dir)

    def check(self) -> list[Result]:
        return check(self.series(), self.tree)

    def apply(self) -> None:
        apply(self.series(), self.tree)

    def files(self) -> dict[str, bytes]:
        return {
            path.relative_to(self.tree).as_posix(): path.read_bytes()
            for path in self.tree.rglob("*")
            if path.is_file()
        }


@pytest.fixture
def kit(tmp_path: Path) -> Kit:
    return Kit(tmp_path)


def diff(before: bytes, after: bytes, path: str = "pkg/a.py", context: int = 1) -> bytes:
    lines = difflib.diff_bytes(
        difflib.unified_diff,
        split_lines(before),
        split_lines(after),
        f"a/{path}".encode(),
        f"b/{path}".encode(),
        n=context,
        lineterm=b"\n",
    )
    return b"".join(
        line if line.endswith(b"\n") else line + b"\n\\ No newline at end of file\n"
        for line in lines
    )


def test_applies_and_says_so(kit: Kit) -> None:
    kit.patch(CHANGE)
    kit.overlay("pkg/ours.py")
    assert [r.state for r in kit.check()] == [State.APPLIES, State.APPLIES]
    kit.apply()
    assert kit.files() == {
        "pkg/a.py": A.replace(b"three", b"THREE"),
        "pkg/ours.py": b"ours\n",
    }
    assert [r.state for r in kit.check()] == [State.APPLIED, State.APPLIED]


def test_second_application_touches_nothing(kit: Kit) -> None:
    kit.patch(CHANGE)
    kit.overlay("pkg/ours.py")
    kit.apply()
    before = {p: (p.stat().st_mtime_ns, p.stat().st_ino) for p in kit.tree.rglob("*")}
    kit.apply()
    assert {p: (p.stat().st_mtime_ns, p.stat().st_ino) for p in kit.tree.rglob("*")} == before


def test_a_killed_run_is_resumed(kit: Kit) -> None:
    kit.put("pkg/b.py", A)
    kit.patch(
        CHANGE
        + CHANGE.replace(b"Text before the patch is free.\n\n", b"").replace(b"a.py", b"b.py")
    )
    kit.overlay("pkg/ours.py")
    whole = kit.series()
    apply(whole, kit.tree)
    done = kit.files()
    for undone in ("pkg/a.py", "pkg/b.py", "pkg/ours.py"):
        if undone == "pkg/ours.py":
            (kit.tree / undone).unlink()
        else:
            kit.put(undone, A)
        apply(whole, kit.tree)
        assert kit.files() == done


def test_mode_is_kept(kit: Kit) -> None:
    (kit.tree / "pkg/a.py").chmod(0o755)
    kit.patch(CHANGE)
    kit.apply()
    assert (kit.tree / "pkg/a.py").stat().st_mode & 0o777 == 0o755


def test_later_patch_counts_lines_after_earlier_ones(kit: Kit) -> None:
    middle = A.replace(b"one\n", b"zero\none\n")
    last = middle.replace(b"six\n", b"6\n")
    kit.patch(diff(A, middle), "0001-a.patch")
    kit.patch(diff(middle, last), "0002-b.patch")
    kit.apply()
    assert kit.files()["pkg/a.py"] == last
    assert [r.state for r in kit.check()] == [State.APPLIED] * 2


def test_a_longer_series_continues_a_shorter_one(kit: Kit) -> None:
    middle = A.replace(b"one\n", b"zero\none\n")
    last = middle.replace(b"six\n", b"6\n")
    kit.patch(diff(A, middle), "0001-a.patch")
    kit.apply()
    kit.patch(diff(middle, last), "0002-b.patch")
    assert [r.state for r in kit.check()] == [State.APPLIED, State.APPLIES]
    kit.apply()
    assert kit.files()["pkg/a.py"] == last


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (A.replace(b"two\n", b"zero\ntwo\n"), "moved by one line"),
        (A.replace(b"three", b"three "), "trailing blank"),
        (A.replace(b"three", b"\tthree"), "leading tab"),
        (A.replace(b"two\n", b"two\r\n"), "carriage return"),
        (A.replace(b"four", b"Four"), "other context"),
        (b"one\ntwo\nthree\n", "file too short"),
        (b"", "empty file"),
    ],
)
def test_no_fuzz_no_offset_no_blanks(kit: Kit, found: bytes, why: str) -> None:
    kit.put("pkg/a.py", found)
    kit.patch(CHANGE)
    before = kit.files()
    with pytest.raises(PatchError) as caught:
        kit.apply()
    assert "0001-x.patch" in str(caught.value), why
    assert "pkg/a.py, hunk 1, line 2" in str(caught.value)
    assert kit.files() == before


def test_refusal_shows_expected_and_found_exactly(kit: Kit) -> None:
    kit.put("pkg/a.py", A.replace(b"three", b"three "))
    kit.patch(CHANGE)
    with pytest.raises(PatchError) as caught:
        kit.apply()
    text = str(caught.value)
    assert "expected | three\n" in text
    assert r"found    | 'three \n'" in text


def test_moved_names_the_new_place(kit: Kit) -> None:
    kit.put("pkg/a.py", b"new\nnew\n" + A)
    kit.patch(CHANGE)
    (result,) = kit.check()
    assert result.state is State.ELSEWHERE
    assert result.faults[0].elsewhere == (("pkg/a.py", 4),)
    with pytest.raises(PatchError, match=r"the same text stands at pkg/a\.py:4"):
        kit.apply()


def test_twice_elsewhere_is_a_conflict(kit: Kit) -> None:
    kit.put("pkg/a.py", b"new\n" + A + A)
    kit.patch(CHANGE)
    (result,) = kit.check()
    assert result.state is State.CONFLICTS
    assert result.faults[0].elsewhere == (("pkg/a.py", 3), ("pkg/a.py", 10))


def test_moved_to_another_file(kit: Kit) -> None:
    (kit.tree / "pkg/a.py").unlink()
    kit.put("pkg/renamed.py", A)
    kit.patch(CHANGE)
    (result,) = kit.check()
    assert result.state is State.ELSEWHERE
    assert result.faults[0].elsewhere == (("pkg/renamed.py", 2),)
    assert "no such file" in result.faults[0].describe()


def test_later_patches_are_judged_after_a_move(kit: Kit) -> None:
    middle = A.replace(b"three", b"THREE")
    kit.patch(CHANGE, "0001-a.patch")
    kit.patch(diff(middle, middle.replace(b"THREE", b"3")), "0002-b.patch")
    kit.put("pkg/a.py", b"new\n" + A)
    assert [r.state for r in kit.check()] == [State.ELSEWHERE, State.ELSEWHERE]


def test_missing_file(kit: Kit) -> None:
    (kit.tree / "pkg/a.py").unlink()
    kit.patch(CHANGE)
    (result,) = kit.check()
    assert result.state is State.CONFLICTS
    with pytest.raises(PatchError, match="no such file"):
        kit.apply()


def test_all_or_nothing(kit: Kit) -> None:
    kit.put("pkg/b.py", b"other\n")
    kit.overlay("pkg/ours.py")
    kit.patch(CHANGE, "0001-good.patch")
    kit.patch(CHANGE.replace(b"a.py", b"b.py"), "0002-bad.patch")
    before = kit.files()
    with pytest.raises(PatchError, match=r"0002-bad\.patch does not apply"):
        kit.apply()
    assert kit.files() == before


def test_new_file(kit: Kit) -> None:
    kit.patch(b"--- /dev/null\n+++ b/pkg/new.py\n@@ -0,0 +1,2 @@\n+x\n+y\n")
    kit.apply()
    assert kit.files()["pkg/new.py"] == b"x\ny\n"
    assert [r.state for r in kit.check()] == [State.APPLIED]
    kit.put("pkg/new.py", b"theirs\n")
    with pytest.raises(PatchError, match="the tree has one already"):
        kit.apply()


def test_no_longer_needed(kit: Kit) -> None:
    kit.patch(CHANGE, drop='present = "fixed upstream"')
    assert [r.state for r in kit.check()] == [State.APPLIES]
    kit.put("pkg/a.py", b"fixed upstream\n")
    assert [r.state for r in kit.check()] == [State.UNNEEDED]
    with pytest.raises(PatchError, match=r"drop 0001-x\.patch"):
        kit.apply()


@pytest.mark.parametrize(
    ("drop", "content", "state"),
    [
        ('absent = "three"', None, State.CONFLICTS),  # a file that is gone is not a fixed file
        ('absent = "three"', b"x\n", State.UNNEEDED),
        ("exists = false", None, State.UNNEEDED),
        ("exists = true", A, State.UNNEEDED),
        ('absent = "three"', A.replace(b"three", b"THREE"), State.APPLIED),
    ],
)
def test_drop_conditions(kit: Kit, drop: str, content: bytes | None, state: State) -> None:
    (kit.tree / "pkg/a.py").unlink()
    if content is not None:
        kit.put("pkg/a.py", content)
    kit.patch(CHANGE, drop=drop)
    assert [r.state for r in kit.check()] == [state]


def test_overlay_never_replaces(kit: Kit) -> None:
    kit.put("pkg/ours.py", b"theirs\n")
    kit.overlay("pkg/ours.py")
    with pytest.raises(PatchError, match="an overlay never replaces one"):
        kit.apply()
    assert kit.files()["pkg/ours.py"] == b"theirs\n"


def test_a_hunk_that_could_apply_twice_is_refused(kit: Kit) -> None:
    kit.patch(b"--- a/pkg/a.py\n+++ b/pkg/a.py\n@@ -2 +2,2 @@\n two\n+more\n")
    with pytest.raises(PatchError, match="give its hunks more context"):
        kit.apply()


def test_unclear_whether_applied_is_refused(kit: Kit) -> None:
    kit.put("pkg/a.py", b"x\ny\nx\ny\n")
    kit.patch(b"--- a/pkg/a.py\n+++ b/pkg/a.py\n@@ -1,2 +1,4 @@\n x\n y\n+x\n+y\n")
    before = kit.files()
    with pytest.raises(PatchError, match="give its hunks more context"):
        kit.apply()
    assert kit.files() == before


HEAD = b"--- a/pkg/a.py\n+++ b/pkg/a.py\n"


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "changes no file"),
        (b"only words\n", "changes no file"),
        (CHANGE[:-1], "no line end"),
        (CHANGE.replace(b"-2,3 +2,3", b"-2,4 +2,4"), "shorter"),
        (CHANGE.replace(b"-2,3 +2,3", b"-2,2 +2,2"), "longer|belongs to no hunk"),
        (CHANGE.replace(b"+2,3", b"+3,3"), r"header says \+3, must be \+2"),
        (CHANGE + b"+left over\n", "belongs to no hunk"),
        (CHANGE + b" left over\n", "belongs to no hunk"),
        (CHANGE + b"\n", "belongs to no hunk"),
        (CHANGE + b"-- \n2.43\n", "belongs to no hunk"),
        (HEAD + b"@@ -1,3 +1,3 @@\n one\n\n-two\n+2\n", "empty inside a hunk"),
        (HEAD + b"@@ -2 +2 @@\n two\n", "changes nothing"),
        (HEAD + b"@@ -2,0 +3 @@\n+more\n", "no context line"),
        (HEAD + b"@@ -2 +1,0 @@\n-two\n", "no context line"),
        (HEAD + b"@@ -4 +4 @@\n-four\n+4\n@@ -2 +2 @@\n-two\n+2\n", "overlaps|before it"),
        (HEAD + b"@@ -4 +4 @@\n-four\n+4\n@@ -4 +4 @@\n-four\n+4\n", "overlaps"),
        (HEAD + b"@@ -0 +0 @@\n-one\n+1\n", "overlaps|before it"),
        (HEAD + b"@@ -2 +2 @@\n-two\n\\ No newline at end of file\n+2\n", ""),
        (CHANGE + CHANGE[CHANGE.index(b"---") :], "twice"),
        (CHANGE.replace(b"+++ b/pkg/a.py", b"+++ /dev/null"), "deleted"),
        (CHANGE.replace(b"+++ b/pkg/a.py", b"+++ b/pkg/b.py"), "differ"),
        (CHANGE.replace(b"a/pkg", b"pkg").replace(b"b/pkg", b"pkg"), "b/ prefix"),
        (b"diff --git a/x b/y\nsimilarity index 100%\nrename from x\nrename to y\n", "no hunk"),
        (b"diff --git a/x b/x\nold mode 100644\nnew mode 100755\n", "no hunk"),
        (b"diff --git a/x b/x\nindex 1..2 100644\nGIT binary patch\nliteral 0\n", "no hunk"),
        (
            b"diff --git a/x b/x\nnew file mode 120000\n--- /dev/null\n+++ b/x\n@@ -0,0 +1 @@\n+\n",
            "no hunk",
        ),
        (b"--- /dev/null\n+++ b/n\n@@ -0,0 +1 @@\n+x\n@@ -5,0 +6 @@\n+y\n", "exactly one hunk"),
        (b"--- /dev/null\n+++ b/n\n@@ -0,0 +3 @@\n+x\n", "exactly one hunk"),
        (b"Binary files a/x and b/x differ\n", ""),
    ],
)
def test_malformed_patches(kit: Kit, data: bytes, why: str) -> None:
    kit.patch(data)
    if why == "":
        with pytest.raises(PatchError):
            kit.apply()
        return
    with pytest.raises(PatchError, match=why):
        kit.series()


@pytest.mark.parametrize(
    "path", ["../x", "/etc/passwd", "pkg/../../x", "pkg//a.py", "./a.py", "a\\b", "c:x", "pkg/", ""]
)
def test_paths_that_leave_the_tree(kit: Kit, path: str) -> None:
    with pytest.raises(PatchError):
        parse_patch(CHANGE.replace(b"pkg/a.py", path.encode()), name="x.patch")
    kit.overlay("pkg/ours.py")
    kit.rows[-1] = kit.rows[-1].replace('dest = "pkg/ours.py"', f"dest = '{path}'")
    with pytest.raises(PatchError):
        kit.series()


def test_links_are_not_followed(kit: Kit, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "a.py").write_bytes(A)
    (kit.tree / "link").symlink_to(outside)
    kit.patch(CHANGE.replace(b"pkg/a.py", b"link/a.py"))
    with pytest.raises(PatchError, match="symbolic link"):
        kit.apply()
    assert (outside / "a.py").read_bytes() == A


def test_a_linked_target_is_refused(kit: Kit) -> None:
    (kit.tree / "pkg/a.py").rename(kit.tree / "real.py")
    (kit.tree / "pkg/a.py").symlink_to("../real.py")
    kit.patch(CHANGE)
    with pytest.raises(PatchError, match="symbolic link"):
        kit.check()


def test_a_directory_in_the_place_of_a_file(kit: Kit) -> None:
    (kit.tree / "pkg/ours.py").mkdir()
    kit.overlay("pkg/ours.py")
    with pytest.raises(PatchError, match="not a regular file"):
        kit.check()


def test_hash_is_pinned(kit: Kit) -> None:
    kit.patch(CHANGE)
    (kit.dir / "0001-x.patch").write_bytes(CHANGE + b"x")
    with pytest.raises(PatchError, match="is not the file that series"):
        kit.series()


def test_seal_writes_the_new_hash_and_nothing_else(kit: Kit) -> None:
    kit.patch(CHANGE)
    kit.overlay("pkg/ours.py")
    kit.rows.insert(1, "# a comment stays")
    kit.series()
    before = (kit.dir / "series.toml").read_text()
    assert seal(kit.dir) == []
    old = hashlib.sha256(b"ours\n").hexdigest()
    (kit.dir / "overlay/pkg/ours.py").write_bytes(b"changed\n")
    assert seal(kit.dir) == ["pkg/ours.py"]
    new = hashlib.sha256(b"changed\n").hexdigest()
    assert (kit.dir / "series.toml").read_text() == before.replace(old, new)
    load_series(kit.dir)


def test_a_file_of_another_release(kit: Kit) -> None:
    """It is taken from there, and no change to it goes unseen."""
    kit.overlay("pkg/ours.py", home="2.0")
    assert kit.series().overlays[0].path == kit.dir.parent / "2.0/overlay/pkg/ours.py"
    kit.apply()
    assert kit.files()["pkg/ours.py"] == b"ours\n"
    (kit.dir.parent / "2.0/overlay/pkg/ours.py").write_bytes(b"changed\n")
    with pytest.raises(PatchError, match="not the file that series"):
        load_series(kit.dir)
    assert seal(kit.dir) == ["pkg/ours.py"]
    assert load_series(kit.dir).overlays[0].content == b"changed\n"
    (kit.dir.parent / "2.0/overlay/pkg/ours.py").unlink()
    with pytest.raises(PatchError, match="cannot be read"):
        load_series(kit.dir)


@pytest.mark.parametrize("home", ["../elsewhere", "a/b", "patches", "/tmp", ""])
def test_another_release_is_a_directory_beside(kit: Kit, home: str) -> None:
    kit.overlay("pkg/ours.py")
    kit.rows[-1] += f'from = "{home}"\n'
    with pytest.raises(PatchError, match=r"no other release|no.* plain path|must be a non-empty"):
        kit.series()


def test_an_overlay_file_is_listed_once(kit: Kit) -> None:
    """A release lock names it by its file alone."""
    kit.overlay("pkg/ours.py", file="ours.py")
    kit.overlay("pkg/theirs.py", file="ours.py", home="2.0")
    with pytest.raises(PatchError, match="listed twice"):
        kit.series()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (("schema = 1", "schema = 2"), "schema 2 is unknown"),
        (("schema = 1", ""), "'schema' must be"),
        (('release = "1.0"', "release = 3"), "'release' must be"),
        (("[[patch]]", "[[patches]]"), "'patch' must be"),
        (('proof = "t"', ""), "'proof' must be"),
        (('purpose = "p"', 'purpose = ""'), "'purpose' must be"),
        (('proof = "t"', 'proof = "t"\nextra = 1'), "unknown keys: extra"),
        (('proof = "t"', 'proof = "t"\nupstream = [1]'), "list of links"),
        (('present = "-"', ""), "exactly one of"),
        (('present = "-"', 'present = "-"\nabsent = "f"'), "exactly one of"),
        (('present = "-"', "exists = 1"), "'exists' must be"),
        (('file = "0001-x.patch"', 'file = "sub/0001-x.patch"'), "beside series.toml"),
        (('file = "0001-x.patch"', 'file = "0009-x.patch"'), "cannot be read"),
        (("[[patch]]", "[[patch]"), "cannot be read"),
    ],
)
def test_bad_series(kit: Kit, change: tuple[str, str], why: str) -> None:
    kit.patch(CHANGE)
    kit.rows = [row.replace(*change) for row in kit.rows]
    with pytest.raises(PatchError, match=why):
        kit.series()


def test_drop_condition_is_compulsory(kit: Kit) -> None:
    kit.patch(CHANGE)
    kit.rows[-1] = kit.rows[-1].split("[[patch.drop_when]]")[0]
    with pytest.raises(PatchError, match="no drop_when"):
        kit.series()


def test_order_and_completeness(kit: Kit) -> None:
    kit.patch(CHANGE, "0002-b.patch")
    kit.patch(CHANGE, "0001-a.patch")
    with pytest.raises(PatchError, match="sorted by file name"):
        kit.series()
    kit.rows.pop()
    with pytest.raises(PatchError, match=r"not listed: 0001-a\.patch"):
        kit.series()
    (kit.dir / "0001-a.patch").unlink()
    (kit.dir / "overlay/stray.py").write_bytes(b"")
    with pytest.raises(PatchError, match=r"not listed: overlay/stray\.py"):
        kit.series()
    (kit.dir / "overlay/stray.py").unlink()
    (kit.dir / "more").mkdir()
    (kit.dir / "more/0003-c.patch").write_bytes(b"")
    with pytest.raises(PatchError, match=r"not listed: more/0003-c\.patch"):
        kit.series()
    (kit.dir / "more/0003-c.patch").unlink()
    kit.overlay("pkg/a.py")
    with pytest.raises(PatchError, match="also changed by a patch"):
        kit.series()


@pytest.mark.parametrize("below", ["overlay", "patch"])
def test_a_file_where_another_needs_a_directory(kit: Kit, below: str) -> None:
    """It would be found out after half of the overlay is written."""
    kit.overlay("pkg" if below == "patch" else "q")
    if below == "patch":
        kit.patch(CHANGE)
    else:
        kit.overlay("q/r", file="q2/r")
    with pytest.raises(PatchError, match="cannot be a file, for"):
        kit.series()


def test_truncated_sdist(kit: Kit, tmp_path: Path) -> None:
    """Cut anywhere: in a header, in a member's bytes, in the compressed stream."""
    kit.patch(CHANGE)
    content = os.urandom(1 << 16) + A
    whole = sdist(tmp_path / "pkg-1.0.tar.gz", {"pkg/a.py": content}).read_bytes()
    for size in (0, 1, 20, 600, 30_000, len(whole) - 9_000):
        cut = tmp_path / f"cut-{size}.tar.gz"
        cut.write_bytes(whole[:size])
        with pytest.raises(PatchError, match="cannot be read as an sdist"):
            check(kit.series(), cut)


def test_missing_series(tmp_path: Path) -> None:
    with pytest.raises(PatchError, match="cannot be read"):
        load_series(tmp_path / "none")


def test_full_disk_changes_nothing(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    kit.patch(CHANGE)
    kit.overlay("pkg/ours.py")
    before = kit.files()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DiskError, match="No space left"):
        kit.apply()
    assert kit.files() == before


def sdist(path: Path, members: dict[str, bytes | str], top: str = "pkg-1.0") -> Path:
    """An sdist; a ``str`` content makes a symbolic link to it."""
    with tarfile.open(path, "w:gz") as handle:
        for name, content in members.items():
            member = tarfile.TarInfo(f"{top}/{name}" if top else name)
            if isinstance(content, str):
                member.type, member.linkname = tarfile.SYMTYPE, content
                handle.addfile(member)
            else:
                member.size = len(content)
                handle.addfile(member, io.BytesIO(content))
    return path


def test_sdist_gives_the_same_verdicts_and_stays_packed(kit: Kit, tmp_path: Path) -> None:
    kit.patch(CHANGE)
    kit.overlay("pkg/ours.py")
    folder = tmp_path / "store"
    folder.mkdir()
    for content in (A, b"new\n" + A, A.replace(b"three", b"THREE"), b"x\n"):
        kit.put("pkg/a.py", content)
        archive = sdist(folder / "pkg-1.0.tar.gz", {"pkg/a.py": content, "pkg/b.py": b"\n"})
        assert check(kit.series(), archive) == kit.check()
    assert [path.name for path in folder.iterdir()] == ["pkg-1.0.tar.gz"]


@pytest.mark.parametrize(
    ("members", "top", "why"),
    [
        ({"pkg/a.py": "/etc/passwd"}, "p", "not a regular file"),
        ({"pkg": "../elsewhere"}, "p", "lie behind it"),
        ({"p/pkg/a.py": A, "../evil": b""}, "", "outside the folder"),
        ({"p/pkg/a.py": A, "q/pkg/a.py": A}, "", "outside the folder"),
        ({"/pkg/a.py": A}, "", "outside the folder"),
    ],
)
def test_hostile_sdists(
    kit: Kit, tmp_path: Path, members: dict[str, bytes | str], top: str, why: str
) -> None:
    kit.patch(CHANGE)
    with pytest.raises(PatchError, match=why):
        check(kit.series(), sdist(tmp_path / "x.tar.gz", members, top))


def test_double_member(kit: Kit, tmp_path: Path) -> None:
    kit.patch(CHANGE)
    with tarfile.open(tmp_path / "x.tar.gz", "w:gz") as handle:
        for content in (A, b"other\n"):
            member = tarfile.TarInfo("p/pkg/a.py")
            member.size = len(content)
            handle.addfile(member, io.BytesIO(content))
    with pytest.raises(PatchError, match="twice"):
        check(kit.series(), tmp_path / "x.tar.gz")


def test_damaged_sdists(kit: Kit, tmp_path: Path) -> None:
    kit.patch(CHANGE)
    archive = sdist(tmp_path / "x.tar.gz", {"pkg/a.py": A, "pkg/b.py": os.urandom(200_000)})
    data = archive.read_bytes()
    for bad in (data[: len(data) // 2], b"not a tar", b"", data[:-4000]):
        archive.write_bytes(bad)
        with pytest.raises(PatchError, match="cannot be read as an sdist"):
            check(kit.series(), archive)


def test_trees_that_are_not_there(kit: Kit, tmp_path: Path) -> None:
    kit.patch(CHANGE)
    with pytest.raises(PatchError, match="does not exist"):
        check(kit.series(), tmp_path / "none")
    with pytest.raises(PatchError, match="not a directory"):
        DirectoryTree(tmp_path / "none")


def test_command_line(kit: Kit, capsys: pytest.CaptureFixture[str]) -> None:
    kit.patch(CHANGE)
    kit.series()
    where = ["--series", str(kit.dir), "--tree", str(kit.tree)]
    assert main(["check", *where, "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["name"], row["state"]) == ("0001-x.patch", "applies")
    assert main(["apply", *where]) == 0
    assert main(["check", *where]) == 0
    assert "already applied" in capsys.readouterr().out
    kit.put("pkg/a.py", b"x\n")
    assert main(["check", *where]) == 1
    assert main(["apply", *where]) == 5
    assert "error: 0001-x.patch does not apply" in capsys.readouterr().err
    assert main(["seal", "--series", str(kit.dir)]) == 0
    with pytest.raises(SystemExit):
        main(["apply", "--series", str(kit.dir)])


LINE = st.sampled_from([b"a\n", b"b\n", b"\n", b" a\n", b"a\r\n", b"\xff\x0c\n", b"--- x\n"])


@settings(max_examples=200, deadline=None)
@given(st.lists(LINE, max_size=12), st.lists(LINE, max_size=12), st.booleans(), st.booleans())
def test_any_strict_diff_gives_exactly_the_target(
    old: list[bytes], new: list[bytes], chop_old: bool, chop_new: bool
) -> None:
    before = b"".join(old)[: -1 if chop_old and old else None]
    after = b"".join(new)[: -1 if chop_new and new else None]
    try:
        (parsed,) = parse_patch(diff(before, after, context=3), name="x")
    except PatchError:
        # Only what we refuse on purpose: nothing to change, or no context to go by.
        assert before == after or not before or not after
        return
    assert b"".join(apply_hunks(split_lines(before), parsed.hunks)) == after
    back = [hunk.reversed() for hunk in parsed.hunks]
    assert b"".join(apply_hunks(split_lines(after), back)) == before


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from([b"a\n", b"b\n", b"c\n"]), min_size=1, max_size=10),
    st.lists(st.sampled_from([b"a\n", b"b\n", b"c\n"]), min_size=1, max_size=10),
    st.integers(0, 3),
)
def test_twice_is_once_or_refused(
    tmp_path_factory: pytest.TempPathFactory, old: list[bytes], new: list[bytes], context: int
) -> None:
    kit = Kit(tmp_path_factory.mktemp("twice"))
    before, after = b"".join(old), b"".join(new)
    kit.put("pkg/a.py", before)
    kit.patch(diff(before, after, context=context), drop='present = "never"')
    try:
        series = kit.series()
        apply(series, kit.tree)
    except PatchError:
        assert kit.files()["pkg/a.py"] == before
        return
    assert kit.files()["pkg/a.py"] == after
    apply(series, kit.tree)
    assert kit.files()["pkg/a.py"] == after


def test_git_agrees(kit: Kit, tmp_path: Path) -> None:
    """What ``git diff`` writes applies here, and gives what git says."""
    work = tmp_path / "git"
    work.mkdir()
    after = A.replace(b"two\n", b"").replace(b"six\n", b"six\n6b\n")
    (work / "old").write_bytes(A)
    (work / "new").write_bytes(after)
    out = subprocess.run(
        ["git", "diff", "--no-index", "-U1", "old", "new"], cwd=work, capture_output=True
    ).stdout
    kit.patch(out.replace(b"a/old", b"a/pkg/a.py").replace(b"b/new", b"b/pkg/a.py"))
    kit.apply()
    assert kit.files()["pkg/a.py"] == after
