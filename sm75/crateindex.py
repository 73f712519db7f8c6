"""Where crates.io's archives are: as cargo itself is set up, a mirror included.

``[source.crates-io] replace-with`` of cargo's ``config.toml`` is followed as cargo follows it
(https://doc.rust-lang.org/cargo/reference/source-replacement.html): to a sparse registry, which
says in its ``config.json`` where archives are, or to a directory of archives (``local-registry``).
A registry that is a git repository, or that asks for a login, is refused by name.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from sm75.cargolock import Crate
from sm75.errors import FetchError
from sm75.transfer import FileLink, Transfer, redact

# Cargo's default since 1.70 (https://doc.rust-lang.org/cargo/reference/registries.html).
DEFAULT = "sparse+https://index.crates.io/"
# A chain of replacements longer than this runs in a circle.
_CHAIN = 8
_FIX = "correct [source] in cargo's config.toml (CARGO_HOME, ~/.cargo)"


@dataclass(frozen=True, kw_only=True)
class CrateIndex:
    """A place that has the archives of crates.io.

    Attributes:
        registry: A sparse registry's URL, with ``/`` at its end; empty with ``directory``.
        directory: A directory of archives; None with ``registry``.
    """

    registry: str = ""
    directory: Path | None = None

    def __str__(self) -> str:
        return str(self.directory) if self.directory else redact(self.registry)

    @classmethod
    def discover(cls, env: Mapping[str, str] = os.environ) -> CrateIndex:
        """As cargo's ``config.toml`` in its home says.

        Args:
            env: The environment; ``CARGO_HOME`` and ``HOME`` are read.

        Raises:
            FetchError: The file cannot be read, or says something that is not supported.
        """
        home = Path(env.get("CARGO_HOME") or Path(env.get("HOME") or Path.home()) / ".cargo")
        sources, where = _sources(home)
        table: Mapping[str, Any] = sources.get("crates-io", {})
        for _ in range(_CHAIN):
            name = table.get("replace-with")
            if name is None:
                break
            if name not in sources:
                raise FetchError(
                    f"{where} replaces crates.io by '{name}', which it does not define", fix=_FIX
                )
            table = sources[name]
        else:
            raise FetchError(f"{where} replaces crates.io in a circle", fix=_FIX)
        if "local-registry" in table:
            # relative to the directory that holds .cargo, as in cargo
            return cls(directory=(home.parent / str(table["local-registry"])).absolute())
        registry = str(table.get("registry", DEFAULT))
        if not registry.startswith("sparse+"):
            raise FetchError(
                f"crates cannot be fetched from {redact(registry)}",
                why=f"{where} replaces crates.io by it; only sparse registries and local-registry "
                "are supported",
                fix=_FIX,
            )
        return cls(registry=registry.removeprefix("sparse+").rstrip("/") + "/")

    async def template(self, transfer: Transfer) -> str:
        """Where the registry has archives: its ``dl``; empty for a directory.

        Args:
            transfer: The client.

        Raises:
            FetchError: The registry cannot be read.
        """
        if self.directory is not None:
            return ""
        url = f"{self.registry}config.json"
        if urlsplit(self.registry).scheme == "file":
            raise FetchError(f"{self.registry} is no sparse registry", fix=_FIX)
        _, _, body = await transfer.page(url, "application/json")
        try:
            settings = json.loads(body)
            template = settings["dl"]
            login = settings.get("auth-required", False)
            if not isinstance(template, str):
                raise TypeError("'dl' is no text")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise FetchError(
                f"{redact(url)} does not say where crates are", why=str(error), fix=_FIX
            ) from error
        if login:
            raise FetchError(f"{redact(self.registry)} asks for a login: not supported", fix=_FIX)
        return template

    def link(self, crate: Crate, template: str) -> FileLink:
        """Where a crate's archive is.

        Args:
            crate: The crate.
            template: What ``template`` returned.
        """
        if self.directory is not None:
            url = (self.directory / crate.filename).as_uri()
        else:
            url = _expand(template, crate)
        return FileLink(filename=crate.filename, url=url, sha256=crate.checksum)


def _expand(template: str, crate: Crate) -> str:
    """Cargo's markers; without any, the path that crates.io's own API has."""
    marks = {
        "{crate}": crate.name,
        "{version}": crate.version,
        "{prefix}": _prefix(crate.name),
        "{lowerprefix}": _prefix(crate.name.lower()),
        "{sha256-checksum}": crate.checksum,
    }
    if not any(mark in template for mark in marks):
        template = template.rstrip("/") + "/{crate}/{version}/download"
    for mark, value in marks.items():
        template = template.replace(mark, value)
    return template


def _prefix(name: str) -> str:
    """The directory of a crate in an index, by its first letters."""
    if len(name) < 4:
        return str(len(name)) if len(name) < 3 else f"3/{name[0]}"
    return f"{name[:2]}/{name[2:4]}"


def _sources(home: Path) -> tuple[dict[str, dict[str, Any]], str]:
    # The older name counts first where both are there, as cargo has it.
    for path in (home / "config", home / "config.toml"):
        try:
            raw = tomllib.loads(path.read_text(encoding="utf-8"))
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
            continue
        except (OSError, ValueError) as error:
            raise FetchError(f"cannot read {path}", why=str(error), fix="correct it") from error
        found = raw.get("source", {})
        if not isinstance(found, dict) or not all(isinstance(t, dict) for t in found.values()):
            raise FetchError(f"{path} has no tables below [source]", fix="correct it")
        return found, str(path)
    return {}, "cargo's config.toml"
