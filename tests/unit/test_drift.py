"""Patches on another release: where a hunk went, and a conflict from three sides."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from sm75.drift import KeptTree, compare
from sm75.errors import PatchError
from sm75.patching import Result, State
from sm75.trees import DirectoryTree
from tests.unit.test_patching import CHANGE, A, Kit, diff

# Blocks that all end alike, as those of a CMakeLists.txt do.
BLOCKS = [f"if({name})\n  run({name})\nendif()\n\n" for name in "abcdef"]
OLD = "".join(BLOCKS).encode()
# Our line goes in after the third block: line 11 is its endif().
OURS = b"--- a/pkg/a.py\n+++ b/pkg/a.py\n@@ -11,2 +11,3 @@\n endif()\n+ours()\n \n"


@pytest.fixture
def kit(tmp_path: Path) -> Kit:
    return Kit(tmp_path)


def drift(kit: Kit, new: bytes, old: bytes = OLD) -> list[Result]:
    """The kit's series, written for ``old``, on ``new``."""
    before = kit.dir.parent / "old"
    (before / "pkg").mkdir(parents=True, exist_ok=True)
    (before / "pkg/a.py").write_bytes(old)
    kit.put("pkg/a.py", new)
    return compare(kit.series(), DirectoryTree(before), DirectoryTree(kit.tree))


def test_of_many_places_the_right_one_is_found(kit: Kit) -> None:
    kit.patch(OURS)
    (result,) = drift(kit, b"# one\n# two\n# three\n" + OLD)
    assert result.state is State.ELSEWHERE
    assert result.describe() == (
        "applies elsewhere 0001-x.patch\n  pkg/a.py, hunk 1: line 11 -> 14"
    )
    # The text alone cannot tell.
    assert [r.state for r in kit.check()] == [State.CONFLICTS]


def test_text_at_the_old_line_may_stand_there_by_chance(kit: Kit) -> None:
    """Four lines more before it: another block's end is at line 11 now."""
    kit.patch(OURS)
    (result,) = drift(kit, BLOCKS[5].replace("f", "new").encode() + OLD)
    assert (result.state, result.faults[0].elsewhere) == (State.ELSEWHERE, (("pkg/a.py", 15),))
    assert "by chance" in result.faults[0].reason
    # Strictly, it would be applied to the wrong block.
    assert [r.state for r in kit.check()] == [State.APPLIES]


def test_unchanged_is_unchanged(kit: Kit) -> None:
    kit.patch(OURS)
    assert [r.state for r in drift(kit, OLD)] == [State.APPLIES]
    assert [r.state for r in drift(kit, OLD + b"more\n")] == [State.APPLIES]


def test_lines_that_came_alone_are_not_believed(kit: Kit) -> None:
    """Nothing of what was around them is left, and the text stands twice."""
    kit.patch(b"--- a/pkg/a.py\n+++ b/pkg/a.py\n@@ -3,2 +3,3 @@\n end\n+ours\n \n")
    (result,) = drift(kit, b"1\n2\n3\nend\n\n4\nend\n\n5\n", old=b"p\nq\nend\n\nr\ns\n")
    assert result.state is State.CONFLICTS


def test_text_that_stands_once_is_enough(kit: Kit) -> None:
    kit.patch(CHANGE)
    (result,) = drift(kit, b"1\n2\n3\n4\ntwo\nthree\nfour\n", old=A)
    assert (result.state, result.faults[0].elsewhere) == (State.ELSEWHERE, (("pkg/a.py", 5),))


def test_a_conflict_is_shown_from_three_sides(kit: Kit) -> None:
    old = b"".join(b"line %d\n" % number for number in range(1, 31))
    ours = old.replace(b"line 5\n", b"five\n").replace(b"line 20\n", b"twenty\n")
    kit.patch(diff(old, ours))
    new = b"zero\n" + old.replace(b"line 20\n", b"LINE 20\nLINE 20 and a half\n")
    (result,) = drift(kit, new, old)
    assert result.state is State.CONFLICTS
    moved, conflict = result.faults
    assert (moved.line, moved.elsewhere) == (4, (("pkg/a.py", 5),))
    assert conflict.expected == ("line 19", "line 20", "line 21")
    assert (conflict.old_line, conflict.old) == (16, tuple(f"line {n}" for n in range(16, 25)))
    assert conflict.found_line == 17
    assert conflict.found == (
        "line 16", "line 17", "line 18", "line 19", "LINE 20", "LINE 20 and a half",
        "line 21", "line 22", "line 23", "line 24",
    )  # fmt: skip
    text = result.describe().splitlines()
    assert text[1] == "  pkg/a.py, hunk 1: line 4 -> 5"
    assert text[2] == "  pkg/a.py, hunk 2, line 19: the lines differ"
    assert "      expected | line 20" in text
    assert "      old from line 16, new from line 17:" in text
    assert "      old      | line 20" in text
    assert "      new      | LINE 20 and a half" in text


def test_lines_that_are_gone(kit: Kit) -> None:
    kit.patch(CHANGE)
    (result,) = drift(kit, b"other\n", old=A)
    assert result.state is State.CONFLICTS
    assert result.faults[0].old == ("one", "two", "three", "four", "five", "six", "seven")
    (kit.tree / "pkg/a.py").unlink()
    (result,) = compare(
        kit.series(), DirectoryTree(kit.dir.parent / "old"), DirectoryTree(kit.tree)
    )
    assert result.state is State.CONFLICTS
    assert result.faults[0].old_line == 1


def test_the_whole_of_what_replaced_the_lines_is_shown(kit: Kit) -> None:
    """Up to the end of it, also where nothing follows that is as it was."""
    old = b"".join(b"line %d\n" % number for number in range(1, 11))
    kit.patch(diff(old, old.replace(b"line 10\n", b"ten\n")))
    (result,) = drift(kit, old.replace(b"line 10\n", b"a\nb\nc\n"), old)
    assert result.faults[0].found == ("line 6", "line 7", "line 8", "line 9", "a", "b", "c")


def test_long_conflicts_are_cut(kit: Kit) -> None:
    old = b"".join(b"line %d\n" % number for number in range(1, 11))
    kit.patch(diff(old, old.replace(b"line 5\n", b"five\n")))
    (result,) = drift(kit, old.replace(b"line 5\n", b"x\n" * 100), old)
    assert len(result.faults[0].found) == 31
    assert result.faults[0].found[-1] == "(and 78 more lines)"


def test_what_is_not_needed_is_left_out_for_the_later_ones(kit: Kit) -> None:
    """The second patch is judged without the line that the first would add."""
    kit.patch(diff(A, b"added\n" + A), "0001-a.patch", drop='present = "seven\\neight"')
    kit.patch(diff(b"added\n" + A, b"added\n" + A.replace(b"five", b"FIVE")), "0002-b.patch")
    first, second = drift(kit, A + b"eight\n", A)
    assert (first.state, first.faults) == (State.UNNEEDED, ())
    assert second.describe().splitlines()[1] == "  pkg/a.py, hunk 1: line 5 -> 4"


def test_later_patches_find_their_lines_after_earlier_moves(kit: Kit) -> None:
    kit.patch(OURS, "0001-a.patch")
    after = b"".join([*map(str.encode, BLOCKS[:3])])[:-1] + b"ours()\n\n"
    after += "".join(BLOCKS[3:]).encode()
    second = b"--- a/pkg/a.py\n+++ b/pkg/a.py\n@@ -20,2 +20,3 @@\n endif()\n+again()\n \n"
    kit.patch(second, "0002-b.patch")
    results = drift(kit, b"#\n" + OLD)
    assert [r.state for r in results] == [State.ELSEWHERE, State.ELSEWHERE]
    assert results[1].faults[0].elsewhere == (("pkg/a.py", 21),)


def test_a_series_must_fit_its_own_release(kit: Kit) -> None:
    kit.patch(OURS)
    with pytest.raises(PatchError, match=r"0001-x\.patch does not apply to .*old, for which"):
        drift(kit, OLD, old=b"#\n" + OLD)
    kit.patch(b"--- /dev/null\n+++ b/pkg/new.py\n@@ -0,0 +1,1 @@\n+x\n", "0002-new.patch")
    (kit.dir.parent / "old/pkg/new.py").write_bytes(b"theirs\n")
    with pytest.raises(PatchError, match="0002-new"):
        drift(kit, OLD)


def test_a_new_file_is_new_there_as_well(kit: Kit) -> None:
    kit.patch(b"--- /dev/null\n+++ b/pkg/new.py\n@@ -0,0 +1,1 @@\n+x\n")
    assert [r.state for r in drift(kit, OLD)] == [State.APPLIES]
    kit.put("pkg/new.py", b"theirs\n")
    assert [r.state for r in drift(kit, OLD)] == [State.CONFLICTS]


@pytest.mark.parametrize(
    ("needs", "state"),
    [
        ('file = "pkg/a.py"\npresent = "run(a)"', State.APPLIES),
        ('file = "pkg/a.py"\npresent = "run(z)"', State.CONFLICTS),
        ('file = "pkg/gone.py"\npresent = "run(a)"', State.CONFLICTS),
        ('file = "pkg/a.py"\nexists = true', State.APPLIES),
        ('file = "pkg/a.py"\nabsent = "run(a)"', State.CONFLICTS),
    ],
)
def test_our_files_say_what_they_rely_on(kit: Kit, needs: str, state: State) -> None:
    kit.overlay("pkg/ours.py")
    kit.rows[-1] += f"[[overlay.needs]]\n{needs}\n"
    (result,) = drift(kit, OLD)
    assert result.state is state
    if state is State.CONFLICTS:
        assert "needed, and not so" in result.describe()
        with pytest.raises(PatchError, match="needed, and not so"):
            kit.apply()
        assert "pkg/ours.py" not in kit.files()


def test_a_renamed_file_that_holds_every_hunk_is_the_one(kit: Kit) -> None:
    """Another file has one of the hunks' lines as well."""
    old = b"".join(b"line %d\n" % number for number in range(1, 31))
    ours = old.replace(b"line 5\n", b"five\n").replace(b"line 20\n", b"twenty\n")
    kit.patch(diff(old, ours))
    kit.put("pkg/a_part.py", old[:80])
    kit.put("pkg/moved.py", b"#\n" + old)
    drift(kit, OLD, old)
    (kit.tree / "pkg/a.py").unlink()
    (result,) = kit.check()
    assert result.state is State.ELSEWHERE
    assert [fault.elsewhere for fault in result.faults] == [
        (("pkg/moved.py", 5),), (("pkg/moved.py", 20),),
    ]  # fmt: skip
    assert "hunk 1: line 4 -> pkg/moved.py:5" in result.describe()


class Counted:
    """A tree that counts how often it is read."""

    label = "counted"

    def __init__(self) -> None:
        self.loads: list[list[str]] = []
        self.walks = 0

    def load(self, paths: Iterable[str]) -> dict[str, bytes | None]:
        self.loads.append(list(paths))
        return {path: b"x" if path != "none" else None for path in self.loads[-1]}

    def walk(self, suffix: str) -> Iterator[tuple[str, bytes]]:
        self.walks += 1
        yield f"a{suffix}", b"x"


def test_a_kept_tree_is_read_once() -> None:
    tree = Counted()
    kept = KeptTree(tree, ["a", "none"])
    assert kept.load(["a", "none"]) == {"a": b"x", "none": None}
    assert kept.load(["a", "b"]) == {"a": b"x", "b": b"x"}
    assert tree.loads == [["a", "none"], ["b"]]
    assert [*kept.walk(".py"), *kept.walk(".py")] == [("a.py", b"x")] * 2
    assert tree.walks == 1
