"""An opened wheel: members checked before anything else looks at them, hashes from its RECORD."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import re
import stat
import zipfile
from email.message import Message
from email.parser import HeaderParser
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from packaging.utils import InvalidWheelFilename, parse_wheel_filename

from sm75.budget import Budget
from sm75.condapkg import FileSource, check_path
from sm75.errors import ChannelError, FetchError

_LICENCE_NAME = re.compile(r"(LICEN[CS]E|COPYING|NOTICE|AUTHORS)", re.IGNORECASE)


class Wheel:
    """An opened wheel whose member names have been checked.

    Args:
        path: A ``.whl`` file.

    Raises:
        FetchError: Not a wheel, damaged, or with members that could escape the prefix (absolute
            paths, ``..``, links, duplicates).
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.project, self.version, _, self.tags = parse_wheel_filename(path.name)
            self._zip = zipfile.ZipFile(path)
        except FileNotFoundError as err:
            raise FetchError(f"the wheel {path} does not exist") from err
        except (InvalidWheelFilename, zipfile.BadZipFile) as err:
            raise FetchError(
                f"{path.name} is not a wheel", why=str(err), fix="fetch it again"
            ) from err
        try:
            self.members = self._checked_members()
            self.dist_info = self._find_dist_info()
            self.metadata: Message = HeaderParser().parsestr(self.text("METADATA"))
            self._recorded = self._read_record()
        except BaseException:
            self._zip.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._zip.close()

    def _checked_members(self) -> dict[str, zipfile.ZipInfo]:
        members: dict[str, zipfile.ZipInfo] = {}
        budget = Budget(self.path.name, self.path.stat().st_size)
        for info in self._zip.infolist():
            try:
                budget.take(info.file_size)
            except ChannelError as err:
                raise FetchError(err.what, why=err.why, fix=err.fix) from err
            name = info.filename
            kind = stat.S_IFMT(info.external_attr >> 16)
            why = ""
            if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
                why = "it is a link or a special file"
            elif "\\" in name or re.match(r"[A-Za-z]:", name):
                why = "it is a Windows path"
            elif name in members:
                why = "it is there twice"
            else:
                try:
                    # a placeholder directory: "info/x" is an ordinary name in a wheel
                    check_path(f"site/{name.rstrip('/')}")
                except ChannelError as err:
                    why = err.why
            if why:
                raise FetchError(f"{self.path.name}: refusing the member {name!r}", why=why)
            if not info.is_dir():
                members[name] = info
        return members

    def _find_dist_info(self) -> str:
        found = [n for n in self.members if re.fullmatch(r"[^/]+\.dist-info/METADATA", n)]
        if len(found) != 1:
            raise FetchError(
                f"{self.path.name} is not a wheel",
                why=f"it has {len(found)} *.dist-info/METADATA members instead of one",
            )
        return found[0].partition("/")[0]

    def text(self, name: str) -> str:
        """Read a text member of the ``.dist-info``; empty when there is none."""
        member = f"{self.dist_info}/{name}"
        if member not in self.members:
            return ""
        with self.open(member) as raw:
            return raw.read().decode("utf-8", "replace")

    def open(self, member: str) -> IO[bytes]:
        """Open a member for reading."""
        try:
            return self._zip.open(member)
        except (zipfile.BadZipFile, NotImplementedError, RuntimeError) as err:
            raise FetchError(f"{self.path.name}: cannot read {member}", why=str(err)) from err

    def _read_record(self) -> dict[str, str]:
        """Read the sha256 (hex) of each member RECORD lists with one."""
        recorded = {}
        for row in csv.reader(io.StringIO(self.text("RECORD"))):
            if len(row) >= 2 and row[1].startswith("sha256="):
                digest = row[1].removeprefix("sha256=")
                recorded[row[0]] = base64.urlsafe_b64decode(digest + "=" * (-len(digest) % 4)).hex()
        return recorded

    def sha256_of(self, member: str) -> str:
        """Give a member's expected hash (hex): RECORD's, or computed where RECORD has none."""
        if member not in self._recorded:
            with self.open(member) as raw:
                self._recorded[member] = hashlib.file_digest(
                    raw,  # type: ignore[arg-type]  # ZipExtFile has readinto
                    "sha256",
                ).hexdigest()
        return self._recorded[member]

    def source(self, member: str, *, executable: bool | None = None) -> FileSource:
        """Describe a member as a payload file; its hash is checked when it is written."""
        info = self.members[member]
        if executable is None:
            executable = bool((info.external_attr >> 16) & 0o111)
        return FileSource(
            opener=lambda: self.open(member),
            size=info.file_size,
            executable=executable,
            sha256=self.sha256_of(member),
        )

    @property
    def sha256(self) -> str:
        """Hash (hex) of the wheel file."""
        with self.path.open("rb") as raw:
            return hashlib.file_digest(raw, "sha256").hexdigest()

    @property
    def pure(self) -> bool:
        """Whether every tag is for any platform and needs no ABI."""
        return all(t.abi == "none" and t.platform == "any" for t in self.tags)

    @property
    def any_python(self) -> bool:
        """Whether one installation fits every Python minor: no ABI, or the stable one."""
        return all(
            t.abi == "abi3" or (t.abi == "none" and t.interpreter.startswith("py"))
            for t in self.tags
        )

    def licence_files(self) -> dict[str, FileSource]:
        """Find licence texts in the ``.dist-info``, by path relative to ``info/licenses``."""
        declared = set(self.metadata.get_all("License-File") or [])
        out = {}
        for member in self.members:
            rel = member.removeprefix(f"{self.dist_info}/")
            if rel == member:
                continue
            inner = rel.removeprefix("licenses/")
            if inner != rel or rel in declared or _LICENCE_NAME.match(rel):
                out[inner] = self.source(member, executable=False)
        return out
