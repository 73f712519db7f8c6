"""An OCI registry as a place to publish a channel to."""

from __future__ import annotations

import hashlib
import ipaddress
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import msgspec

from sm75 import ociclient, ocilayout
from sm75.channelcheck import REPODATA, SUMS
from sm75.errors import FetchError, UsageError
from sm75.ocilayout import INDEX_TYPE, Place

_MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
_TITLE = "org.opencontainers.image.title"  # the name that `oras pull` gives the file
_CHUNK = 1 << 20
# Repositories that are looked at at once; registries limit how many requests they take.
_AT_ONCE = 8

# Bytes of a file that is read whole: the index of conda-forge's largest platform has 250 MB.
_READ_MAX = 512 << 20
_MEND = (
    "the registry's storage is damaged: its operator must mend it, for a registry takes no second "
    "copy of what it believes to have"
)

T = TypeVar("T")


class _Layer(msgspec.Struct, frozen=True):
    mediaType: str
    digest: str
    size: int


class _Manifest(msgspec.Struct, frozen=True):
    layers: tuple[_Layer, ...] = ()


class _Index(msgspec.Struct, frozen=True):
    conda: dict[str, Any] = msgspec.field(name="packages.conda", default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class _Entry:
    """A tag: the manifest's own digest, and the layer that is the file, if it has one."""

    manifest: str
    layers: tuple[_Layer, ...]
    file: _Layer | None


class Registry:
    """An OCI registry, through oras.

    http is used for a port of this machine, as Docker does; https for all else.

    Args:
        root: The project's directory.
        url: ``oci://HOST[:PORT]/NAMESPACE``.

    Raises:
        UsageError: It is no such URL.
        ToolchainError: oras cannot be had.
    """

    def __init__(self, root: Path, url: str) -> None:
        parts = urlsplit(url)
        self._url, self._root = url, root
        self._namespace = parts.path.strip("/")
        if not ocilayout.is_repository(self._namespace) or parts.query or parts.fragment:
            raise UsageError(
                f"cannot publish to {url}",
                why="registries want a namespace of lower-case words, separated by /",
                fix="oci://HOST/OWNER/NAME",
            )
        try:
            port = parts.port
        except ValueError as error:
            raise UsageError(f"cannot publish to {url}", why=str(error)) from error
        host = parts.netloc
        # oras takes a first word for a host only if it has a dot or a port.
        self._host = host if "." in host or ":" in host else f"{host}:443"
        self._insecure = _is_here(parts.hostname or "") and port not in (None, 443)
        self._clients: dict[str, Any] = {}
        self._entries: dict[str, _Entry] = {}
        self._client(ocilayout.DOCUMENTS)

    def __str__(self) -> str:
        return self._url

    def _client(self, repository: str) -> Any:
        """A client of its own: tokens are for one repository."""
        if repository not in self._clients:
            self._clients[repository] = ociclient.make(
                self._root, self._host, insecure=self._insecure,
                like=self._clients.get(ocilayout.DOCUMENTS),
            )  # fmt: skip
        return self._clients[repository]

    def _container(self, place: Place) -> Any:
        name = f"{self._host}/{self._namespace}/{place.repository}:{place.tag}"
        return self._client(place.repository).get_container(name)

    def _persist(self, what: str, do: Callable[[], T]) -> T:
        return ociclient.persist(what, self._host, do)

    def sizes(self, names: Iterable[str]) -> dict[str, int]:
        """What is known to be there: a registry lists no namespace, so ask for what may be.

        These are the tags of every repository that ``names``, the indexes there and the
        ``SHA256SUMS`` there speak of. A file whose tag holds something else has size -1.
        """
        names = set(names)
        wanted = {ocilayout.place(name).repository for name in (*names, SUMS)}
        lines = self.read(SUMS).decode("utf-8", "replace").splitlines()
        listed = {name for name, _ in ocilayout.sound(line.partition("  ")[2] for line in lines)}
        subdirs = {name.partition("/")[0] for name in (*names, *listed, "noarch/") if "/" in name}
        for index in [f"{subdir}/{REPODATA}" for subdir in sorted(subdirs)]:
            wanted.add(index)
            listed |= {f"{index.partition('/')[0]}/{name}" for name in self._indexed(index)}
        packages = (name for name in listed if name.endswith(".conda"))
        wanted |= {place.repository for _, place in ocilayout.sound(packages)}
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            for found in pool.map(self._look, sorted(wanted)):
                self._entries |= found
        return {
            name: entry.file.size if entry.file else -1
            for name, entry in self._entries.items()
            if _is_ours(name, entry) or (name in names and not name.endswith(f"/{REPODATA}"))
        }

    def _indexed(self, name: str) -> Iterable[str]:
        try:
            return msgspec.json.decode(self.read(name) or b"{}", type=_Index).conda
        except msgspec.MsgspecError:  # somebody else's; ours will take its place
            return ()

    def _look(self, repository: str) -> dict[str, _Entry]:
        client = self._client(repository)
        container = self._container(Place(repository=repository, tag=ocilayout.LATEST, kind=""))
        try:
            tags = self._persist(f"listing {repository}", lambda: _tags(client, container))
        except FetchError as error:
            if _is_missing(error):
                return {}
            raise
        found = {}
        files = (ocilayout.file_of(repository, tag) for tag in tags)
        for name, place in ocilayout.sound(files):
            if place.repository == repository and (entry := self._entry(name)):
                found[name] = entry
        return found

    def _entry(self, name: str) -> _Entry | None:
        place = ocilayout.place(name)
        client, container = self._client(place.repository), self._container(place)

        def ask() -> _Entry | None:
            response = client.do_request(
                f"{client.prefix}://{container.manifest_url()}", "GET",
                headers={"Accept": _MANIFEST_TYPE},
            )  # fmt: skip
            if response.status_code == 404:
                return None
            try:
                layers = msgspec.json.decode(response.content, type=_Manifest).layers
            except msgspec.MsgspecError:
                layers = ()
            file = next((layer for layer in layers if layer.mediaType == place.kind), None)
            digest = f"sha256:{hashlib.sha256(response.content).hexdigest()}"
            return _Entry(manifest=digest, layers=layers, file=file)

        return self._persist(f"looking for {name}", ask)

    def digest(self, name: str) -> str:
        """sha256 (hex) that the registry has checked when the file came; empty: unknown."""
        entry = self._entries.get(name)
        return entry.file.digest.removeprefix("sha256:") if entry and entry.file else ""

    def _take(self, name: str, use: Callable[[Iterator[bytes]], T]) -> T | None:
        """Read a file in full and compare it with its digest."""
        entry = self._entries.get(name) or self._entry(name)
        if entry is None or entry.file is None:
            return None
        place, layer = ocilayout.place(name), entry.file
        client, container = self._client(place.repository), self._container(place)

        def read() -> tuple[T, str]:
            found = hashlib.sha256()

            def chunks() -> Iterator[bytes]:
                left = layer.size
                with client.get_blob(container, layer.digest, stream=True) as response:
                    client._check_200_response(response)
                    for chunk in response.iter_content(_CHUNK):
                        if (left := left - len(chunk)) < 0:
                            raise FetchError(
                                f"{self._host} serves more bytes for {name} than it says",
                                why=f"its manifest says {layer.size}",
                                fix=_MEND,
                            )
                        found.update(chunk)
                        yield chunk

            return use(chunks()), f"sha256:{found.hexdigest()}"

        try:
            result, digest = self._persist(f"reading {name}", read)
        except FetchError as error:
            if _is_missing(error):
                return None
            raise
        if digest != layer.digest:
            raise FetchError(
                f"{self._host} serves other bytes for {name} than it was given",
                why=f"expected {layer.digest}, got {digest}",
                fix=_MEND,
            )
        return result

    def sha256(self, name: str) -> str:
        """sha256 (hex) of a file, read in full; empty: there is none."""

        def use(chunks: Iterator[bytes]) -> str:
            digest = hashlib.sha256()
            for chunk in chunks:
                digest.update(chunk)
            return digest.hexdigest()

        return self._take(name, use) or ""

    def read(self, name: str) -> bytes:
        """A file's bytes; empty: there is none.

        Raises:
            FetchError: It is larger than any index or list of sums.
        """
        entry = self._entries.get(name) or self._entry(name)
        if entry and entry.file and not 0 <= entry.file.size <= _READ_MAX:
            raise FetchError(
                f"{self._host} says that {name} has {entry.file.size} bytes",
                why=f"none of ours has more than {_READ_MAX}", fix=_MEND,
            )  # fmt: skip
        return self._take(name, b"".join) or b""

    def put(self, name: str, file: Path) -> None:
        """Upload a file and its manifest, which the tag names when both are there.

        The same file gives the same manifest: it carries no date.
        """
        place = ocilayout.place(name)
        client, container = self._client(place.repository), self._container(place)
        oras = ociclient.module(self._root)
        layer = {**oras.oci.NewLayer(str(file), media_type=place.kind),
                 "annotations": {_TITLE: file.name}}  # fmt: skip
        config, _ = oras.oci.ManifestConfig()
        manifest = {**oras.oci.NewManifest(), "config": config, "layers": [layer]}

        def send() -> None:
            with oras.provider.temporary_empty_config() as empty:
                client._check_200_response(client.upload_blob(empty, container, config))
            client._check_200_response(client.upload_blob(str(file), container, layer))
            client._check_200_response(client.upload_manifest(manifest, container))

        self._persist(f"writing {name}", send)
        self._entries.pop(name, None)

    def delete(self, name: str) -> None:
        """Remove a file's manifest, and with it the tag; the registry drops the rest in time."""
        entry = self._entries.get(name) or self._entry(name)
        if entry is None:
            return
        place = ocilayout.place(name)
        client, container = self._client(place.repository), self._container(place)
        url = f"{client.prefix}://{container.manifest_url(entry.manifest)}"
        try:
            self._persist(f"removing {name}", lambda: client.do_request(url, "DELETE"))
        except FetchError as error:
            cause = error.__cause__
            if not isinstance(cause, ociclient.Refused) or cause.status not in (400, 405):
                raise
            raise FetchError(
                f"{self._host} lets no client remove anything; {name} and what follows it are "
                "there still",
                why=error.why,
                fix="all else is published, and the index names none of them: remove them with "
                "the registry's own tools",
            ) from cause
        self._entries.pop(name, None)


def _tags(client: Any, container: Any) -> list[str]:
    found: list[str] = client.get_tags(container)
    return [tag for tag in found if isinstance(tag, str)]


def _is_missing(error: FetchError) -> bool:
    return isinstance(error.__cause__, ociclient.Refused) and error.__cause__.status == 404


def _is_ours(name: str, entry: _Entry) -> bool:
    """Whether a tag is what its name says. An index is so only if it is alone: clients take a
    compressed one beside it first, and that would be another one."""
    if name.endswith(f"/{REPODATA}"):
        return [layer.mediaType for layer in entry.layers] == [INDEX_TYPE]
    return entry.file is not None


def _is_here(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
