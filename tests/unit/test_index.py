"""The index client: settings of pip and uv, JSON and HTML pages, credentials."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sm75.errors import FetchError
from sm75.index import DEFAULT_INDEX, IndexConfig, PackageIndex, parse_page
from tests.unit.badserver import BadServer
from tests.unit.fetchkit import HASTY, index_of, offer, sdist

JSON = "application/vnd.pypi.simple.v1+json"
SHA = "a" * 64
DATA = Path(__file__).parents[1] / "data"


def discover(home: Path, **env: str) -> IndexConfig:
    return IndexConfig.discover(env, home)


def test_without_settings_the_public_index(tmp_path: Path) -> None:
    assert discover(tmp_path) == IndexConfig(indexes=(DEFAULT_INDEX,))


def test_precedence_of_the_main_index(tmp_path: Path) -> None:
    conf = tmp_path / ".config" / "pip" / "pip.conf"
    conf.parent.mkdir(parents=True)
    conf.write_text(
        "[global]\nindex-url = https://pipconf/simple\nextra-index-url =\n  https://e1/simple/\n"
        "  https://e2/simple/\n"
    )
    uv = tmp_path / ".config" / "uv" / "uv.toml"
    uv.parent.mkdir()
    uv.write_text(
        '[[index]]\nurl = "https://uvtoml/simple"\ndefault = true\n'
        '[[index]]\nurl = "https://uvmore/simple"\n'
        '[[index]]\nurl = "https://never/simple"\nexplicit = true\n'
    )
    more = ("https://e1/simple/", "https://e2/simple/", "https://uvmore/simple/")
    env = {
        "PIP_INDEX_URL": "https://pipenv/simple",
        "UV_DEFAULT_INDEX": "name=https://uvenv/simple",
        "UV_INDEX_URL": "https://uvold/simple",
    }
    expected = ["https://pipenv", "https://uvenv", "https://uvold", "https://pipconf"]
    for name, main in zip([*list(env), None], expected, strict=True):
        assert discover(tmp_path, **env).indexes == (f"{main}/simple/", *more)
        if name:
            del env[name]
    conf.unlink()
    assert discover(tmp_path).indexes == ("https://uvtoml/simple/", "https://uvmore/simple/")


def test_more_indexes_and_links_from_the_environment(tmp_path: Path) -> None:
    links = tmp_path / "links"
    links.mkdir()
    found = discover(
        tmp_path,
        PIP_EXTRA_INDEX_URL="https://a/simple https://b/simple/?x=1",
        UV_INDEX="corp=https://c/simple https://d/simple?t=1",
        UV_FIND_LINKS=f"{links.as_uri()},https://elsewhere/links.html",
        PIP_FIND_LINKS=f"{links} {tmp_path / 'absent'}",
    )
    assert found.indexes[0] == DEFAULT_INDEX
    assert found.indexes[3] == "https://c/simple/"
    assert len(found.indexes) == 5
    assert found.find_links == (links,)


def test_no_index(tmp_path: Path) -> None:
    assert discover(tmp_path, PIP_NO_INDEX="1").indexes == ()


def test_config_file_named_by_the_environment(tmp_path: Path) -> None:
    conf = tmp_path / "my.conf"
    conf.write_text("[install]\nindex-url = https://mine/simple/\n")
    assert discover(tmp_path, PIP_CONFIG_FILE=str(conf)).indexes == ("https://mine/simple/",)


def test_malformed_settings_are_told(tmp_path: Path) -> None:
    conf = tmp_path / "my.conf"
    conf.write_text("index-url = no section\n")
    with pytest.raises(FetchError, match="pip's configuration"):
        discover(tmp_path, PIP_CONFIG_FILE=str(conf))
    (tmp_path / "uv.toml").write_text("[[")
    with pytest.raises(FetchError, match=r"uv\.toml"):
        discover(tmp_path, UV_CONFIG_FILE=str(tmp_path / "uv.toml"))


def test_a_real_json_page() -> None:
    body = (DATA / "simple-nvidia-nvvm.json").read_bytes()
    links = parse_page("https://index/simple/nvidia-nvvm/", JSON, body)
    by_name = {link.filename: link for link in links}
    name = "nvidia_nvvm-13.2.78-py3-none-manylinux2010_x86_64.manylinux_2_12_x86_64.whl"
    assert by_name[name].size == 64279462
    assert by_name[name].sha256 == (
        "f5aa433631109bbdec81802c5b5f319bf10bc891fe2f212e4e445845211d6f77"
    )


def test_an_html_page() -> None:
    page = (
        '<!DOCTYPE html><head><base href="https://files/x/"></head><body>'
        f'<a href="../p/demo-1.0%2Bcpu.tar.gz#sha256={SHA}" data-yanked="">demo</a>'
        '<a href="https://other/demo-2.0.tar.gz#md5=1">two</a><a name="x">none</a></body>'
    )
    one, two = parse_page("https://index/simple/demo/", "text/html; charset=UTF-8", page.encode())
    assert (one.filename, one.url, one.sha256) == (
        "demo-1.0+cpu.tar.gz",
        "https://files/p/demo-1.0%2Bcpu.tar.gz",
        SHA,
    )
    assert two.sha256 is None


@pytest.mark.parametrize("body", [b"", b"[]", b'{"files": 3}', b'{"files": [{}]}', b"\xff"])
def test_what_is_no_json_page(body: bytes) -> None:
    with pytest.raises(FetchError, match="not a page of a package index"):
        parse_page("https://user:secret@index/simple/demo/", JSON, body)


@pytest.mark.parametrize("html", [False, True])
def test_find(server: BadServer, html: bool) -> None:
    server.html = html
    artifact = sdist(b"x")
    offer(server, artifact, b"x")
    index = index_of(server)
    link = index.find("Demo", artifact.filename)
    assert link.sha256 == artifact.sha256
    assert link.size == (None if html else 1)
    assert link.url == server.url.replace("simple/", "files/demo/demo-1.0.tar.gz")
    index.find("demo", artifact.filename, artifact.sha256)
    assert len(server.log) == 1, "a project's page is read once"


def test_not_there_names_what_is_near(server: BadServer) -> None:
    offer(server, sdist(b"x"), b"x")
    with pytest.raises(FetchError, match=r"it has demo-1\.0\.tar\.gz"):
        index_of(server).find("demo", "demo-1.1.tar.gz")
    with pytest.raises(FetchError, match="it has 0 files of nothing"):
        index_of(server).find("nothing", "nothing-1.1.tar.gz")


def test_a_further_index_has_it_although_the_first_is_down(server: BadServer) -> None:
    artifact = sdist(b"x")
    offer(server, artifact, b"x")
    config = IndexConfig(indexes=("http://127.0.0.1:9/simple/", server.url))
    assert PackageIndex(config, HASTY).find("demo", artifact.filename).sha256


def test_another_hash_is_passed_over(server: BadServer, tmp_path: Path) -> None:
    """A private index may hold a file of the same name; the pinned one is found behind it."""
    artifact = sdist(b"x")
    offer(server, artifact, b"x")
    with BadServer() as other:
        offer(other, artifact, b"evil")
        config = IndexConfig(indexes=(other.url, server.url))
        index = PackageIndex(config, HASTY)
        link = index.find("demo", artifact.filename, artifact.sha256)
    assert link.url.startswith(server.url.removesuffix("simple/"))


def test_file_index_and_find_links(tmp_path: Path) -> None:
    page = tmp_path / "simple" / "demo" / "index.html"
    page.parent.mkdir(parents=True)
    page.write_text(f'<a href="../../files/demo-1.0.tar.gz#sha256={SHA}">x</a>')
    links = tmp_path / "links"
    links.mkdir()
    (links / "demo-2.0.tar.gz").write_bytes(b"22")
    (links / "other-2.0.tar.gz").write_bytes(b"22")
    config = IndexConfig(indexes=((tmp_path / "simple").as_uri() + "/",), find_links=(links,))
    index = PackageIndex(config)
    link = index.find("demo", "demo-1.0.tar.gz")
    assert link.local == tmp_path / "files" / "demo-1.0.tar.gz"
    assert index.find("demo", "demo-2.0.tar.gz").size == 2
    assert [link.filename for link in index.files("demo")] == ["demo-2.0.tar.gz", "demo-1.0.tar.gz"]


def test_credentials_reach_the_same_server_and_no_message(server: BadServer) -> None:
    artifact = sdist(b"x")
    offer(server, artifact, b"x")
    login = server.url.replace("http://", "http://user:secret@")
    index = PackageIndex(IndexConfig(indexes=(login,)), HASTY)
    assert "user:secret@" in index.find("demo", artifact.filename).url
    assert server.auth[0].startswith("Basic ")
    with pytest.raises(FetchError) as caught:
        index.find("demo", "absent")
    assert "secret" not in str(caught.value)


def test_credentials_go_with_absolute_links_of_the_same_server_only() -> None:
    urls = ["https://index/f", "https://elsewhere/f", "http://index/f", "https://a:b@index/f"]
    page = json.dumps({"files": [{"filename": "f", "url": url} for url in urls]}).encode()
    links = parse_page("https://user:secret@index/simple/demo/", JSON, page)
    assert [link.url for link in links] == ["https://user:secret@index/f", *urls[1:]]


@pytest.mark.network
def test_the_real_index() -> None:
    link = PackageIndex().find("vllm", "vllm-0.33.0.tar.gz")
    assert link.sha256 == "f4c33c2503d52bb411146afa9618a4f48bed68912f617e6803ac8d76e4c74112"
