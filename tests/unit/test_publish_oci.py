"""Publishing to an OCI registry: Debian's docker-registry, read by py-rattler and by plain GETs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import httpx
import pytest

from sm75 import ociclient, ocilayout
from sm75.channel import publish as add
from sm75.channelcheck import REPODATA, SUMS
from sm75.errors import ChannelError, FetchError, UsageError
from sm75.publishtargets import opened
from tests.unit import channelkit, registrykit
from tests.unit.channelkit import SUBDIR
from tests.unit.localserver import LocalServer, body_of
from tests.unit.projectkit import ROOT
from tests.unit.registrykit import Proxy
from tests.unit.test_publish import files, newer, publish

TYPES = "application/vnd.oci.image.manifest.v1+json"
SPACE = "owner/my.channel"
# A name that no repository may have, and a version and build that no tag may have.
ODD = f"{SUBDIR}/_odd_name-1!2.0+cu130-py3=1_0.conda"


# --- the layout: no registry is needed ---------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "where"),
    [
        (f"{SUBDIR}/vllm-sm75-0.33.0-h0_0.conda", (f"{SUBDIR}/vllm-sm75", "0.33.0-h0_0")),
        ("noarch/_libgcc_mutex-0.1-main.conda", ("noarch/zzz_libgcc_mutex", "0.1-main")),
        (ODD, (f"{SUBDIR}/zzz_odd_name", "1__e__2.0__p__cu130-py3__eq__1_0")),
        ("noarch/repodata.json", ("noarch/repodata.json", "latest")),
        (SUMS, ("documents", SUMS)),
        ("a-1+c-0.conda.provenance.json", ("documents", "a-1__p__c-0.conda.provenance.json")),
    ],
)
def test_where_files_lie(name: str, where: tuple[str, str]) -> None:
    place = ocilayout.place(name)
    assert (place.repository, place.tag) == where
    assert ocilayout.file_of(*where) == name


@pytest.mark.parametrize("name", ["noarch/Upper-1-0.conda", f"noarch/a-1-{'b' * 130}.conda", "ä"])
def test_what_no_registry_can_have_is_refused(name: str) -> None:
    with pytest.raises(ChannelError, match="an OCI registry cannot have"):
        ocilayout.place(name)
    assert list(ocilayout.sound([name, "../x-1-0.conda", SUMS])) == [(SUMS, ocilayout.place(SUMS))]


# --- a registry --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with registrykit.registry(tmp_path_factory.mktemp("registry")) as host:
        yield host


@pytest.fixture(autouse=True)
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Docker's settings: none, and none of this machine's."""
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
    monkeypatch.setattr(ociclient, "PAUSE", 0.01)
    (tmp_path / "docker").mkdir()
    return tmp_path / "docker" / "config.json"


@pytest.fixture
def channel(tmp_path: Path) -> Path:
    odd = channelkit.write(tmp_path / "odd", "_odd_name", "1!2.0+cu130", "py3=1_0")
    made = channelkit.product(tmp_path / "channel", ("3.12",), odd)
    add([], made, documents={"report.html": b"<p>"})
    return made


@pytest.fixture
def proxy(shared: str) -> Iterator[Proxy]:
    with Proxy(shared) as running:
        yield running


def get(host: str, path: str, **headers: str) -> httpx.Response:
    return httpx.get(f"http://{host}/v2/{path}", headers=headers, trust_env=False)


def layer(host: str, space: str, name: str) -> bytes:
    """Read a file by the steps of a client: the tag's manifest, its layer, the blob."""
    place = ocilayout.place(name)
    base = f"{space}/{place.repository}"
    manifest = get(host, f"{base}/manifests/{place.tag}", Accept=TYPES)
    if manifest.status_code == 404:
        return b""
    (found,) = [x for x in manifest.json()["layers"] if x["mediaType"] == place.kind]
    return get(host, f"{base}/blobs/{found['digest']}").content


def there(host: str, channel: Path, space: str) -> dict[str, bytes]:
    return {name: data for name in files(channel) if (data := layer(host, space, name))}


@pytest.mark.network
class TestRegistry:
    """With oras, which the first of these installs by its hashes."""

    def test_all_of_it_in_order_and_nothing_twice(
        self, channel: Path, proxy: Proxy, tmp_path: Path
    ) -> None:
        url = f"oci://{proxy.host}/{SPACE}"
        assert len(publish(channel, url, dry_run=True).sent) == len(files(channel))
        assert {asked.method for asked in proxy.log} == {"GET"}
        done = publish(channel, url)
        assert there(proxy.host, channel, SPACE) == files(channel)
        manifests = [a.path for a in proxy.log if a.method == "PUT" and "/manifests/" in a.path]
        expected = [ocilayout.place(name) for name in done.sent]
        assert manifests == [f"/v2/{SPACE}/{p.repository}/manifests/{p.tag}" for p in expected]
        assert [name.endswith(REPODATA) for name in done.sent].index(True) == len(done.sent) - 2
        proxy.log.clear()
        assert publish(channel, url).sent == ()
        assert {asked.method for asked in proxy.log} == {"GET"}
        # The indexes and SHA256SUMS are read, to know what is there; packages are not.
        read = {
            asked.path.partition("/blobs/")[0] for asked in proxy.log if "/blobs/" in asked.path
        }
        indexes = {f"{SUBDIR}/{REPODATA}", f"noarch/{REPODATA}"}
        assert read == {f"/v2/{SPACE}/{name}" for name in ("documents", *indexes)}
        package = newer(channel, tmp_path)
        assert publish(channel, url).sent == (
            f"{SUBDIR}/{package.name}", SUMS, f"{SUBDIR}/{REPODATA}",
        )  # fmt: skip

    def test_the_same_channel_gives_the_same_manifests(
        self, channel: Path, shared: str, tmp_path: Path
    ) -> None:
        for space in ("same/a", "same/b"):
            publish(channel, f"oci://{shared}/{space}")
        for name in files(channel):
            place = ocilayout.place(name)
            first, second = (
                get(shared, f"{space}/{place.repository}/manifests/{place.tag}", Accept=TYPES)
                for space in ("same/a", "same/b")
            )
            assert first.content == second.content
            assert first.json()["layers"][0]["annotations"] == {
                "org.opencontainers.image.title": name.rpartition("/")[2]
            }

    def test_another_package_of_that_name_is_refused(
        self, channel: Path, shared: str, tmp_path: Path
    ) -> None:
        url = f"oci://{shared}/replace"
        newer(channel, tmp_path)
        publish(channel, url)
        before = there(shared, channel, "replace")
        newer(channel, tmp_path, size=3)
        with pytest.raises(ChannelError, match="other content") as err:
            publish(channel, url)
        assert "extra-1.0-0.conda" in err.value.why
        assert there(shared, channel, "replace") == before
        publish(channel, url, replace=True)
        assert there(shared, channel, "replace") == files(channel)

    def test_nothing_is_removed_unless_asked(
        self, channel: Path, shared: str, tmp_path: Path
    ) -> None:
        url = f"oci://{shared}/delete"
        name = f"{SUBDIR}/{newer(channel, tmp_path).name}"
        other = channelkit.write(tmp_path / "more", "extra", "2.0")
        add([other], channel)
        publish(channel, url)
        add([], channel, remove=[name])
        assert publish(channel, url).removed == ()
        assert layer(shared, "delete", name)
        # Neither SHA256SUMS nor the index there speaks of it now: its repository has the tag.
        assert publish(channel, url, delete=True).removed == (name,)
        assert layer(shared, "delete", name) == b""
        assert there(shared, channel, "delete") == files(channel)

    def test_a_package_that_only_the_registry_knows_is_found(
        self, channel: Path, shared: str, tmp_path: Path
    ) -> None:
        url = f"oci://{shared}/known"
        name = f"{SUBDIR}/{newer(channel, tmp_path).name}"
        publish(channel, url)
        add([], channel, remove=[name])
        assert publish(channel, url, delete=True).removed == (name,)

    def test_a_registry_that_removes_nothing_says_so(self, channel: Path, tmp_path: Path) -> None:
        name = f"{SUBDIR}/{newer(channel, tmp_path).name}"
        with registrykit.registry(tmp_path / "registry", delete=False) as host:
            publish(channel, f"oci://{host}/x")
            add([], channel, remove=[name])
            with pytest.raises(FetchError, match="lets no client remove") as err:
                publish(channel, f"oci://{host}/x", delete=True)
            assert "405" in err.value.why
            assert there(host, channel, "x") == files(channel)
            assert publish(channel, f"oci://{host}/x").sent == ()
            newer(channel, tmp_path, size=4)
            publish(channel, f"oci://{host}/x", replace=True)  # needs no removal
            assert there(host, channel, "x") == files(channel)

    def test_another_index_beside_ours_is_replaced(self, channel: Path, shared: str) -> None:
        """Clients would take a compressed one first."""
        url = f"oci://{shared}/stale"
        publish(channel, url)
        base = f"http://{shared}/v2/stale/{SUBDIR}/repodata.json/manifests/latest"
        manifest = httpx.get(base, headers={"Accept": TYPES}, trust_env=False).json()
        manifest["layers"].append(
            {**manifest["layers"][0], "mediaType": f"{ocilayout.INDEX_TYPE}+zst"}
        )
        headers = {"Content-Type": TYPES}
        put = httpx.put(base, content=json.dumps(manifest), headers=headers, trust_env=False)
        assert put.status_code == 201
        assert publish(channel, url).sent == (f"{SUBDIR}/{REPODATA}",)
        assert len(get(shared, base.partition("/v2/")[2], Accept=TYPES).json()["layers"]) == 1

    def test_a_damaged_storage_is_found_when_asked(self, channel: Path, tmp_path: Path) -> None:
        with registrykit.registry(tmp_path / "registry") as host:
            publish(channel, f"oci://{host}/x")
            package = next(channel.glob("*/numpy*.conda")).read_bytes()
            stored = [p for p in (tmp_path / "registry").rglob("data")
                      if p.read_bytes() == package]  # fmt: skip
            assert len(stored) == 1
            channelkit.flip(stored[0])
            assert publish(channel, f"oci://{host}/x").sent == ()
            with pytest.raises(FetchError, match=r"serves other bytes for .*numpy"):
                publish(channel, f"oci://{host}/x", reread=True)
            stored[0].unlink()
            with pytest.raises(ChannelError, match="other content"):
                publish(channel, f"oci://{host}/x", reread=True)
            publish(channel, f"oci://{host}/x", reread=True, replace=True)
            assert there(host, channel, "x") == files(channel)

    def test_it_is_tried_again(self, channel: Path, proxy: Proxy) -> None:
        moods = {
            "POST /vllm-sm75/blobs/uploads/": [503, 429], "PUT /vllm-sm75/blobs/uploads/": [500, 0],
            "PUT /numpy/manifests/": [502], "GET /numpy/tags/list": [503, 0],
            "HEAD /numpy/blobs/": [504],
        }  # fmt: skip
        proxy.moods = moods
        publish(channel, f"oci://{proxy.host}/again")
        assert not any(moods.values())
        assert there(proxy.host, channel, "again") == files(channel)

    def test_it_is_not_tried_for_ever(self, channel: Path, proxy: Proxy) -> None:
        proxy.moods = {"PUT /numpy/manifests/": [503] * 99}
        with pytest.raises(FetchError, match=r"writing .*numpy.* failed") as err:
            publish(channel, f"oci://{proxy.host}/never")
        assert len(proxy.moods["PUT /numpy/manifests/"]) == 99 - ociclient.TRIES
        assert "TESTS say so" in err.value.why
        assert layer(proxy.host, "never", f"{SUBDIR}/{REPODATA}") == b""

    def test_a_login_comes_from_dockers_settings(
        self, channel: Path, tmp_path: Path, settings: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with registrykit.registry(tmp_path / "registry", login=True) as host:
            url = f"oci://{host}/x"
            with pytest.raises(FetchError, match="failed at") as err:
                publish(channel, url)
            assert "docker login" in err.value.fix
            helper = tmp_path / "bin" / "docker-credential-tests"
            helper.parent.mkdir()
            helper.write_text('#!/bin/sh\necho \'{"Username": "user", "Secret": "word"}\'\n')
            helper.chmod(0o755)
            monkeypatch.setenv("PATH", f"{helper.parent}:{os.environ['PATH']}")
            settings.write_text(json.dumps({"credHelpers": {host: "tests"}}))
            assert publish(channel, url).sent
            settings.write_text(json.dumps({"auths": {host: {"auth": "dXNlcjp3cm9uZw=="}}}))
            with pytest.raises(FetchError, match="failed at") as err:
                publish(channel, url)
            assert "wrong" not in str(err.value)
            settings.write_text("{")
            with pytest.raises(UsageError, match=r"config\.json"):
                publish(channel, url)

    def test_tokens_are_for_one_repository_and_one_use(
        self, channel: Path, tmp_path: Path, settings: Path
    ) -> None:
        signer = registrykit.certificate(tmp_path / "signer", "127.0.0.1")
        with (
            registrykit.Tokens(signer) as tokens,
            registrykit.registry(tmp_path / "registry", tokens=tokens) as host,
        ):
            url = f"oci://{host}/x"
            with pytest.raises(FetchError, match="writing") as err:
                publish(channel, url)
            assert "docker login" in err.value.fix
            settings.write_text(json.dumps({"auths": {host: {"auth": registrykit.LOGIN}}}))
            done = publish(channel, url)
            asked = {scope for scope, known in tokens.asked if known}
            # The registry names the actions in any order.
            asked = {scope.replace("push,pull", "pull,push") for scope in asked}
            tokens.asked.clear()
            assert publish(channel, url).sent == ()
        for name in done.sent:
            repository = f"repository:x/{ocilayout.place(name).repository}"
            assert {f"{repository}:pull", f"{repository}:pull,push"} <= asked
        assert all(scope.endswith(":pull") for scope, _ in tokens.asked)

    def test_clients_of_conda_solve_and_install_from_it(
        self, channel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """py-rattler, which pixi is made of. It knows https on port 443 and nothing else."""
        address = f"127.75.{os.getpid() % 250}.{os.getpid() // 250 % 250 + 1}"
        if not registrykit.may_listen(address, 443):
            pytest.skip("this user may not listen on port 443")
        tls = registrykit.certificate(tmp_path / "tls", address)
        add([channelkit.write(tmp_path / "m", "asks", depends=["_odd_name"])], channel)
        url = f"oci://{address}/{SPACE}"
        with registrykit.registry(tmp_path / "reg", address=address, port=443, tls=tls):
            with pytest.raises(FetchError, match="failed at") as err:
                publish(channel, url)
            assert "SSL_CERT_FILE" in err.value.fix
            monkeypatch.setenv("SSL_CERT_FILE", str(tls.authority))
            publish(channel, url)
            done = subprocess.run(
                [sys.executable, Path(__file__).with_name("ociread.py"), url, tmp_path, "asks"],
                check=False, capture_output=True, text=True, timeout=300,
                env={**os.environ, "HOME": str(tmp_path), "NO_PROXY": "*"},
            )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert sorted(done.stdout.split()) == [f"{url}/{ODD}", f"{url}/{SUBDIR}/asks-1.0-0.conda"]
        installed = tmp_path / "prefix" / "share"
        assert {path.name for path in installed.iterdir()} == {"_odd_name.py", "asks.py"}
        assert (installed / "_odd_name.py").read_bytes() == b"_odd_name"


def opened_dry(url: str, channel: Path) -> Any:
    with opened(ROOT, url, channel, dry_run=True) as place:
        return place


@pytest.mark.network
@pytest.mark.parametrize(
    ("host", "scheme"),
    [
        ("localhost:5000", "http"), ("127.0.0.1:5000", "http"), ("[::1]:5000", "http"),
        ("127.0.0.1", "https"), ("localhost", "https"), ("ghcr.io", "https"),
        ("registry:5000", "https"), ("10.0.0.1:5000", "https"),
    ],
)  # fmt: skip
def test_http_is_for_this_machine_alone(channel: Path, host: str, scheme: str) -> None:
    target = opened_dry(f"oci://{host}/x", channel)
    client = target._client("documents")
    assert (client.prefix, client.auth.prefix) == (scheme, scheme)
    place = target._container(ocilayout.place(SUMS))
    assert place.manifest_url().partition("/")[0].removesuffix(":443") == host


class Lies(LocalServer):
    """A registry that has one file, SHA256SUMS, and serves something else."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.asked, self.sent = kind, 0, 0

    def respond(self, handler: BaseHTTPRequestHandler) -> None:
        self.asked += 1
        body_of(handler)
        if "/tags/list" in handler.path and self.kind == "tags":
            link = f'<{handler.path.partition("?")[0]}?n={self.asked}>; rel="next"'
            body = json.dumps({"tags": [SUMS]}).encode()
            self.send(handler, 200, {"Link": link, "Content-Length": str(len(body))}, body)
        elif "/manifests/SHA256SUMS" in handler.path and self.kind == "manifest":
            self.endless(handler)
        elif "/manifests/SHA256SUMS" in handler.path and self.kind in ("blob", "size"):
            size = 1 << 60 if self.kind == "size" else 100
            digest = f"sha256:{'0' * 64}"
            layer = {"mediaType": ocilayout.place(SUMS).kind, "digest": digest, "size": size}
            body = json.dumps({"schemaVersion": 2, "layers": [layer]}).encode()
            self.send(handler, 200, {"Content-Length": str(len(body))}, body)
        elif "/blobs/" in handler.path:
            self.endless(handler)
        elif self.kind == "token":
            realm = f'Bearer realm="{self.base}/token",service="x"'
            if handler.path.startswith("/token"):
                self.endless(handler)
            else:
                self.send(handler, 401, {"Www-Authenticate": realm, "Content-Length": "0"})
        else:
            self.send(handler, 404, {"Content-Length": "0"})

    def endless(self, handler: BaseHTTPRequestHandler) -> None:
        """Blanks, until the other side has enough."""
        handler.send_response(200)
        handler.send_header("Connection", "close")
        handler.end_headers()
        handler.close_connection = True
        try:
            while self.sent < 1 << 30:
                self.sent += handler.wfile.write(b" " * (1 << 20))
        except OSError:
            pass


@pytest.mark.network
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("blob", "serves more bytes for SHA256SUMS than it says"),
        ("size", f"says that SHA256SUMS has {1 << 60} bytes"),
        ("manifest", "where a short one belongs"),
        ("tags", "its list of tags has more than 100 pages"),
        ("token", "where a short one belongs"),
    ],
)
def test_a_registry_without_end_is_left(channel: Path, kind: str, said: str) -> None:
    with Lies(kind) as server:
        with pytest.raises(FetchError) as error:
            publish(channel, f"oci://{server.host}/x")
        assert said in f"{error.value.what} {error.value.why}"
    # Sockets hold some megabytes that nobody has read.
    assert server.sent < 100 << 20
    assert server.asked < 1500
