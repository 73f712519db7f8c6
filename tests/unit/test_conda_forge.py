"""The conda-forge provider against channels served on 127.0.0.1."""

from __future__ import annotations

import functools
import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import rattler

from sm75 import rattler_rt
from sm75.channel import index, verify_channel
from sm75.condapkg import FileSource, write_conda
from sm75.errors import FetchError, LockError, ToolchainError
from sm75.lockfile import ReleaseLock, Rust
from sm75.progress import SilentReporter
from sm75.store import Store
from sm75.toolchain import Provider, ToolSpecs
from sm75.toolchain.conda_forge import CHANNEL, CondaForge
from sm75.transfer import TransferOptions

FACTS = Path(__file__).parents[1] / "data" / "conda-forge"
TOOLS = ("cmake >=3.26.1", "ninja", "cxx-compiler", "cuda-nvcc 13.*", "patchelf", "rust")
QUICK = TransferOptions(attempts=1, connect_timeout=5, read_timeout=5)


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def serve(directory: Path) -> Iterator[str]:
    handler = functools.partial(_Quiet, directory=str(directory))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def facts() -> Iterator[str]:
    with serve(FACTS) as url:
        yield url


def provider(tmp_path: Path, specs: ToolSpecs, url: str) -> CondaForge:
    """By the channel's own name, with the loopback server as the user's mirror of it."""
    base = rattler.Channel(CHANNEL).base_url
    config = rattler.Config.from_toml(f'[mirrors]\n"{base}" = ["{url}"]\n')
    return CondaForge(
        tmp_path / "toolchain.lock", specs, config=config, cache_dir=tmp_path / "cache"
    )


def test_solves_and_locks_real_tools(tmp_path: Path, facts: str) -> None:
    specs = ToolSpecs(build=(*TOOLS, "python 3.12.*"), host=("python 3.12.*", "cuda-cudart-dev"))
    tools = provider(tmp_path, specs, facts)
    assert tools.reachable() == ""
    tools.resolve(["linux-64", "linux-aarch64"], "linux-aarch64")
    first = tools.lock_file.read_bytes()
    tools.resolve(["linux-aarch64", "linux-64"], "linux-aarch64")
    assert tools.lock_file.read_bytes() == first
    assert b"127.0.0.1" not in first
    for platform in ("linux-64", "linux-aarch64"):
        payloads = tools.payloads(platform, "linux-aarch64")
        names = {p.filename.rsplit("-", 2)[0] for p in payloads}
        assert {"cmake", "ninja", "gxx", "cuda-nvcc", "patchelf", "rust", "python"} <= names
        assert all(len(p.sha256) == 64 and p.size > 0 for p in payloads)
        assert all("/" not in p.filename and p.url.endswith(p.filename) for p in payloads)
    native = tools.identity(RELEASE, "linux-aarch64", "linux-aarch64")
    assert native != tools.identity(RELEASE, "linux-64", "linux-aarch64")
    assert native == tools.identity(RELEASE, "linux-aarch64", "linux-aarch64")
    crossing = {p.subdir for p in tools.payloads("linux-64", "linux-aarch64")}
    assert crossing == {"linux-64", "linux-aarch64", "noarch"}
    everything = json.loads((FACTS / "linux-64/repodata.json").read_text())["packages.conda"]
    cmake = next(
        p for p in tools.payloads("linux-64", "linux-aarch64") if p.filename.startswith("cmake-")
    )
    assert everything[cmake.filename]["sha256"] == cmake.sha256


def test_missing_cross_compiler_is_named(tmp_path: Path, facts: str) -> None:
    specs = ToolSpecs(build=("cmake", "gxx_linux-aarch64"))
    with pytest.raises(ToolchainError, match="has no gxx_linux-aarch64 for linux-64") as err:
        provider(tmp_path, specs, facts).resolve(["linux-64"], "linux-aarch64")
    assert "No candidates were found for gxx_linux-aarch64" in err.value.why
    assert not (tmp_path / "toolchain.lock").exists()


def test_contradicting_specs_are_explained(tmp_path: Path, facts: str) -> None:
    specs = ToolSpecs(build=("cuda-nvcc 13.*", "cuda-version 12.*"))
    with pytest.raises(ToolchainError, match="no set of packages") as err:
        provider(tmp_path, specs, facts).resolve(["linux-64"], "linux-aarch64")
    assert "cuda-version" in err.value.why


def test_unreachable_channel_is_said(tmp_path: Path) -> None:
    with serve(tmp_path) as url:
        pass
    tools = provider(tmp_path, ToolSpecs(build=("cmake",)), url)
    tools = CondaForge(
        tools.lock_file, tools.specs, channel=url, config=rattler.Config(), cache_dir=tmp_path / "c"
    )
    assert tools.reachable(seconds=2) != ""
    with pytest.raises(ToolchainError, match="cannot be read"):
        tools.resolve(["linux-64"], "linux-aarch64")


def test_a_directory_cannot_be_locked(tmp_path: Path) -> None:
    tools = CondaForge(tmp_path / "l", ToolSpecs(build=("cmake",)), channel=FACTS.as_uri())
    with pytest.raises(ToolchainError, match="cannot be locked"):
        tools.resolve(["linux-64"], "linux-aarch64")


def test_lock_faults_are_named(tmp_path: Path, facts: str) -> None:
    tools = provider(tmp_path, ToolSpecs(build=("ninja",)), facts)
    with pytest.raises(LockError, match="no toolchain lock"):
        tools.payloads("linux-64", "linux-aarch64")
    tools.resolve(["linux-64"], "linux-aarch64")
    with pytest.raises(LockError, match="has no build tools for linux-aarch64"):
        tools.payloads("linux-aarch64", "linux-aarch64")
    wider = provider(tmp_path, ToolSpecs(build=("ninja", "cmake")), facts)
    with pytest.raises(LockError, match=r"does not have cmake \(build\)"):
        wider.payloads("linux-64", "linux-aarch64")
    tools.lock_file.write_text("version: 7\nplatforms: nonsense\n")
    with pytest.raises(LockError, match="not a lock file"):
        tools.payloads("linux-64", "linux-aarch64")


RELEASE = ReleaseLock(
    schema=1,
    vllm="0",
    target="t",
    artifacts=(),
    rust=Rust(modes=("none",), default="none", channel="1", cargo_lock_sha256="0" * 64),
)


@pytest.fixture
def remote(tmp_path: Path) -> Path:
    """A small channel with payloads, named as conda-forge's."""
    root = tmp_path / "remote"
    for name, subdir, depends in (
        ("ninja", "linux-64", ("__glibc >=2.17",)),
        ("cmake", "linux-64", ("ninja",)),
        ("python", "linux-aarch64", ()),
    ):
        write_conda(
            root,
            name=name,
            version="3.12.1",
            build="h0_0",
            subdir=subdir,
            files={f"share/{name}": FileSource.from_bytes(name.encode())},
            depends=depends,
        )
    index(root, subdirs=["linux-64", "linux-aarch64"])
    for path in root.glob("*/repodata.json"):  # as an indexer with a clock leaves it
        data = json.loads(path.read_text())
        for record in data["packages.conda"].values():
            record["indexed_timestamp"] = 1_700_000_000_000
        path.write_text(json.dumps(data))
    return root


def test_mirrored_packages_become_a_channel(tmp_path: Path, remote: Path) -> None:
    store = Store(tmp_path / "store")
    specs = ToolSpecs(build=("cmake",), host=("python 3.12.*",))
    with serve(remote) as url:
        tools = provider(tmp_path, specs, url)
        same: Provider = tools
        tools.resolve(["linux-64"], "linux-aarch64")
        assert "indexed_timestamp" not in tools.lock_file.read_text()
        with pytest.raises(FetchError, match="3 of 3 conda-forge packages are not in the store"):
            same.channels(RELEASE, store, "linux-64", "linux-aarch64")
        tools.mirror(store, "linux-64", "linux-aarch64", SilentReporter(), options=QUICK)
    # from here on nothing is served
    assert tools.missing(store, "linux-64", "linux-aarch64") == []
    tools.mirror(store, "linux-64", "linux-aarch64", SilentReporter(), options=QUICK)
    (channel,) = same.channels(RELEASE, store, "linux-64", "linux-aarch64")
    assert same.channels(RELEASE, store, "linux-64", "linux-aarch64") == [channel]
    local = Path(channel.removeprefix("file://"))
    assert verify_channel(local) == []

    async def install() -> None:
        gateway = rattler.Gateway(cache_dir=tmp_path / "g")
        records = await rattler.solve(
            sources=[rattler.Channel(channel)],
            specs=["cmake"],
            gateway=gateway,
            platforms=[rattler.Subdir("linux-64"), rattler.Subdir("noarch")],
            virtual_packages=tools_virtual(),
        )
        await rattler.install(
            records,
            target_prefix=tmp_path / "prefix",
            cache_dir=tmp_path / "g",
            platform=rattler.Subdir("linux-64"),
            show_progress=False,
        )

    rattler_rt.run(install())
    assert (tmp_path / "prefix/share/cmake").read_text() == "cmake"
    assert (tmp_path / "prefix/share/ninja").exists()

    # an altered file in the channel is not handed out again
    victim = next(local.glob("linux-64/cmake-*"))
    victim.unlink()
    victim.write_bytes(b"evil")
    assert same.channels(RELEASE, store, "linux-64", "linux-aarch64") == [channel]
    assert verify_channel(local) == []


def tools_virtual() -> list[rattler.GenericVirtualPackage]:
    return [
        rattler.GenericVirtualPackage(
            rattler.PackageName("__glibc"), rattler.Version("2.34"), rattler.BuildString("0")
        )
    ]


def test_wrong_and_missing_bytes_are_refused(tmp_path: Path, remote: Path) -> None:
    store = Store(tmp_path / "store")
    with serve(remote) as url:
        tools = CondaForge(
            tmp_path / "toolchain.lock",
            ToolSpecs(build=("cmake",)),
            channel=url,  # no mirror: nothing but the loopback server is ever asked
            config=rattler.Config(),
            cache_dir=tmp_path / "cache",
        )
        tools.resolve(["linux-64"], "linux-aarch64")
        victim = next(remote.glob("linux-64/cmake-*"))
        good = victim.read_bytes()

        def mirror() -> None:
            tools.mirror(store, "linux-64", "linux-aarch64", SilentReporter(), options=QUICK)

        victim.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
        with pytest.raises(FetchError, match="cmake"):
            mirror()
        victim.write_bytes(good[:50])
        with pytest.raises(FetchError, match="cmake"):
            mirror()
        victim.unlink()
        with pytest.raises(FetchError, match="cmake"):
            mirror()
        missing = tools.missing(store, "linux-64", "linux-aarch64")
        assert [p.filename for p in missing] == [victim.name]
        victim.write_bytes(good)
        mirror()
    assert tools.missing(store, "linux-64", "linux-aarch64") == []
