"""dlami-torch: what it shows of an image, and what it says of a wrong one."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from sm75 import adapter
from sm75.condapkg import iter_payload, read_info, verify_payload
from sm75.errors import LockError
from sm75.lockfile import TargetContract, load_target

ROOT = Path(__file__).parents[2]
MINOR = f"{sys.version_info[0]}.{sys.version_info[1]}"
TARGET = "dlami-pytorch-2.12-ubuntu24.04"


@dataclasses.dataclass(frozen=True)
class Image:
    """A made-up image."""

    root: Path
    site: Path


def make_image(
    root: Path, *, torch: str = "2.12.0+cu132", cuda: str | None = "13.2",
    arches: str = "sm_75 sm_80", minor: str = MINOR,
) -> Image:  # fmt: skip
    site = root / "lib" / f"python{minor}" / "site-packages"
    (site / "torch").mkdir(parents=True)
    (site / "torch" / "version.py").write_text(
        f"from typing import Optional\n__version__ = '{torch}'\ncuda: Optional[str] = {cuda!r}\n"
    )
    (site / "torch" / "__init__.py").write_text(
        "from torch.version import __version__\n"
        "class _C:\n    @staticmethod\n    def _cuda_getArchFlags():\n"
        f"        return {arches!r}\n"
    )
    (site / "triton.py").write_text("here = 1\n")
    (site / "requests.py").write_text("the_images = True\n")
    for name in (f"torch-{torch}", "triton-3.7.0"):
        (site / f"{name}.dist-info").mkdir()
        project, _, version = name.partition("-")
        (site / f"{name}.dist-info" / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {project}\nVersion: {version}\n"
        )
    return Image(root=root, site=site)


@pytest.fixture(scope="session")
def contract() -> TargetContract:
    return load_target(ROOT, TARGET)


@pytest.fixture(scope="session")
def package(contract: TargetContract, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return adapter.build(ROOT, contract, tmp_path_factory.mktemp("adapter"))


@pytest.fixture(scope="session")
def site(package: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package's files, as an environment has them."""
    where = tmp_path_factory.mktemp("site")
    for member, raw in iter_payload(package):
        path = where / member.name.removeprefix("site-packages/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(raw.read())
    return where


START = "import dlami_torch; dlami_torch.install()\n"


def run(site: Path, image: Path, code: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", START + code],
        check=False,
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(site), "DLAMI_TORCH_PATH": str(image), "PATH": ""} | env,
    )


def test_package(package: Path, contract: TargetContract, tmp_path: Path) -> None:
    info = read_info(package)
    assert package.name.startswith("dlami-torch-2.12.0-h")
    assert info["index"]["subdir"] == "linux-aarch64"
    assert info["index"]["noarch"] == "python"
    assert "sympy >=1.13.3" in info["index"]["depends"]
    assert {"pytorch <0a0", "__cuda >=13"} <= set(info["index"]["constrains"])
    assert not any(d.startswith("__") for d in info["index"]["depends"])
    assert verify_payload(package) == []
    again = adapter.build(ROOT, contract, tmp_path)
    assert again.read_bytes() == package.read_bytes()
    known = msgspec.structs.replace(contract, python=("3.12",))
    narrowed = read_info(adapter.build(ROOT, known, tmp_path))
    assert "python 3.12.*" in narrowed["index"]["depends"]


@pytest.mark.parametrize(
    ("change", "word"),
    [({"torch": "2.7.0+cu128"}, "2.7.0+cu128"), ({"torch_arches": ("sm_80",)}, "sm_75")],
)
def test_contract_that_no_build_serves(
    contract: TargetContract, change: dict[str, object], word: str, tmp_path: Path
) -> None:
    with pytest.raises(LockError, match=word.replace("+", r"\+")):
        adapter.build(ROOT, msgspec.structs.replace(contract, **change), tmp_path)


def test_older_image_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LockError, match=r"torch 2\.7\.0"):
        adapter.build(ROOT, load_target(ROOT, "dlami-pytorch-2.7"), tmp_path)


def test_torch_is_visible_and_nothing_else(site: Path, tmp_path: Path) -> None:
    image = make_image(tmp_path / "image")
    done = run(
        site, image.root,
        "import importlib.metadata as m, importlib.util as u, torch, triton\n"
        "print(torch.__file__); print(m.version('torch'), m.version('triton'))\n"
        "print(u.find_spec('requests') is None or 'image' not in u.find_spec('requests').origin)\n"
        "print(type(torch.__loader__).__name__, type(torch.__spec__.loader).__name__)\n",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        str(image.site / "torch" / "__init__.py"),
        "2.12.0+cu132 3.7.0",
        "True",
        "SourceFileLoader SourceFileLoader",
    ]


def test_another_torch_in_the_environment_does_not_win(site: Path, tmp_path: Path) -> None:
    image = make_image(tmp_path / "image", torch="2.13.0+cu132")
    other = make_image(tmp_path / "other", torch="2.14.0")
    done = run(
        site, image.root, "import torch, importlib.metadata as m; print(torch.__version__, "
        "m.version('torch'))", PYTHONPATH=f"{site}:{other.site}",
    )  # fmt: skip
    assert done.stdout.split() == ["2.13.0+cu132", "2.13.0+cu132"], done.stderr


def test_start_hook_reads_nothing(site: Path, tmp_path: Path) -> None:
    """Every Python of the environment starts with it, also those that never need torch."""
    done = run(site, tmp_path, "import sys; print('dlami_torch.image' in sys.modules)")
    assert done.stdout.strip() == "False"
    assert (site / "dlami_torch.pth").read_text().startswith("import dlami_torch;")


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode != 0
    return done.stderr.strip().splitlines()[-1]


def test_no_image(site: Path, tmp_path: Path) -> None:
    line = last_line(run(site, tmp_path / "nowhere", "import torch"))
    assert f"there is no torch in {tmp_path / 'nowhere'}" in line
    assert "DLAMI_TORCH_PATH" in line


@pytest.mark.parametrize(
    ("image", "words"),
    [
        ({"minor": "3.9"}, f"for Python 3.9, this environment has {MINOR}"),
        ({"torch": "2.10.0"}, "stable ABI of 2.11"),
        ({"cuda": "12.8"}, "for CUDA 12.8; vLLM's kernels are linked with the runtime of CUDA 13"),
        ({"cuda": None}, "built without CUDA"),
        ({"arches": "sm_80 sm_90"}, "no sm_75 code (it has sm_80 sm_90)"),
        ({"arches": ""}, "no sm_75 code (it has none for a GPU)"),
    ],
)
def test_wrong_image(site: Path, tmp_path: Path, image: dict[str, str], words: str) -> None:
    made = make_image(tmp_path / "image", **image)
    line = last_line(run(site, made.root, "import torch"))
    assert "dlami-torch: " in line
    assert words in line


def test_fault_is_said_again(site: Path, tmp_path: Path) -> None:
    """Many libraries try to import torch and swallow the first error."""
    made = make_image(tmp_path / "image", arches="sm_80")
    code = "try:\n    import torch\nexcept ImportError:\n    pass\nimport torch\n"
    assert "no sm_75 code" in last_line(run(site, made.root, code))


def test_waived_for_tests_with_a_warning(site: Path, tmp_path: Path) -> None:
    made = make_image(tmp_path / "image", arches="sm_80")
    done = run(site, made.root, "import torch; print('in')", DLAMI_TORCH_ACCEPT="arch")
    assert done.stdout.strip() == "in"
    assert "waived by DLAMI_TORCH_ACCEPT" in done.stderr
    assert run(site, made.root, "import torch", DLAMI_TORCH_ACCEPT="cuda").returncode != 0


def test_environment_with_the_name_of_a_python(site: Path, tmp_path: Path) -> None:
    image = make_image(tmp_path / "python-env")
    done = run(site, image.root, "import torch; print(torch.__file__)")
    assert done.stdout.strip() == str(image.site / "torch" / "__init__.py"), done.stderr


def test_image_is_asked_where_its_layout_is_another(site: Path, tmp_path: Path) -> None:
    image = make_image(tmp_path / "image")
    odd = tmp_path / "odd"
    (odd / "bin").mkdir(parents=True)
    program = odd / "bin" / "python"
    program.write_text(f'#!/bin/sh\necho \'{{"minor": "{MINOR}", "site": ["{image.site}"]}}\'\n')
    program.chmod(0o755)
    for place in (odd, program):
        done = run(site, place, "import torch; print(torch.__version__)")
        assert done.stdout.strip() == "2.12.0+cu132", done.stderr


def test_module_shows_what_is_there(site: Path, tmp_path: Path) -> None:
    image = make_image(tmp_path / "image")
    environment = {"PYTHONPATH": str(site), "DLAMI_TORCH_PATH": str(image.root)}
    done = subprocess.run(
        [sys.executable, "-c", START + "import runpy; "
         "runpy.run_module('dlami_torch', run_name='__main__', alter_sys=True)"],
        check=False, capture_output=True, text=True, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "torch: 2.12.0+cu132" in done.stdout
    assert "torchvision: not in the image" in done.stdout


def test_pip_counts_torch_as_installed(site: Path) -> None:
    """So a package that needs torch does not bring another one; there is nothing to uninstall."""
    (info,) = site.glob("torch-*.dist-info")
    assert "Version: 2.12.0+cu132\n" in (info / "METADATA").read_text()
    assert not (info / "RECORD").exists()


@pytest.mark.parametrize(
    "said",
    [
        "{}",
        "[]",
        "null",
        "7",
        '{"minor": 3, "site": ["/"]}',
        '{"minor": "3.12", "site": 5}',
        '{"minor": "3.12", "site": [null]}',
        "[" * 100_000,
    ],
)
def test_images_python_that_answers_something_else(site: Path, tmp_path: Path, said: str) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "said").write_text(said)
    program = tmp_path / "bin" / "python"
    program.write_text(f"#!/bin/sh\n/bin/cat {tmp_path / 'said'}\n")
    program.chmod(0o755)
    line = last_line(run(site, tmp_path, "import torch"))
    assert "ImageError: dlami-torch: there is no torch in" in line
    assert run(site, tmp_path, LISTING).returncode == 0


LISTING = "import importlib.metadata as m; print(len(list(m.distributions())))\n"


@pytest.mark.parametrize("path", ["/x" * 2500, "/" + "x" * 300])
def test_place_that_cannot_be_one(site: Path, tmp_path: Path, path: str) -> None:
    line = last_line(run(site, Path(path), "import torch"))
    assert "ImageError: dlami-torch: " in line
    assert "DLAMI_TORCH_PATH" in line
    assert run(site, Path(path), LISTING).returncode == 0


def recorded(tmp_path: Path, code: str) -> str:
    """Code that runs in an environment of its own."""
    return f"import sys; sys.prefix = {str(tmp_path / 'env')!r}\n" + code


def record(tmp_path: Path) -> Path:
    path = tmp_path / "env" / "etc" / "dlami-torch" / "path"
    path.parent.mkdir(parents=True)
    return path


def test_record_that_is_no_text(site: Path, tmp_path: Path) -> None:
    record(tmp_path).write_bytes(b"/opt/\xff\xfe\n")
    line = last_line(run(site, tmp_path, recorded(tmp_path, "import torch"), DLAMI_TORCH_PATH=""))
    assert "ImageError: dlami-torch: " in line
    assert "python -m dlami_torch --set PATH" in line
    done = run(site, tmp_path, recorded(tmp_path, LISTING), DLAMI_TORCH_PATH="")
    assert done.returncode == 0, done.stderr


def test_unknown_words_in_accept(site: Path, tmp_path: Path) -> None:
    made = make_image(tmp_path / "image", arches="sm_80")
    done = run(site, made.root, "import torch", DLAMI_TORCH_ACCEPT="arhc, everything")
    assert "no sm_75 code" in last_line(done)
    assert "DLAMI_TORCH_ACCEPT names no check with 'arhc, everything'" in done.stderr
    good = make_image(tmp_path / "good")
    done = run(site, good.root, "import torch", DLAMI_TORCH_ACCEPT="arhc")
    assert done.returncode == 0
    assert "there are arch, cuda, version" in done.stderr
    done = run(site, good.root, "import torch", DLAMI_TORCH_ACCEPT=" arch,")
    assert (done.returncode, done.stderr) == (0, "")


MODULE = (
    "import runpy; sys.argv = ['dlami_torch', '--no-import', '--set', {place!r}]\n"
    "runpy.run_module('dlami_torch', run_name='__main__', alter_sys=True)\n"
)


@pytest.mark.parametrize("wrong", ["/nosuch", "", "/x" * 2500])
def test_set_checks_before_it_records(site: Path, tmp_path: Path, wrong: str) -> None:
    path = record(tmp_path)
    path.write_text("/before\n")
    asked = recorded(tmp_path, MODULE.format(place=wrong))
    done = run(site, tmp_path, asked, DLAMI_TORCH_PATH="")
    assert done.returncode == 1
    assert "Nothing was recorded." in done.stderr
    assert "Traceback" not in done.stderr
    assert path.read_text() == "/before\n"


def test_set_records(site: Path, tmp_path: Path) -> None:
    path = record(tmp_path)
    path.write_bytes(b"\xff\n")
    good = make_image(tmp_path / "good")
    asked = recorded(tmp_path, MODULE.format(place=str(good.root)))
    done = run(site, tmp_path, asked, DLAMI_TORCH_PATH="")
    assert done.returncode == 0, done.stderr
    assert path.read_text() == f"{good.root}\n"
    assert f"place: {good.root} ({path})" in done.stdout
