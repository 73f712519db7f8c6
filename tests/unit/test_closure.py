"""The closure: what is wanted, which wheels, which extras, and the packages made of them."""

from __future__ import annotations

import hashlib
from email.message import Message
from email.parser import HeaderParser
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from sm75 import closure, closurelock, closureresolve
from sm75.closurelock import Omission, Omissions, Package, RuntimeLock
from sm75.condapkg import read_info
from sm75.errors import LockError
from sm75.progress import SilentReporter
from sm75.store import Store
from sm75.wheels import convert
from tests.unit.wheelkit import make_wheel

ROOT = Path(__file__).parents[2]
ARM = "manylinux_2_28_aarch64"


def omissions(*projects: str, torch: tuple[str, ...] = ()) -> Omissions:
    omit = tuple(Omission(project=p, reason="r", imports=(p,)) for p in projects)
    return Omissions(schema=1, torch=torch, omit=omit)


def meta(*requires: str) -> Message:
    return HeaderParser().parsestr("".join(f"Requires-Dist: {r}\n" for r in requires))


def package(project: str, filename: str = "", python: tuple[str, ...] = ("3.12",)) -> Package:
    return Package(
        project=project, version="1.2.0", filename=filename or f"{project}-1.2.0-py3-none-any.whl",
        sha256="0" * 64, size=1, python=python, license="MIT",
    )  # fmt: skip


def lock(*packages: Package, python: tuple[str, ...] = ("3.12",)) -> RuntimeLock:
    return RuntimeLock(
        schema=1, vllm="0.33.0", platform="linux-aarch64", glibc="2.34", python=python,
        requirements=("a[x]",), packages=packages,
    )  # fmt: skip


def test_wanted_leaves_out_and_adds_torchs_own() -> None:
    vllm = [Requirement("flashinfer-python==1"), Requirement("numpy"), Requirement("torch==2.14.0")]
    want = closureresolve.wanted(vllm, omissions("flashinfer_python", "torch", torch=("sympy>=1",)))
    assert want.requirements == ("numpy", "sympy>=1")
    assert want.excluded == {"flashinfer-python", "torch"}
    also = Omissions(schema=1, torch=("sympy>=1",), offered=("pip",), omit=())
    want = closureresolve.wanted([Requirement("numpy")], also)
    assert want.requirements == ("numpy", "pip", "sympy>=1")


def test_omission_that_nothing_requires() -> None:
    with pytest.raises(LockError, match="tilelang"):
        closureresolve.wanted([Requirement("numpy")], omissions("tilelang"))


def test_extras_of_the_sdist_are_not_requirements() -> None:
    found = closureresolve.read_requirements(
        'Requires-Dist: numpy\nRequires-Dist: scipy; extra == "bench"\n'
    )
    assert [r.name for r in found] == ["numpy"]


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        (["x-1-py3-none-any.whl", f"x-1-cp312-cp312-{ARM}.whl"], f"x-1-cp312-cp312-{ARM}.whl"),
        ([f"x-1-cp39-abi3-{ARM}.whl", "x-1-cp39-abi3-manylinux2014_aarch64.whl"],
         f"x-1-cp39-abi3-{ARM}.whl"),
        (["x-1-1-py3-none-any.whl", "x-1-2-py3-none-any.whl"], "x-1-2-py3-none-any.whl"),
        (["x-1-cp312-cp312-manylinux_2_39_aarch64.whl", "x-1-py37-none-any.whl"],
         "x-1-py37-none-any.whl"),
    ],
)  # fmt: skip
def test_wheel_that_installers_would_take(names: list[str], chosen: str) -> None:
    wheels = [{"url": f"https://index.test/{name}"} for name in names]
    tags = closureresolve.target_tags("linux-aarch64", "3.12")
    for given in (wheels, wheels[::-1]):
        assert closureresolve.choose_wheel(given, tags)["url"].endswith(f"/{chosen}")


def test_no_wheel_fits() -> None:
    tags = closureresolve.target_tags("linux-aarch64", "3.12")
    with pytest.raises(LockError, match="no wheel fits"):
        closureresolve.choose_wheel([{"url": "h/x-1-cp312-cp312-win_amd64.whl"}], tags)


def test_extras_are_followed_through() -> None:
    a, b, c = package("a"), package("b"), package("c")
    wheels = {
        a.filename: meta('b[y]; extra == "x"', 'c[z]; extra == "other"'),
        b.filename: meta('c[w]; extra == "y" and python_version < "3.13"'),
        c.filename: meta(),
    }
    found = closure.extras(["a[x]"], wheels, lock(a, b, c))
    assert found == {"a": {"x"}, "b": {"y"}, "c": {"w"}}


def test_recipe_requirements() -> None:
    found = closure.run_requirements(
        [
            Requirement("typing-extensions>=4.10"),
            Requirement("setuptools<81,>=78.1.1; python_version > '3.11'"),
            Requirement("uvloop; sys_platform == 'win32'"),
            Requirement("tilelang==1"),
            Requirement("protobuf!=6.30.*,>=5"),
        ],
        omissions("tilelang"),
    )
    assert found == (
        "protobuf !=6.30.*,>=5",
        "setuptools <81,>=78.1.1",
        "typing_extensions >=4.10",
    )


def test_compiled_code_for_any_python_is_one_package(tmp_path: Path) -> None:
    wheel = make_wheel(
        tmp_path, tag=f"cp310-abi3-{ARM}", metadata="Requires-Python: >=3.9",
        files={"demo/_x.abi3.so": b"\x7fELF"},
    )  # fmt: skip
    made = {
        convert(wheel, tmp_path / m, subdir="linux-aarch64", python=m) for m in ("3.11", "3.12")
    }
    assert len({path.name for path in made}) == 1
    index = read_info(made.pop())["index"]
    assert (index["subdir"], index["noarch"], index["arch"]) == (
        "linux-aarch64",
        "python",
        "aarch64",
    )
    assert index["depends"] == ["__glibc >=2.28,<3.0.a0", "python >=3.10,>=3.9"]


def test_versions_are_spelled_as_indexes_spell_them(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path, metadata="Requires-Dist: dates>=2023.03.6,!=2023.04.*")
    made = convert(wheel, tmp_path, subdir="linux-aarch64", python="3.12")
    assert "dates !=2023.4.*,>=2023.3.6" in read_info(made)["index"]["depends"]


def test_convert_the_lock(tmp_path: Path) -> None:
    """torch becomes the adapter, omissions and self-references go, extras come in."""
    wheels = [
        make_wheel(
            tmp_path, project="a",
            metadata="Requires-Dist: torch>=2\nRequires-Dist: tilelang\nProvides-Extra: x\n"
            'Requires-Dist: a[y]; extra == "x"\nRequires-Dist: b; extra == "y"',
        ),
        make_wheel(tmp_path, project="b", tag=f"cp312-cp312-{ARM}", files={"b.so": b"x"}),
    ]  # fmt: skip
    store = Store(tmp_path / "store")
    packages = []
    for wheel, project in zip(wheels, "ab", strict=True):
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        store.add(wheel, sha256=digest, size=wheel.stat().st_size, filename=wheel.name)
        packages.append(
            Package(
                project=project, version="1.2.0", filename=wheel.name, sha256=digest,
                size=wheel.stat().st_size, python=("3.12",), license="MIT",
            )
        )  # fmt: skip
    made = closure.convert(
        lock(*packages), omissions("tilelang", "torch"), store, tmp_path / "out", SilentReporter()
    )
    a, b = sorted(made, key=lambda path: path.name)
    assert read_info(a)["index"]["depends"] == ["b", "dlami-torch >=2", "python"]
    assert read_info(b)["index"]["constrains"] == ["python_abi 3.12.* *_cp312"]
    before = [path.stat().st_mtime_ns for path in made]
    closure.convert(
        lock(*packages), omissions("tilelang", "torch"), store, tmp_path / "out", SilentReporter()
    )
    assert [path.stat().st_mtime_ns for path in made] == before


def test_lock_round_trip(tmp_path: Path) -> None:
    where = tmp_path / "lock" / "0.33.0"
    where.mkdir(parents=True)
    given = lock(package("a"), package("b"))
    (where / "runtime.lock").write_text(closurelock.dump_runtime(given))
    assert closurelock.load_runtime(tmp_path, "0.33.0") == given


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (lock(package("a"), package("a", "a-1.2.0-py2.py3-none-any.whl")), "there twice"),
        (lock(package("a", "b-1.2.0-py3-none-any.whl")), "is not a 1.2.0"),
        (lock(package("a", python=("3.12", "3.14"))), "is for Python 3.14"),
    ],
)
def test_lock_that_contradicts_itself(tmp_path: Path, given: RuntimeLock, words: str) -> None:
    where = tmp_path / "lock" / "0.33.0"
    where.mkdir(parents=True)
    (where / "runtime.lock").write_text(closurelock.dump_runtime(given))
    with pytest.raises(LockError) as caught:
        closurelock.load_runtime(tmp_path, "0.33.0")
    assert words in caught.value.why


def test_committed_lock_and_omissions() -> None:
    found = closurelock.load_runtime(ROOT, "0.33.0")
    left_out = closurelock.load_omissions(ROOT, "0.33.0")
    assert found.python == closureresolve.MINORS
    projects = {p.project for p in found.packages}
    assert not projects & left_out.projects
    assert not {p for p in projects if p.startswith("nvidia-")}
    assert {"transformers", "compressed-tensors", "sympy", "uvicorn"} <= projects
    # conda makes no environment with a python from a channel without it
    assert [p.python for p in found.packages if p.project == "pip"] == [closureresolve.MINORS]
    assert "flashinfer" in left_out.absent_imports
    assert "torch" not in left_out.absent_imports
    text = (ROOT / "lock" / "0.33.0" / "runtime.lock").read_text()
    assert "https://" not in text
