"""Pins that vLLM declares in its CMake files, as a CUDA build sees them.

Every reader names one form of declaration. A release that declares otherwise is refused.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator

from sm75.cmakescript import Call, Script, read_script
from sm75.lockfile import Declared
from sm75.treefiles import TreeFiles, refusal

MAIN = "CMakeLists.txt"
EXTERNAL = "cmake/external_projects"
# Files that declare nothing we read: functions, and the CPU build.
_HELPERS = {"cmake/utils.cmake", "cmake/cpu_extension.cmake"}
_TARGET_VERSION = re.compile(r"TORCH_TARGET_VERSION=0x([0-9A-Fa-f]{16})ULL")
_REPOSITORY = re.compile(r"https://(?:github\.com/)?([\w.-]+(?:/[\w.-]+?)+?)(?:\.git)?/?")
_FETCHERS = {"fetchcontent_declare", "fetchcontent_populate", "externalproject_add"}


def facts(cuda: str) -> dict[str, str]:
    """What is known of a CUDA build before CMake runs.

    Args:
        cuda: Version of nvcc, for instance ``13.2.78``.
    """
    return {
        "VLLM_TARGET_DEVICE": "cuda",
        "VLLM_GPU_LANG": "CUDA",
        "CUDA_FOUND": "TRUE",
        "HIP_FOUND": "FALSE",
        "PYTORCH_FOUND_HIP": "FALSE",
        "CMAKE_CUDA_COMPILER_VERSION": cuda,
        "CMAKE_CURRENT_LIST_DIR": "",
    }


def read_cmake(files: TreeFiles, cuda: str) -> list[Declared]:
    """All pins of the CMake files.

    Args:
        files: The tree; needs ``CMakeLists.txt`` and ``cmake/external_projects/*.cmake``.
        cuda: Version of nvcc.

    Raises:
        LockError: A declaration is missing or of an unknown form; names file and declaration.
    """
    known = facts(cuda)
    main = read_script(MAIN, files.text(MAIN), known)
    declared = [
        _declared("CUTLASS_REVISION", main, main.value("CUTLASS_REVISION")),
        _declared("TORCH_SUPPORTED_VERSION_CUDA", main, main.value("TORCH_SUPPORTED_VERSION_CUDA")),
        _declared("CUDA_SUPPORTED_ARCHS", main, _architectures(main)),
        _declared("PYTHON_SUPPORTED_VERSIONS", main, _pythons(main)),
        *_compilers(main),
        *_targets(main),
        *_abi(main),
        *_externals(main),
    ]
    for path in _included(main, files):
        script = read_script(path, files.text(path), known)
        projects = list(_externals(script))
        if len(projects) != 1:
            raise script.refuse(
                "FetchContent_Declare(… GIT_REPOSITORY … GIT_TAG …), once",
                f"it declares {len(projects)} sources: "
                + (", ".join(project.name for project in projects) or "none"),
            )
        declared += [*projects, *_targets(script)]
    return declared


def _declared(name: str, script: Script, value: str) -> Declared:
    return Declared(name=name, file=script.file, value=value)


def _architectures(main: Script) -> str:
    value = main.value("CUDA_SUPPORTED_ARCHS")
    if not re.fullmatch(r"\d+\.\d+[af]?(;\d+\.\d+[af]?)*", value):
        raise main.refuse('set(CUDA_SUPPORTED_ARCHS "7.5;…")', f"its value is {value!r}")
    return value


def _pythons(main: Script) -> str:
    values = main.values("PYTHON_SUPPORTED_VERSIONS")
    if not values or not all(re.fullmatch(r"3\.\d+", value) for value in values):
        raise main.refuse('set(PYTHON_SUPPORTED_VERSIONS "3.x" …)', f"its value is {values}")
    return ";".join(values)


def _compilers(main: Script) -> Iterator[Declared]:
    """The oldest GCC, for all builds (``gcc``) and for those of CUDA kernels (``gcc:cuda``)."""
    looked_for = 'if(… CMAKE_CXX_COMPILER_VERSION VERSION_LESS "N") with a FATAL_ERROR'
    floors: dict[str, str] = {}
    for call in main.calls:
        for condition in call.conditions:
            if "CMAKE_CXX_COMPILER_VERSION" not in condition:
                continue
            tests = _conjuncts(condition)
            version = tests.pop(("CMAKE_CXX_COMPILER_VERSION", "VERSION_LESS"), None)
            compiler = tests.pop(("CMAKE_CXX_COMPILER_ID", "STREQUAL"), None)
            language = tests.pop(("VLLM_GPU_LANG", "STREQUAL"), None)
            if tests or version is None or compiler != "GNU" or language not in (None, "CUDA"):
                raise main.refuse(looked_for, f"line {call.line}: if({' '.join(condition)})")
            if call.name != "message" or call.args[:1] != ("FATAL_ERROR",):
                raise main.refuse(looked_for, f"line {call.line}: {call.name}({call.args[:1]} …)")
            name = "gcc:cuda" if language else "gcc"
            if floors.setdefault(name, version) != version:
                raise main.refuse(
                    looked_for, f"both GCC {floors[name]} and {version} are asked for"
                )
    if "gcc" not in floors:
        raise main.refuse(looked_for, "there is no such test")
    yield from (_declared(name, main, version) for name, version in floors.items())


def _conjuncts(condition: tuple[str, ...]) -> dict[tuple[str, str], str]:
    """``A op B AND C op D`` as ``{(A, op): B, (C, op): D}``; anything else comes out odd."""
    tests: dict[tuple[str, str], str] = {}
    words = list(condition)
    while words:
        test, rest = words[:3], words[3:]
        if len(test) == 3 and (not rest or rest[0] == "AND"):
            tests[(test[0], test[1])] = test[2]
        else:
            tests[(" ".join(words), "")] = ""
            return tests
        words = rest[1:]
    return tests


def _targets(script: Script) -> Iterator[Declared]:
    """Extensions: ``target:<name>``, with language and the Python ABI that they may use."""
    seen: set[str] = set()
    for call in script.named("define_extension_target"):
        name = script.expand(call.args[0]) if call.args else ""
        language = _keyword(call, "LANGUAGE")
        abi = _keyword(call, "USE_SABI")
        if not name or name in seen or language is None or abi is None:
            raise script.refuse(
                "define_extension_target(NAME … LANGUAGE … USE_SABI …)",
                f"line {call.line}: {name or 'no name'}"
                + (" is declared twice" if name in seen else ""),
            )
        seen.add(name)
        yield _declared(f"target:{name}", script, f"{script.expand(language)} abi3 {abi}")


def _abi(main: Script) -> Iterator[Declared]:
    """``TORCH_TARGET_VERSION`` of each extension with device code, as a torch version."""
    looked_for = "target_compile_definitions(… TORCH_TARGET_VERSION=0x…ULL)"
    found: dict[str, str] = {}
    for call in main.calls:
        for arg in call.args:
            if not arg.startswith("TORCH_TARGET_VERSION"):
                continue
            hit = _TARGET_VERSION.fullmatch(arg)
            if hit is None or call.name != "target_compile_definitions" or call.args[0] in found:
                raise main.refuse(
                    looked_for, f"line {call.line}: {call.name}({' '.join(call.args)})"
                )
            found[call.args[0]] = _torch_version(main, hit[1])
    wanted = {
        target.name.removeprefix("target:")
        for target in _targets(main)
        if target.value.startswith("CUDA ")
    }
    if not found or found.keys() != wanted:
        raise main.refuse(
            looked_for,
            f"extensions with device code: {', '.join(sorted(wanted)) or 'none'}; "
            f"with such a definition: {', '.join(sorted(found)) or 'none'}",
        )
    yield from (
        _declared(f"TORCH_TARGET_VERSION:{target}", main, version)
        for target, version in found.items()
    )


def _torch_version(script: Script, digits: str) -> str:
    """Decode torch's packed ABI version.

    One byte each for major, minor and patch from the top, then a tag (torch 2.12's
    ``torch/headeronly/version.h``).
    """
    major, minor, patch, *tag = bytes.fromhex(digits)
    if any(tag) or major < 2:
        raise script.refuse("a TORCH_TARGET_VERSION without ABI tag", f"it is 0x{digits}")
    return f"{major}.{minor}" + (f".{patch}" if patch else "")


def _externals(script: Script) -> Iterator[Declared]:
    """Sources fetched from elsewhere: ``external:<name>``, ``owner/repository@revision``.

    GitHub goes without saying, any other host is named: a lock is no list of places to download
    from.
    """
    looked_for = "FetchContent_Declare(NAME … GIT_REPOSITORY … GIT_TAG …)"
    for call in script.calls:
        if call.name not in _FETCHERS:
            continue
        if call.name == "fetchcontent_populate" and len(call.args) == 1:
            continue
        if call.args[1:2] == ("SOURCE_DIR",) and "GIT_REPOSITORY" not in call.args:
            # A directory of the developer's; only reached when its variable is set in the tree.
            raise script.refuse(looked_for, f"line {call.line}: a source that is already there")
        repository, revision = _keyword(call, "GIT_REPOSITORY"), _keyword(call, "GIT_TAG")
        if call.name == "externalproject_add" or repository is None or revision is None:
            raise script.refuse(looked_for, f"line {call.line}: {call.name}({' '.join(call.args)})")
        where = _REPOSITORY.fullmatch(script.expand(repository))
        if where is None:
            raise script.refuse(looked_for, f"line {call.line}: {script.expand(repository)}")
        yield _declared(f"external:{call.args[0]}", script, f"{where[1]}@{script.expand(revision)}")


def _included(main: Script, files: TreeFiles) -> list[str]:
    """The external projects' files: those included, which must be those that are there."""
    included = []
    for call in main.named("include", "add_subdirectory"):
        target = main.expand(call.args[0]).lstrip("/") if call.args else ""
        path = posixpath.normpath(target)
        module = re.fullmatch(r"\w+", target) is not None
        if call.name == "include" and (module or path in _HELPERS):
            continue
        if call.name != "include" or posixpath.dirname(path) != EXTERNAL:
            raise main.refuse(
                f"include({EXTERNAL}/….cmake)", f"line {call.line}: {call.name}({target})"
            )
        included.append(path)
    there = files.below(EXTERNAL, ".cmake")
    if sorted(included) != there:
        odd = sorted(set(included) ^ set(there)) or included
        raise refusal(
            MAIN, f"include({EXTERNAL}/….cmake) of every file there, once", ", ".join(odd)
        )
    return there


def _keyword(call: Call, keyword: str) -> str | None:
    """The argument after a keyword that stands exactly once."""
    if call.args.count(keyword) != 1:
        return None
    after = call.args[call.args.index(keyword) + 1 :]
    return after[0] if after else None
