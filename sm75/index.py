"""The package index the user has configured, asked for one file at a time.

Speaks the simple API: JSON (PEP 691) where offered, else HTML (PEP 503). Where the index is
comes from the user's own pip or uv settings; a lock never says.
"""

from __future__ import annotations

import asyncio
import configparser
import difflib
import json
import os
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag, urljoin, urlsplit, urlunsplit

import platformdirs
from packaging.utils import canonicalize_name

from sm75.errors import FetchError
from sm75.transfer import FileLink, HttpStatusError, Transfer, TransferOptions, redact
from sm75.words import counted

DEFAULT_INDEX = "https://pypi.org/simple/"
"""Index used when the user has configured none: the default of pip and uv."""

_ACCEPT = (
    "application/vnd.pypi.simple.v1+json, "
    "application/vnd.pypi.simple.v1+html;q=0.2, text/html;q=0.1"
)
_JSON = "application/vnd.pypi.simple.v1+json"


@dataclass(frozen=True, kw_only=True)
class IndexConfig:
    """Where files may be.

    Attributes:
        indexes: Base URLs of simple indexes, in the order in which they are asked.
        find_links: Local directories of files, asked first: they cost nothing.
    """

    indexes: tuple[str, ...]
    find_links: tuple[Path, ...] = ()

    @classmethod
    def discover(
        cls, environ: Mapping[str, str] | None = None, home: Path | None = None
    ) -> IndexConfig:
        """Read the user's settings.

        The main index is the first of PIP_INDEX_URL, UV_DEFAULT_INDEX, UV_INDEX_URL, pip's
        configuration files, uv's ``uv.toml``, and the public index. Further indexes and
        ``find-links`` directories are taken from all of them.

        Args:
            environ: Environment; default: this process's.
            home: Home directory; default: the user's. Given one, only files below it and
                those that ``environ`` names are read.

        Raises:
            FetchError: A configuration file is malformed.
        """
        env = os.environ if environ is None else environ
        pip = _pip_settings(env, home)
        uv_main, uv_more, uv_links = _uv_settings(env, home)
        more = [
            *_words(env.get("PIP_EXTRA_INDEX_URL", pip.get("extra-index-url", ""))),
            *(
                word.partition("=")[2] if _named(word) else word
                for word in _words(env.get("UV_INDEX", ""))
            ),
            *_words(env.get("UV_EXTRA_INDEX_URL", "")),
            *uv_more,
        ]
        links = [
            *_words(env.get("PIP_FIND_LINKS", pip.get("find-links", ""))),
            *env.get("UV_FIND_LINKS", "").replace(",", " ").split(),
            *uv_links,
        ]
        main = (
            env.get("PIP_INDEX_URL")
            or env.get("UV_DEFAULT_INDEX", "").rpartition("=")[2]
            or env.get("UV_INDEX_URL")
            or pip.get("index-url")
            or uv_main
            or DEFAULT_INDEX
        )
        no_index = env.get("PIP_NO_INDEX", pip.get("no-index", "")).lower()
        indexes = [] if no_index in {"1", "true", "yes", "on"} else [main, *more]
        folders = [_folder(link) for link in links]
        return cls(
            indexes=tuple(
                dict.fromkeys(url if url.endswith("/") else f"{url}/" for url in indexes)
            ),
            find_links=tuple(dict.fromkeys(f for f in folders if f is not None and f.is_dir())),
        )


class PackageIndex:
    """Finds files on the configured indexes; remembers each project's page.

    Args:
        config: Where to look; None: as the user has configured.
        options: How patient to be.
    """

    def __init__(
        self, config: IndexConfig | None = None, options: TransferOptions | None = None
    ) -> None:
        self.config = config or IndexConfig.discover()
        self._options = options
        self._pages: dict[tuple[str, str], tuple[FileLink, ...]] = {}

    def find(self, project: str, filename: str, sha256: str | None = None) -> FileLink:
        """Find one file.

        Args:
            project: Its project.
            filename: Its exact name.
            sha256: What it must hash to, when known; an index that states another hash for
                that name is passed over.

        Raises:
            FetchError: No index has it, or only with another hash.
        """

        async def ask() -> FileLink:
            async with Transfer(self._options) as transfer:
                return (await self.links(transfer, project, filename, sha256))[0]

        return asyncio.run(ask())

    def files(self, project: str) -> list[FileLink]:
        """Every file of a project, on every index.

        Raises:
            FetchError: An index cannot be read.
        """

        async def ask() -> list[FileLink]:
            async with Transfer(self._options) as transfer:
                found = [*self._local(project)]
                for index in self.config.indexes:
                    found += await self._page(transfer, index, project)
                return found

        return asyncio.run(ask())

    async def links(
        self, transfer: Transfer, project: str, filename: str, sha256: str | None = None
    ) -> list[FileLink]:
        """All places that have the file, best first; see ``find``."""
        found: list[FileLink] = []
        others: list[FileLink] = []
        faults: list[str] = []
        names: set[str] = set()
        candidates = [*self._local(project)]
        for index in self.config.indexes:
            try:
                candidates += await self._page(transfer, index, project)
            except FetchError as error:
                faults.append(f"{error.what} ({error.why})" if error.why else error.what)
        for link in candidates:
            names.add(link.filename)
            if link.filename == filename:
                agrees = sha256 is None or link.sha256 in (None, sha256)
                (found if agrees else others).append(link)
        if found:
            return found
        if others:
            raise FetchError(
                f"{filename} is offered with another hash than the lock pins",
                why=f"expected sha256 {sha256}, got {others[0].sha256} "
                f"from {redact(others[0].url)}",
                fix="the lock is wrong or the index was tampered with: compare the lock with "
                "its history before anything else",
            )
        where = ", ".join(redact(index) for index in self.config.indexes) or "find-links only"
        if faults:
            why = "; ".join(faults)
        elif near := difflib.get_close_matches(filename, names, n=2):
            why = f"asked {where}; it has " + ", ".join(near)
        else:
            why = f"asked {where}; it has {counted(len(names), 'file')} of {project}, not this one"
        raise FetchError(
            f"{filename} is not on the package index",
            why=why,
            fix="check the index settings of pip or uv (PIP_INDEX_URL, UV_DEFAULT_INDEX, pip.conf)",
        )

    async def _page(self, transfer: Transfer, index: str, project: str) -> tuple[FileLink, ...]:
        key = (index, canonicalize_name(project))
        if key not in self._pages:
            self._pages[key] = await _read_page(transfer, index, key[1])
        return self._pages[key]

    def _local(self, project: str) -> list[FileLink]:
        prefix = canonicalize_name(project)
        found = []
        for folder in self.config.find_links:
            for path in sorted(folder.iterdir()):
                if canonicalize_name(path.name).startswith(prefix) and path.is_file():
                    size = path.stat().st_size
                    found.append(
                        FileLink(filename=path.name, url=path.absolute().as_uri(), size=size)
                    )
        return found


def parse_page(url: str, kind: str, body: bytes) -> tuple[FileLink, ...]:
    """The files that a project's page lists.

    Args:
        url: The page's URL; links are relative to it.
        kind: Its content type.
        body: Its bytes.

    Raises:
        FetchError: The page is not a simple-API page.
    """
    try:
        if kind.split(";")[0].strip().lower() == _JSON:
            return tuple(_from_json(url, json.loads(body)))
        return tuple(_from_html(url, body.decode("utf-8", "replace")))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise FetchError(
            f"{redact(url)} is not a page of a package index",
            why=f"{type(error).__name__}: {error}",
            fix="check the index settings of pip or uv",
        ) from error


async def _read_page(transfer: Transfer, index: str, project: str) -> tuple[FileLink, ...]:
    url = f"{index}{project}/"
    parts = urlsplit(url)
    if parts.scheme == "file":
        page = Path(unquote(parts.path)) / "index.html"
        try:
            return parse_page(url, "text/html", page.read_bytes())
        except FileNotFoundError:
            return ()
        except OSError as error:
            raise FetchError(f"cannot read {page}", why=str(error)) from error
    try:
        final, kind, body = await transfer.page(url, _ACCEPT)
    except HttpStatusError as error:
        if error.status in (404, 410):
            return ()
        raise
    return parse_page(_with_login(final, url), kind, body)


def _from_json(url: str, page: dict[str, object]) -> list[FileLink]:
    files = page["files"]
    if not isinstance(files, list):
        raise TypeError("'files' is no list")
    links = [
        FileLink(
            filename=entry["filename"],
            url=_with_login(urljoin(url, entry["url"]), url),
            sha256=entry.get("hashes", {}).get("sha256"),
            size=entry.get("size"),
        )
        for entry in files
    ]
    for link in links:
        if not (
            isinstance(link.filename, str)
            and isinstance(link.sha256, str | None)
            and isinstance(link.size, int | None)
        ):
            raise TypeError(f"its entry of {link.filename!r} is malformed")
    return [link for link in links if _may_name(url, link.url)]


def _from_html(url: str, text: str) -> list[FileLink]:
    parser = _Anchors()
    parser.feed(text)
    base = urljoin(url, parser.base)
    found = []
    for href in parser.hrefs:
        target, fragment = urldefrag(urljoin(base, href))
        name = unquote(urlsplit(target).path.rpartition("/")[2])
        digest = fragment.removeprefix("sha256=") if fragment.startswith("sha256=") else None
        if name and _may_name(url, target):
            found.append(FileLink(filename=name, url=_with_login(target, url), sha256=digest))
    return found


def _may_name(page: str, target: str) -> bool:
    """Whether a page may send us there: one from the network names no file of this machine."""
    return urlsplit(target).scheme in ("http", "https") or urlsplit(page).scheme == "file"


class _Anchors(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.hrefs: list[str] = []
        self.base = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        href = dict(attrs).get("href")
        if tag == "a" and href:
            self.hrefs.append(href)
        elif tag == "base" and href and not self.base:
            self.base = href


def _with_login(url: str, page: str) -> str:
    """The URL with the page's user name and password, when both are on the same server."""
    target, source = urlsplit(url), urlsplit(page)
    login, at, server = source.netloc.rpartition("@")
    if not at or "@" in target.netloc:
        return url
    if (target.scheme, target.netloc) != (source.scheme, server):
        return url
    return urlunsplit(target._replace(netloc=f"{login}@{server}"))


def _words(value: str) -> list[str]:
    return shlex.split(value, comments=True)


def _named(word: str) -> bool:
    """Whether a word is uv's ``name=url``."""
    name, equals, _ = word.partition("=")
    return bool(equals) and "/" not in name


def _folder(link: str) -> Path | None:
    parts = urlsplit(link)
    if parts.scheme == "file":
        return Path(unquote(parts.path))
    return None if parts.scheme in ("http", "https") else Path(link).expanduser()


def _pip_settings(env: Mapping[str, str], home: Path | None) -> dict[str, str]:
    """pip's settings, later files winning: its documented order of configuration files."""
    named = env.get("PIP_CONFIG_FILE", "")
    files: list[Path] = []
    if named != os.devnull:
        if home is None:
            files += [
                *map(_pip_conf, platformdirs.site_config_path("pip", multipath=False).parents[:1])
            ]
            files.append(Path("/etc/pip.conf"))
            files += [
                Path.home() / ".pip" / "pip.conf",
                platformdirs.user_config_path("pip", appauthor=False, roaming=True) / "pip.conf",
            ]
        else:
            files += [home / ".pip" / "pip.conf", home / ".config" / "pip" / "pip.conf"]
        if env.get("VIRTUAL_ENV"):
            files.append(Path(env["VIRTUAL_ENV"]) / "pip.conf")
        if named:
            files.append(Path(named))
    parser = configparser.RawConfigParser()
    try:
        parser.read(files, encoding="utf-8")
    except (configparser.Error, UnicodeDecodeError) as error:
        raise FetchError("pip's configuration cannot be read", why=str(error)) from error
    settings: dict[str, str] = {}
    for section in ("global", "download", "install"):
        if parser.has_section(section):
            settings.update(parser.items(section))
    return settings


def _pip_conf(parent: Path) -> Path:
    return parent / "pip" / "pip.conf"


def _uv_settings(env: Mapping[str, str], home: Path | None) -> tuple[str, list[str], list[str]]:
    """uv's main index, further indexes and find-links, from its ``uv.toml``."""
    if env.get("UV_CONFIG_FILE"):
        files = [Path(env["UV_CONFIG_FILE"])]
    elif home is None:
        files = [
            platformdirs.user_config_path("uv", appauthor=False, roaming=True) / "uv.toml",
            Path("/etc/uv/uv.toml"),
        ]
    else:
        files = [home / ".config" / "uv" / "uv.toml"]
    main = ""
    more: list[str] = []
    links: list[str] = []
    for path in files:
        try:
            raw = tomllib.loads(path.read_text(encoding="utf-8"))
        except (FileNotFoundError, PermissionError):
            continue
        except (OSError, ValueError) as error:
            raise FetchError(f"cannot read {path}", why=str(error)) from error
        pip = raw.get("pip", {})
        for table in (raw, pip):
            main = main or str(table.get("index-url", ""))
            more += _strings(table.get("extra-index-url"))
            links += _strings(table.get("find-links"))
        for entry in raw.get("index", []):
            if entry.get("default"):
                main = main or str(entry["url"])
            elif not entry.get("explicit"):
                more.append(str(entry["url"]))
    return main, more, links


def _strings(value: object) -> list[str]:
    if isinstance(value, str):
        return [value]
    return [str(item) for item in value] if isinstance(value, Sequence) else []
