"""Pins that vLLM declares outside CMake: setup.py, pyproject.toml, requirements, Rust, Docker.

setup.py is read as a syntax tree and never run.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from packaging.metadata import parse_email
from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name

from sm75 import cargolock
from sm75.lockfile import Declared
from sm75.treefiles import TreeFiles, refusal

SETUP = "setup.py"
PYPROJECT = "pyproject.toml"
CUDA_REQUIREMENTS = "requirements/cuda.txt"
COMMON_REQUIREMENTS = "requirements/common.txt"
TOOLCHAIN = "rust-toolchain.toml"
CARGO_LOCK = cargolock.FILE
RUST_BUILD = "tools/build_rust.py"
DOCKER = "docker/versions.json"
PKG_INFO = "PKG-INFO"
FILES = (
    SETUP, PYPROJECT, CUDA_REQUIREMENTS, COMMON_REQUIREMENTS, TOOLCHAIN, CARGO_LOCK, RUST_BUILD,
    DOCKER, PKG_INFO,
)  # fmt: skip

# The requirements that say something about the target or about what we leave out.
REQUIREMENTS = {
    CUDA_REQUIREMENTS: ("torch", "torchvision", "torchaudio", "flashinfer-python"),
    COMMON_REQUIREMENTS: ("transformers",),
}
# The machine that the package is for; markers are evaluated for it.
_TARGET = {"platform_machine": "aarch64", "platform_system": "Linux", "sys_platform": "linux"}
# What setup.py's own tests say in a CUDA build.
_SETUP_FACTS = {
    "_is_cuda": True, "_is_hip": False, "_is_cpu": False, "_is_xpu": False, "_is_tpu": False,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class RustPins:
    """What the tree says about its Rust frontend.

    Attributes:
        channel: The toolchain channel.
        cargo_lock_sha256: sha256 of ``rust/Cargo.lock``, in hexadecimal.
        git: Its git dependencies, ``repository@revision`` by the repository's last name.
    """

    channel: str
    cargo_lock_sha256: str
    git: tuple[str, ...]


def read_version(files: TreeFiles) -> str:
    """The release that the sdist says it is.

    Raises:
        LockError: PKG-INFO does not say.
    """
    version = parse_email(files.text(PKG_INFO))[0].get("version")
    if not version:
        raise refusal(PKG_INFO, "Version:", "there is none")
    return version


def read_python(files: TreeFiles) -> list[Declared]:
    """``requires-python``, the chosen requirements, the extensions, the images' arch list.

    Args:
        files: The tree; needs ``FILES``.

    Raises:
        LockError: A declaration is missing or of an unknown form; names file and declaration.
    """
    return [
        Declared(name="requires-python", file=PYPROJECT, value=_requires_python(files)),
        *(
            Declared(name=f"requirement:{name}", file=file, value=_requirement(files, file, name))
            for file, names in REQUIREMENTS.items()
            for name in names
        ),
        *_extensions(files.text(SETUP)),
        *_rust_extensions(files.text(RUST_BUILD)),
        Declared(name="docker:torch_cuda_arch_list", file=DOCKER, value=_docker_archs(files)),
    ]


def read_rust(files: TreeFiles) -> RustPins:
    """The Rust toolchain channel, Cargo.lock's hash and its git dependencies.

    Raises:
        LockError: A declaration is missing or of an unknown form.
    """
    table = _toml(files, TOOLCHAIN).get("toolchain")
    channel = table.get("channel") if isinstance(table, dict) else None
    if not isinstance(channel, str) or not re.fullmatch(r"\d+\.\d+(\.\d+)?", channel):
        raise refusal(TOOLCHAIN, '[toolchain] channel = "N.N"', f"it is {channel!r}")
    text = files.text(CARGO_LOCK)
    return RustPins(
        channel=channel,
        cargo_lock_sha256=hashlib.sha256(text.encode()).hexdigest(),
        git=tuple(place.key for place in cargolock.git_places(cargolock.parse(text))),
    )


def _requires_python(files: TreeFiles) -> str:
    project = _toml(files, PYPROJECT).get("project")
    value = project.get("requires-python") if isinstance(project, dict) else None
    try:
        if isinstance(value, str) and value and SpecifierSet(value):
            return value
    except InvalidSpecifier:
        pass
    raise refusal(PYPROJECT, '[project] requires-python = ">=3.x,…"', f"it is {value!r}")


def _requirement(files: TreeFiles, file: str, name: str) -> str:
    found = [
        requirement
        for requirement in _requirements(file, files.text(file))
        if canonicalize_name(requirement.name) == name
        and (requirement.marker is None or requirement.marker.evaluate(_TARGET))
    ]
    if len(found) != 1 or not found[0].specifier or found[0].url:
        raise refusal(
            file,
            f"one requirement of {name} with a version",
            "; ".join(str(requirement) for requirement in found) or "there is none",
        )
    return str(found[0].specifier)


def _requirements(file: str, text: str) -> Iterator[Requirement]:
    for number, line in enumerate(text.splitlines(), 1):
        entry = re.sub(r"(^|\s)#.*", "", line).strip()
        # Another requirements file (those that matter are read by name), or one more place to
        # look for packages: neither says what is required here.
        if not entry or re.fullmatch(r"(-r|--requirement|--extra-index-url)\s+\S+", entry):
            continue
        try:
            yield Requirement(entry)
        except InvalidRequirement as error:
            raise refusal(file, "requirements", f"line {number}: {entry}: {error}") from error


def _docker_archs(files: TreeFiles) -> str:
    try:
        value = json.loads(files.text(DOCKER))["variable"]["TORCH_CUDA_ARCH_LIST"]["default"]
    except (ValueError, KeyError, TypeError) as error:
        raise refusal(DOCKER, "variable.TORCH_CUDA_ARCH_LIST.default", repr(error)) from error
    if not isinstance(value, str) or not re.fullmatch(r"\d+\.\d\S*( \d+\.\d\S*)*", value):
        raise refusal(DOCKER, "variable.TORCH_CUDA_ARCH_LIST.default", f"it is {value!r}")
    return value


def _extensions(text: str) -> list[Declared]:
    """Extensions that a CUDA build lists: ``extension:<module>``, required or optional."""
    found: list[Declared] = []
    appended = 0
    looked_for = 'ext_modules.append(CMakeExtension(name="…"[, optional=True]))'
    tree = _syntax(SETUP, text)
    for node, reached in _statements(tree.body, True):
        if not _touches(node, "ext_modules"):
            continue
        if isinstance(node, ast.Assign | ast.AnnAssign) and _is_empty_list(node.value):
            continue
        name, optional = _appended(node)
        if name is None:
            raise refusal(SETUP, looked_for, f"line {node.lineno}: {ast.unparse(node)}")
        appended += 1
        if reached is not False:
            entry = Declared(
                name=f"extension:{name}", file=SETUP, value="optional" if optional else "required"
            )
            if entry.name in {other.name for other in found}:
                raise refusal(SETUP, looked_for, f"{name} is listed twice")
            found.append(entry)
    everywhere = sum(_is_call(node, "CMakeExtension") for node in ast.walk(tree))
    if not found or appended != everywhere:
        raise refusal(
            SETUP, looked_for, f"{appended} of {everywhere} CMakeExtension() are appended"
        )
    return found


def _appended(node: ast.stmt) -> tuple[str | None, bool]:
    """Name and optionality, when the statement is an append of one extension by literal name."""
    call = node.value if isinstance(node, ast.Expr) else None
    if not isinstance(call, ast.Call) or ast.unparse(call.func) != "ext_modules.append":
        return None, False
    inner = call.args[0] if len(call.args) == 1 else None
    if not isinstance(inner, ast.Call) or not _is_call(inner, "CMakeExtension") or inner.args:
        return None, False
    options = {
        keyword.arg: keyword.value.value
        for keyword in inner.keywords
        if isinstance(keyword.value, ast.Constant)
    }
    name = options.pop("name", None)
    optional = options.pop("optional", False)
    literal = len(inner.keywords) == len(options) + ("name" in ast.unparse(inner)) + bool(optional)
    if options or not literal or not isinstance(name, str) or not isinstance(optional, bool):
        return None, False
    return name, optional


def _statements(
    body: list[ast.stmt], reached: bool | None
) -> Iterator[tuple[ast.stmt, bool | None]]:
    """Simple statements outside functions and classes, and whether a CUDA build reaches them."""
    for node in body:
        if isinstance(node, ast.If):
            test = _test(node.test)
            yield from _statements(node.body, _both(reached, test))
            yield from _statements(node.orelse, _both(reached, None if test is None else not test))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        elif isinstance(node, ast.With | ast.For | ast.While | ast.Try):
            inner = [*node.body, *getattr(node, "orelse", []), *getattr(node, "finalbody", [])]
            for handler in getattr(node, "handlers", []):
                inner += handler.body
            yield from _statements(inner, _both(reached, None))
        else:
            yield node, reached


def _test(node: ast.expr) -> bool | None:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        value = _test(node.operand)
        return None if value is None else not value
    if isinstance(node, ast.BoolOp):
        values = [_test(value) for value in node.values]
        decisive = isinstance(node.op, ast.Or)
        if decisive in values:
            return decisive
        return None if None in values else not decisive
    if isinstance(node, ast.Call) and not node.args and not node.keywords:
        return _SETUP_FACTS.get(ast.unparse(node.func))
    return None


def _both(one: bool | None, two: bool | None) -> bool | None:
    if one is False or two is False:
        return False
    return None if one is None or two is None else True


def _touches(node: ast.stmt, name: str) -> bool:
    """Whether a statement assigns to a name, or calls a method of it."""
    if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if any(ast.unparse(target).split("[")[0] == name for target in targets):
            return True
    return any(
        isinstance(inner, ast.Attribute) and ast.unparse(inner.value) == name
        for inner in ast.walk(node)
    )


def _is_empty_list(node: ast.expr | None) -> bool:
    return isinstance(node, ast.List) and not node.elts


def _is_call(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) == name


def _rust_extensions(text: str) -> list[Declared]:
    """Rust programs: ``extension:<module>`` with manifest, arguments and features."""
    found: list[Declared] = []
    for node in ast.walk(_syntax(RUST_BUILD, text)):
        if not isinstance(node, ast.Call) or not _is_call(node, "RustExtension"):
            continue
        options = {keyword.arg: keyword.value for keyword in node.keywords}
        try:
            target, path, args, features = (
                ast.literal_eval(options.get(key, ast.Constant(default)))
                for key, default in (("target", ""), ("path", ""), ("args", ""), ("features", ""))
            )
        except ValueError as error:
            raise refusal(RUST_BUILD, "RustExtension of literals", str(error)) from error
        if not isinstance(target, str) or not target or not path or node.args:
            raise refusal(
                RUST_BUILD,
                "RustExtension(target=…, path=…)",
                f"line {node.lineno} has another form",
            )
        value = " ".join([path, *args, *(f"+{feature}" for feature in features)])
        found.append(Declared(name=f"extension:{target}", file=RUST_BUILD, value=value))
    if not found:
        raise refusal(RUST_BUILD, "RustExtension(target=…, path=…)", "there is none")
    return found


def _syntax(file: str, text: str) -> ast.Module:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError) as error:
        raise refusal(file, "Python", str(error)) from error


def _toml(files: TreeFiles, file: str) -> dict[str, Any]:
    try:
        return tomllib.loads(files.text(file))
    except (ValueError, RecursionError) as error:
        raise refusal(file, "TOML", str(error)) from error
