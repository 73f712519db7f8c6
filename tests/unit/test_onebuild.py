"""A channel has one build of a version: the newest published, whatever the others' hashes are."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sm75 import build, channelcheck, closure, fetch, install, onebuild, sbom
from sm75 import channel as channels
from sm75.aot import pack
from sm75.aot.files import MODULE
from sm75.channelcheck import verify_channel
from sm75.compilelog import CompileLog
from sm75.condapkg import FileSource, tree, write_conda
from sm75.errors import BusyError
from sm75.install import Box
from sm75.lockfile import ReleaseLock, TargetContract, load_release, load_target
from sm75.progress import SilentReporter
from sm75.store import Store
from tests.unit import channelkit, test_aot
from tests.unit.commandkit import Runner, take_for_project
from tests.unit.projectkit import PATCHES, RELEASE, ROOT, copy_project
from tests.unit.test_closure import lock as runtime_lock
from tests.unit.test_inputs import Project, _Provider

BOX = Box(platform="linux-aarch64", virtual={"__linux": "0", "__unix": "0", "__glibc": "2.39"})
CONTRACT = load_target(ROOT, "dlami-pytorch-2.12-ubuntu24.04")


def vllm(where: Path, build_string: str, source: bytes = b"x = 1\n", number: int = 0) -> Path:
    return write_conda(
        where, name="vllm-sm75", version=RELEASE, build=build_string, build_number=number,
        subdir="linux-aarch64", files={"site-packages/vllm/part.py": FileSource.from_bytes(source)},
        depends=["python >=3.11,<3.15", "dlami-torch >=2.11"], noarch="python", compiled=True,
    )  # fmt: skip


def kernels(where: Path, source: bytes) -> Path:
    """A package of kernels that was compiled of ``vllm.part`` as given."""
    site = where / hashlib.sha256(source).hexdigest()
    sources = {"vllm.part": hashlib.sha256(source).hexdigest()}
    pack.write(site / MODULE, test_aot.variants(), {"vllm": RELEASE}, sources)
    return write_conda(
        where, name="vllm-sm75-kernels", version=RELEASE, build=f"h{site.name[:12]}_0",
        subdir="noarch", files=tree(site, dest="site-packages"), noarch="python",
        depends=["python >=3.11", f"vllm-sm75 {RELEASE}.*"],
    )  # fmt: skip


def _build_of(contract: str) -> str:
    return f"h{re.sub(r'[^a-z0-9]', '_', contract)}_0"


def adapter(where: Path, contract: str, version: str = "2.12.0", build_string: str = "") -> Path:
    return write_conda(
        where, name="dlami-torch", version=version, build=build_string or _build_of(contract),
        subdir="linux-aarch64", files={}, depends=["python >=3.11,<3.15"], noarch="python",
        compiled=True, about={"extra": {"contract": {"contract": contract}}},
    )  # fmt: skip


def publish(channel: Path, *packages: Path) -> tuple[str, ...]:
    rivals = onebuild.Rivals(channel, packages)
    channels.publish(packages, channel, remove=rivals)
    return rivals.found


def packages(channel: Path) -> set[str]:
    return {path.name for path in channel.glob("*/*.conda")}


def taken(channel: Path) -> str:
    """The build of vllm-sm75 that the solver takes."""
    (record,) = [r for r in install.solve([channel], ["vllm-sm75"], BOX)
                 if r.name.normalized == "vllm-sm75"]  # fmt: skip
    return str(record.build)


def bare(where: Path) -> Path:
    """A channel with all that vllm-sm75 needs."""
    made = where.with_name("p")
    channels.publish(
        [
            channelkit.python(made),
            adapter(made, CONTRACT.name),
            channelkit.write(made, "six", depends=["python 3.12.*"]),
        ],
        where,
    )
    return where


# What a solver takes


def test_the_solver_takes_an_old_build_and_no_longer_can(tmp_path: Path) -> None:
    """Of two builds, that of the lower hash is taken, whichever was built first."""
    before, after = [], []
    for number, (old, new) in enumerate((("h1_0", "h9_0"), ("h9_0", "h1_0"))):
        made = [vllm(tmp_path / f"m{number}", name) for name in (old, new)]
        both = bare(tmp_path / f"both{number}")
        one = bare(tmp_path / f"one{number}")
        for package in made:
            channels.publish([package], both)
            found = publish(one, package)
        before.append("old" if taken(both) == old else "new")
        after.append("old" if taken(one) == old else "new")
        assert found == (f"linux-aarch64/{made[0].name}",)
        assert verify_channel(one) == []
        assert onebuild.choices(one) == []
        assert [choice.name for choice in onebuild.choices(both)] == ["vllm-sm75"]
    assert before == ["old", "new"]
    assert after == ["new", "new"]


# What is withdrawn


def test_other_releases_and_other_packages_stay(tmp_path: Path) -> None:
    channel, made = bare(tmp_path / "c"), tmp_path / "m"
    channels.publish(
        [channelkit.write(made, "vllm-sm75", "0.28.0", "h0_0"), vllm(made, "h0_0"),
         channelkit.write(made, "vllm-sm75-kernels", RELEASE, "h0_0"),
         channelkit.write(made, "numpy", "2.4", "h0_0"),
         channelkit.write(made, "numpy", "2.4", "h1_0")], channel,
    )  # fmt: skip
    before = packages(channel)
    assert publish(channel, vllm(made, "h1_0")) == (
        f"linux-aarch64/vllm-sm75-{RELEASE}-h0_0.conda",
    )
    assert before - packages(channel) == {f"vllm-sm75-{RELEASE}-h0_0.conda"}
    assert publish(channel, channelkit.write(made, "numpy", "2.4", "h2_0")) == ()


def test_kernels_go_with_the_sources_that_they_were_made_of(tmp_path: Path) -> None:
    """A build that leaves their modules as they are keeps them."""
    channel, made = bare(tmp_path / "c"), tmp_path / "m"
    old = kernels(made, b"x = 1\n")
    publish(channel, vllm(made, "h0_0", b"x = 1\n"), old)
    assert publish(channel, vllm(made, "h1_0", b"x = 1\n")) == (
        f"linux-aarch64/vllm-sm75-{RELEASE}-h0_0.conda",
    )
    assert publish(channel, vllm(made, "h2_0", b"x = 2\n")) == (
        f"linux-aarch64/vllm-sm75-{RELEASE}-h1_0.conda", f"noarch/{old.name}",
    )  # fmt: skip
    first, second = kernels(made, b"x = 2\n"), kernels(made, b"x = 3\n")
    assert publish(channel, first) == ()
    assert publish(channel, second) == (f"noarch/{first.name}",)
    assert verify_channel(channel) == []


def test_an_adapter_of_another_contract_stays(tmp_path: Path) -> None:
    """Of the same torch too; one of the same contract goes, whatever its torch was."""
    channel, made = tmp_path / "c", tmp_path / "m"
    publish(channel, adapter(made, "here"), adapter(made, "there"), adapter(made, "new", "2.14.0"))
    found = publish(channel, adapter(made, "here", "2.13.0"))
    assert found == ("linux-aarch64/dlami-torch-2.12.0-hhere_0.conda",)
    assert packages(channel) == {
        "dlami-torch-2.13.0-hhere_0.conda", "dlami-torch-2.12.0-hthere_0.conda",
        "dlami-torch-2.14.0-hnew_0.conda",
    }  # fmt: skip


def test_publishers_are_asked_in_turn(tmp_path: Path) -> None:
    """What is withdrawn is found while nobody else can publish."""
    channel, made = bare(tmp_path / "c"), tmp_path / "m"
    rivals = onebuild.Rivals(channel, [new := vllm(made, "h2_0")])
    assert rivals() == []
    publish(channel, vllm(made, "h1_0"))  # another run, meanwhile

    def asked() -> list[str]:
        with pytest.raises(BusyError), channels.locked(channel, 0):
            pass
        return rivals()

    channels.publish([new], channel, remove=asked)
    assert rivals.found == (f"linux-aarch64/vllm-sm75-{RELEASE}-h1_0.conda",)
    assert new.name in packages(channel)


# A run that is killed


LAST = 8
"""Steps: a package, two documents, the sums, two indexes; two files removed."""


class Killed(BaseException):
    """The end of a run that has no time to tidy up."""


def _again(channel: Path, new: Path, other: Path) -> None:
    publish_documented(channel, new)


def _other(channel: Path, new: Path, other: Path) -> None:
    channels.publish(
        [other], channel, remove=onebuild.Rivals(channel, [other]), derived={"sum.json": listing}
    )


def listing(place: Path) -> bytes:
    return json.dumps(sorted(packages(place))).encode()


def publish_documented(channel: Path, package: Path) -> None:
    channels.publish(
        [package], channel, documents={f"{package.name}.provenance.json": package.name.encode()},
        derived={"sum.json": listing}, remove=onebuild.Rivals(channel, [package]),
    )  # fmt: skip


@pytest.mark.parametrize("mend", [_again, _other])
@pytest.mark.parametrize("die_at", range(1, LAST + 2))
def test_whoever_publishes_next_mends_what_a_killed_run_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, die_at: int,
    mend: Callable[[Path, Path, Path], None],
) -> None:  # fmt: skip
    """The index never names what is not there, and never again what was withdrawn."""
    channel, made = bare(tmp_path / "c"), tmp_path / "m"
    old, new, other = vllm(made, "h9_0"), vllm(made, "h1_0"), kernels(made, b"x = 1\n")
    publish_documented(channel, old)
    steps = 0

    def step() -> None:
        nonlocal steps
        steps += 1
        if steps == die_at:
            raise Killed

    def commit(moves: list[tuple[Path, Path]], _: Path) -> None:
        for source, target in moves:
            step()
            source.replace(target)

    real = Path.unlink

    def unlink(path: Path, missing_ok: bool = False) -> None:
        if path.exists() and channel in (path.parent, path.parent.parent):
            step()
        real(path, missing_ok=missing_ok)

    with monkeypatch.context() as patched:
        patched.setattr(channels, "_commit", commit)
        patched.setattr(Path, "unlink", unlink)
        if die_at <= LAST:
            with pytest.raises(Killed):
                publish_documented(channel, new)
        else:
            publish_documented(channel, new)
            assert steps == LAST
    for name in channelcheck.indexed(channel):
        assert (channel / name).is_file()
    mend(channel, new, other)
    assert verify_channel(channel) == []
    assert onebuild.choices(channel) == []
    left = {name for name in packages(channel) if name.startswith("vllm-sm75-0")}
    assert left == {old.name if mend is _other and die_at < 5 else new.name}
    assert {path.name for path in channel.glob("*.provenance.json")} == {
        f"{name}.provenance.json" for name in left
    }


# build, channel build


@pytest.fixture
def project(tmp_path: Path) -> Project:
    found = Project(copy_project(tmp_path / "project"))
    found.seal()
    return found


def _edit(project: Project, text: str) -> None:
    path = project.root / PATCHES / "overlay" / "vllm" / "sm75" / "rotary.py"
    path.write_text(text)
    project.seal()


def test_a_build_of_an_edited_overlay_takes_the_place_of_the_one_before(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def recipe(*given: Any) -> build._Run:
        text = given[2].input_hash.encode()
        made = vllm(tmp_path / "recipe", given[2].build_string, text)
        return build._Run(log=CompileLog(), package=str(made))

    monkeypatch.setattr(fetch, "require", lambda plan: None)
    monkeypatch.setattr(build, "lay_out_sources", lambda *_: None)
    monkeypatch.setattr(build, "_run_recipe", recipe)
    monkeypatch.setattr(_Provider, "channels", lambda *_: [])
    settings = build.Settings(
        root=project.root, store=Store(tmp_path / "store"), channel=bare(tmp_path / "c"),
        rust="prebuilt",
    )  # fmt: skip

    def run() -> build.Outcome:
        lock = load_release(project.root, RELEASE)
        planned = build.look(lock, _Provider(), settings)
        return build.build(lock, _Provider(), settings, planned, SilentReporter())

    original = (project.root / PATCHES / "overlay/vllm/sm75/rotary.py").read_text()
    first = run()
    assert first.withdrawn == ()
    _edit(project, original + "\n# edited\n")
    second = run()
    assert second.withdrawn == (f"linux-aarch64/{first.package.name}",)
    assert taken(settings.channel) in second.package.name
    # a channel of before: the other build is there as well, and nothing is to be built
    other = vllm(tmp_path / "m", "hold_0")
    channels.publish([other], settings.channel, documents={f"{other.name}.provenance.json": b"x"})
    third = run()
    assert (third.built, third.withdrawn) == (False, (f"linux-aarch64/{other.name}",))
    assert run().withdrawn == ()
    _edit(project, original)
    assert run().package == first.package
    assert verify_channel(settings.channel) == []
    documents = {path.name for path in settings.channel.iterdir() if path.is_file()}
    assert documents == {
        f"{first.package.name}.provenance.json", sbom.SBOM, channelcheck.SUMS, channelcheck.LOCK
    }  # fmt: skip
    listed = json.loads((settings.channel / sbom.SBOM).read_bytes())["components"]
    assert [c["version"] for c in listed if c["name"] == "vllm-sm75"] == [RELEASE]


def test_an_edited_adapter_takes_the_place_of_the_one_before(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project.root / "LICENSE").write_text("licence\n")
    channel = tmp_path / "c"
    monkeypatch.setattr(closure, "load_runtime", lambda *_: runtime_lock())
    other = msgspec.structs.replace(CONTRACT, name="other")

    def run(contract: TargetContract = CONTRACT) -> closure.Outcome:
        return closure.build(
            project.root, load_release(project.root, RELEASE), contract,
            Store(tmp_path / "store"), channel, SilentReporter(),
        )  # fmt: skip

    (first,) = run().packages
    (beside,) = run(other).packages
    path = project.root / "recipes" / "dlami-torch" / "dlami_torch" / "__main__.py"
    path.write_text(path.read_text() + "\n# edited\n")
    changed = run()
    assert changed.withdrawn == (first,)
    assert run().withdrawn == ()
    (second,) = changed.packages
    listed = json.loads((channel / closure.DOCUMENT).read_bytes())["packages"]
    assert listed == sorted([second, beside])
    assert {f"linux-aarch64/{name}" for name in packages(channel)} == {second, beside}
    assert verify_channel(channel) == []
    # a channel of before
    channels.publish([adapter(tmp_path / "m", CONTRACT.name)], channel)
    assert len(run().withdrawn) == 1
    assert {f"linux-aarch64/{name}" for name in packages(channel)} == {second, beside}


# Where there is a choice


def test_what_is_no_choice(tmp_path: Path) -> None:
    """Builds for different Pythons, of different numbers, of different versions."""
    made = tmp_path / "m"
    channel = channelkit.product(tmp_path / "c", ("3.12", "3.13"))
    channels.publish(
        [channelkit.write(made, "vllm-sm75", "0.28.0", "h0_0"), vllm(made, "h1_1", number=1)],
        channel,
    )
    assert onebuild.choices(channel) == []


@pytest.fixture
def torn(tmp_path: Path) -> Path:
    """A channel with two builds of vllm-sm75 and adapters of two contracts for one torch."""
    channel, made = bare(tmp_path / "c"), tmp_path / "m"
    channels.publish(
        [vllm(made, "h1_0"), vllm(made, "h9_0"), adapter(made, "other")], channel
    )  # fmt: skip
    return channel


def test_verify_names_the_builds(run: Runner, torn: Path) -> None:
    ended = run("channel", "verify", "--channel", torn)
    assert ended.code == 0
    adapters, ours = sorted(ended.err.splitlines())
    assert ours == (
        f"warning: the channel has 2 builds of vllm-sm75 {RELEASE}, and clients take any of them: "
        f"linux-aarch64/vllm-sm75-{RELEASE}-h1_0.conda, "
        f"linux-aarch64/vllm-sm75-{RELEASE}-h9_0.conda; "
        "python3 orchestrator.py build withdraws all but the current one"
    )
    assert adapters.startswith("warning: the channel has 2 builds of dlami-torch 2.12.0, for ")
    assert "other (linux-aarch64/dlami-torch-2.12.0-hother_0.conda)" in adapters
    assert "`install` takes that of its contract" in adapters
    ended = run("channel", "verify", "--json", "--channel", torn)
    assert (ended.code, ended.json) == (0, [])
    assert "2 builds of vllm-sm75" in ended.err


def _installed(run: Runner, channel: Path, tmp_path: Path, *more: str) -> tuple[list[str], str]:
    ended = run("install", "--foreign", "--dry-run", "--json", "--python", "3.12", "--channel",
                channel, "--prefix", tmp_path / "env", *more)  # fmt: skip
    assert ended.code == 0
    return ended.json["packages"], ended.json["warning"]


def test_install_names_the_builds(run: Runner, torn: Path, tmp_path: Path) -> None:
    _, warning = _installed(run, torn, tmp_path)
    build_string = taken(torn)
    assert f"took build {build_string} of several: the channel has 2 builds of vllm-sm75" in warning
    assert "dlami-torch" not in warning
    publish(torn, vllm(tmp_path / "m", "h1_0"))
    assert "builds" not in _installed(run, torn, tmp_path)[1]


def test_install_takes_the_adapter_of_its_contract(
    run: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not that of the newest torch, and not that of another image with the same torch."""
    root = copy_project(tmp_path / "project")
    take_for_project(monkeypatch, root)
    targets = root / "lock" / "targets"
    text = (targets / f"{CONTRACT.name}.toml").read_text()
    for name in ("aa", "zz", "newer"):
        (targets / f"{name}.toml").write_text(text.replace(f'"{CONTRACT.name}"', f'"{name}"'))
    made, channel = tmp_path / "m", bare(tmp_path / "c")
    channels.publish(
        [vllm(made, "h1_0"), adapter(made, "aa"), adapter(made, "newer", "2.14.0")], channel
    )
    for name, version in ((CONTRACT.name, "2.12.0"), ("aa", "2.12.0"), ("newer", "2.14.0")):
        chosen, warning = _installed(run, channel, tmp_path, "--target", name)
        assert f"dlami-torch {version} {_build_of(name)}" in chosen
        assert "dlami-torch" not in warning
    chosen, warning = _installed(run, channel, tmp_path, "--target", "zz")
    assert "has no dlami-torch for the contract zz, only for aa, dlami-pytorch-2.12" in warning
    assert "channel build --target zz" in warning


def test_build_says_what_it_withdrew(
    run: Runner, project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_for_project(monkeypatch, project.root)
    channel, made = bare(tmp_path / "c"), tmp_path / "m"
    lock: ReleaseLock = load_release(project.root, RELEASE)
    monkeypatch.setattr("sm75.cli.building.choose_provider", lambda *_, **__: _Provider())
    settings = build.Settings(root=project.root, store=Store(tmp_path / "s"), channel=channel,
                              rust=lock.rust.default)  # fmt: skip
    current = build.look(lock, _Provider(), settings).package.name
    channels.publish(
        [vllm(made, "hold_0"), vllm(made, current.removesuffix(".conda").rpartition("-")[2])],
        channel,
    )
    place = ("--no-kernels", "--channel", channel, "--store", tmp_path / "s")
    old = f"vllm-sm75-{RELEASE}-hold_0.conda"
    assert f"build: would withdraw linux-aarch64/{old}\n" in run("build", "--dry-run", *place).out
    assert old in packages(channel)
    ended = run("build", *place)
    assert ended.code == 0, ended.err
    said = "build: withdrawn from the channel, which has one build of a version: "
    assert f"{said}{old}\n" in ended.out
    assert packages(channel) & {old, current} == {current}
    assert "withdrawn" not in run("build", *place).out
    assert verify_channel(channel) == []
