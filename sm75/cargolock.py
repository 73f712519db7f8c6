"""Cargo.lock: which crates a Rust program is made of, and where each comes from.

The format is cargo's, versions 3 and 4 (https://doc.rust-lang.org/cargo/guide/cargo-toml-vs-cargo-lock.html).
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import parse_qsl, urlsplit

from sm75.treefiles import refusal

FILE = "rust/Cargo.lock"
# crates.io, as a lock names it, whatever mirror a user has set up.
CRATES_IO = "registry+https://github.com/rust-lang/crates.io-index"

# Both become part of a path. Cargo's own rules are narrower (Unicode is refused by crates.io).
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}\Z")
_VERSION = re.compile(r"\d+\.\d+\.\d+[A-Za-z0-9.+-]{0,100}\Z")
_CHECKSUM = re.compile(r"[0-9a-f]{64}\Z")
_REVISION = re.compile(r"[0-9a-f]{40}\Z")
_REFERENCES = ("rev", "tag", "branch")


@dataclass(frozen=True, kw_only=True)
class Git:
    """A git dependency's place.

    Attributes:
        url: The repository.
        reference: How Cargo.toml asks for it: kind (``rev``, ``tag``, ``branch``) and value; None:
            the default branch.
        revision: The commit, 40 hex digits.
    """

    url: str
    reference: tuple[str, str] | None
    revision: str

    @property
    def key(self) -> str:
        """``repository@revision`` by the repository's last name, as the release lock has it."""
        name = urlsplit(self.url).path.rstrip("/").rsplit("/", 1)[-1]
        return f"{name.removesuffix('.git')}@{self.revision}"


@dataclass(frozen=True, kw_only=True)
class Crate:
    """One package of the lock that is not part of the tree itself.

    Attributes:
        name: Its name.
        version: Its version.
        registry: The registry as the lock names it; empty for a git dependency.
        checksum: sha256 (hex) of its archive; empty where the lock states none.
        git: Where it comes from; None: from the registry.
    """

    name: str
    version: str
    registry: str = ""
    checksum: str = ""
    git: Git | None = None

    @property
    def directory(self) -> str:
        """Name of its directory in ``vendor``, as of ``cargo vendor --versioned-dirs``."""
        return f"{self.name}-{self.version}"

    @property
    def filename(self) -> str:
        """Name of its archive."""
        return f"{self.directory}.crate"


def parse(text: str) -> tuple[Crate, ...]:
    """Read a Cargo.lock.

    Args:
        text: Its text.

    Returns:
        The crates from registries and repositories, in the lock's order.

    Raises:
        LockError: It is malformed, of another version, or names a place of an unknown form.
    """
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise refusal(FILE, "TOML", str(error)) from error
    packages = raw.get("package")
    if raw.get("version") not in (3, 4) or not isinstance(packages, list) or not packages:
        raise refusal(FILE, "version = 3 or 4 with [[package]]", f"version {raw.get('version')!r}")
    crates = tuple(_crate(package) for package in packages if package.get("source"))
    places = [crate.directory for crate in crates]
    if twice := sorted({place for place in places if places.count(place) > 1}):
        raise refusal(FILE, "each crate once", f"from two places: {', '.join(twice)}")
    return crates


def git_places(crates: Iterable[Crate]) -> list[Git]:
    """The repositories of the git dependencies, each once, sorted by key."""
    found = {crate.git.key: crate.git for crate in crates if crate.git}
    return [found[key] for key in sorted(found)]


def _crate(package: dict[str, object]) -> Crate:
    name, version, source = (str(package.get(key, "")) for key in ("name", "version", "source"))
    checksum = str(package.get("checksum", ""))
    if not _NAME.match(name) or not _VERSION.match(version):
        raise refusal(FILE, "a crate's name and version", f"it is {name!r} {version!r}")
    if checksum and not _CHECKSUM.match(checksum):
        raise refusal(FILE, f"checksum of {name} as a sha256", f"it is {checksum!r}")
    if source.startswith(("registry+", "sparse+")):
        return Crate(name=name, version=version, registry=source, checksum=checksum)
    return Crate(name=name, version=version, git=_git(source))


def _git(source: str) -> Git:
    try:
        url = urlsplit(source.removeprefix("git+"))
        asked = parse_qsl(url.query, strict_parsing=bool(url.query))
    except ValueError as error:
        raise refusal(FILE, 'source = "git+https://…#REVISION"', f"{source!r}: {error}") from error
    known = len(asked) <= 1 and all(kind in _REFERENCES for kind, _ in asked)
    if (
        not source.startswith("git+")
        or url.scheme != "https"
        or not known
        or not _REVISION.match(url.fragment)
    ):
        raise refusal(FILE, 'source = "git+https://…#REVISION"', f"it is {source!r}")
    return Git(
        url=url._replace(query="", fragment="").geturl(),
        reference=(asked[0][0], asked[0][1]) if asked else None,
        revision=url.fragment,
    )
