"""Which patches a release has, and which of them apply to its sdist."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from packaging.version import Version

from sm75.errors import PatchError
from sm75.lockfile import PatchRef
from sm75.patching import Result, State, check
from sm75.series import Series, load_series
from sm75.words import counted

_GOOD = (State.APPLIES, State.APPLIED)


@dataclass(frozen=True, kw_only=True)
class Standing:
    """How the patches stand to a release.

    Attributes:
        release: The release.
        series: Whose series was looked at; the release's own, another's, or none (empty).
        refs: Pins of the release's own files; empty without a series of its own.
        results: Of every patch and overlay file looked at.
    """

    release: str
    series: str
    refs: tuple[PatchRef, ...]
    results: tuple[Result, ...]

    @property
    def own(self) -> bool:
        """Whether the release has a series of its own."""
        return self.series == self.release

    @property
    def bad(self) -> tuple[Result, ...]:
        """What does not apply."""
        return tuple(result for result in self.results if result.state not in _GOOD)

    @property
    def buildable(self) -> bool:
        """Whether it has a series of its own that applies as a whole."""
        return self.own and not self.bad

    def statement(self) -> str:
        """What a person has to know, in one or two sentences."""
        counts = Counter(str(result.state) for result in self.results)
        told = ", ".join(f"{state} {count}" for state, count in sorted(counts.items()))
        names = ", ".join(f"{result.name} ({result.state})" for result in self.bad)
        if self.own:
            whole = f"patches/{self.release}: {counted(len(self.results), 'file')}, "
            return whole + (f"not applying: {names}" if names else "all apply")
        text = f"there is no patches/{self.release}, so that this lock cannot be built from yet"
        if not self.series:
            return text
        return f"{text}. Of patches/{self.series}: {told}" + (f": {names}" if names else "")


def standing(root: Path, release: str, sdist: Path) -> Standing:
    """Hold a release's patches against its sdist; where it has none, those of the newest release.

    Args:
        root: The project's directory.
        release: The release.
        sdist: Its sdist.

    Raises:
        PatchError: The series is malformed, is another release's, or the sdist is unreadable.
    """
    own = root / "patches" / release
    if (own / "series.toml").is_file():
        series = load_series(own)
        if series.release != release:
            raise PatchError(
                f"{own}/series.toml is of release {series.release}",
                fix=f"make patches for {release}, or correct its 'release'",
            )
        results = tuple(check(series, sdist))
        return Standing(release=release, series=release, refs=refs(series), results=results)
    others = [path.parent for path in (root / "patches").glob("*/series.toml")]
    if not others:
        return Standing(release=release, series="", refs=(), results=())
    other = load_series(max(others, key=lambda path: Version(path.name)))
    return Standing(
        release=release, series=other.release, refs=(), results=tuple(check(other, sdist))
    )


def refs(series: Series) -> tuple[PatchRef, ...]:
    """The pins of a series as a release lock has them."""
    return tuple(
        sorted(
            [PatchRef(file=p.file, sha256=p.sha256) for p in series.patches]
            + [PatchRef(file=f"overlay/{o.file}", sha256=o.sha256) for o in series.overlays],
            key=lambda ref: ref.file,
        )
    )
