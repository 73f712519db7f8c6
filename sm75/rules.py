"""The rules behind ``verify``: each a function from a package's facts to what breaks it.

A rule that could not be checked (no ``build.ninja``, no ``cuobjdump``, no list of shim functions at
hand) says so and is not counted as kept.
"""

from __future__ import annotations

import configparser
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

import msgspec
from packaging.version import InvalidVersion, Version

from sm75 import cubin
from sm75.buildgraph import BuildGraph
from sm75.elf import version_key
from sm75.packagefacts import Library, PackageFacts
from sm75.words import counted

State = Literal["ok", "fail", "not checked"]

# Extensions vLLM 0.33.0 has for a CUDA build with nothing above 7.5 (its CMakeLists.txt).
DEVICE_EXTENSIONS = ("_C_stable_libtorch", "_moe_C_stable_libtorch")
HOST_EXTENSIONS = ("cumem_allocator", "spinloop", "fs_io_C")
# External projects of vLLM 0.33.0 (cmake/external_projects/) that have no sm_75 kernel, by the
# names their sources, targets and directories go by.
FORBIDDEN = (
    r"flash[-_]?attn|flash[-_]attention|vllm_fa\d|(?:^|[/_])fa[234]_",
    r"flash[-_]?mla",
    r"flash[-_]?kda",
    r"deep[-_]?gemm",
    r"deep[-_]?select",
    r"fmha[-_]sm100|(?:^|/)msa[-_/]",
    r"qutlass",
    r"tml[-_]fa4",
)
# Libraries of glibc and of the compiler that every g5g image has, the driver's libcuda, and what
# the target's torch has loaded before the first extension is imported.
NEEDED = re.compile(
    r"lib(?:c|m|dl|pthread|rt|util|gcc_s|stdc\+\+)\.so\.\d+"
    r"|ld-linux-(?:aarch64\.so\.1|x86-64\.so\.2)"
    r"|lib(?:torch|torch_cpu|torch_cuda|c10|c10_cuda)\.so|lib(?:cudart|nvrtc)\.so\.\d+|libcuda\.so\.1"
)


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What the package is held to.

    Attributes:
        version: vLLM's version.
        name: The conda package's name.
        subdir: Its platform.
        machine: ELF machine of every library.
        arch: The only architecture of its machine code.
        ptx: Whether every source must be there as PTX for that architecture too; else PTX is
            refused.
        python: Python minor the extensions may assume (the oldest a contract has).
        ceilings: Highest versions by family. glibc 2.34 is Amazon Linux 2023's; GLIBCXX 3.4.29 and
            CXXABI 1.3.13 are those of GCC 11, its libstdc++ (GCC manual, 'ABI Policy').
        entry_point: Console script and what it calls.
        rust_modes: What ``extra.rust_frontend`` of ``about.json`` may be.
        shim: Functions of torch's C shim that the oldest supported torch has; None: not known.
        build_paths: Absolute paths of this build that no file may hold.
    """

    version: str
    name: str = "vllm-sm75"
    subdir: str = "linux-aarch64"
    machine: str = "aarch64"
    arch: str = "sm_75"
    ptx: bool = False
    python: str = "3.11"
    ceilings: tuple[tuple[str, str], ...] = (
        ("GLIBC", "2.34"),
        ("GLIBCXX", "3.4.29"),
        ("CXXABI", "1.3.13"),
    )
    entry_point: tuple[str, str] = ("vllm", "vllm.entrypoints.cli.main:main")
    rust_modes: tuple[str, ...] = ("source", "prebuilt", "none")
    shim: frozenset[str] | None = None
    build_paths: tuple[str, ...] = ()


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """What one rule found.

    Attributes:
        rule: Its short name.
        state: ``ok``, ``fail`` or ``not checked``.
        evidence: What was seen: the offenders, or the figure that shows that all is well.
    """

    rule: str
    state: State
    evidence: str


def _judged(rule: str, faults: Iterable[str], good: str) -> Finding:
    listed = list(faults)
    return Finding(
        rule=rule, state="fail" if listed else "ok", evidence="; ".join(listed) if listed else good
    )


def _extension(library: Library) -> str:
    """``…/site-packages/vllm/spinloop.abi3.so`` -> ``spinloop``; empty when it is none."""
    match = re.search(r"site-packages/vllm/([^/]+)\.abi3\.so$", library.name)
    return match[1] if match else ""


def _ours(facts: PackageFacts) -> list[Library]:
    """Libraries this build compiled: all but a Rust binary taken as published."""
    kept = _rust_mode(facts) == "prebuilt"
    return [lib for lib in facts.libraries if not (kept and lib.name.endswith("/vllm-rs"))]


def _rust_mode(facts: PackageFacts) -> str:
    extra = facts.info.get("about", {}).get("extra") or {}
    return str(extra.get("rust_frontend", ""))


def _identity(facts: PackageFacts, policy: Policy) -> Finding:
    index = facts.info["index"]
    expected = {"name": policy.name, "version": policy.version, "subdir": policy.subdir}
    return _judged(
        "identity",
        (
            f"{key} is {index.get(key)!r}, not {value!r}"
            for key, value in expected.items()
            if index.get(key) != value
        ),
        f"{policy.name} {policy.version} {policy.subdir}",
    )


def _extensions(facts: PackageFacts, policy: Policy) -> Finding:
    expected = Counter((*DEVICE_EXTENSIONS, *HOST_EXTENSIONS))
    found = Counter(
        _extension(library) or library.name
        for library in facts.libraries
        if not library.name.endswith("/vllm-rs")
    )
    return _judged(
        "extensions",
        [
            *(f"{name} is missing" for name in sorted((expected - found).elements())),
            *(f"{name} should not be there" for name in sorted((found - expected).elements())),
        ],
        f"{len(expected)}: {', '.join(expected)}",
    )


def _machine(facts: PackageFacts, policy: Policy) -> Finding:
    return _judged(
        "machine",
        (
            f"{lib.name} is built for {lib.elf.machine}"
            for lib in facts.libraries
            if lib.elf.machine != policy.machine
        ),
        f"{policy.machine}: {len(facts.libraries)} ELF files",
    )


def _sass(facts: PackageFacts, policy: Policy) -> Finding:
    faults = []
    total = 0
    for lib in facts.libraries:
        counts = Counter(code.arch for code in lib.codes if code.kind == "sass")
        total += counts[policy.arch]
        wrong = sorted(counts.keys() - {policy.arch}, key=cubin.arch_key)
        if wrong:
            faults.append(f"{lib.name} has code for {', '.join(wrong)}")
        if _extension(lib) in DEVICE_EXTENSIONS and not counts[policy.arch]:
            faults.append(f"{lib.name} has no code for {policy.arch}")
        bare = {code.container for code in lib.codes} - {
            code.container
            for code in lib.codes
            if code.kind == "sass" and cubin.runs_on(code, policy.arch)
        }
        if bare and not wrong:
            faults.append(f"{lib.name}: {len(bare)} compiled sources have none for {policy.arch}")
    return _judged("SASS", faults, f"{policy.arch} only: {counted(total, 'cubin')}")


def _ptx(facts: PackageFacts, policy: Policy) -> Finding:
    if policy.ptx:
        return _ptx_everywhere(facts, policy)
    faults = []
    for lib in facts.libraries:
        other = Counter(f"{code.kind} {code.arch}" for code in lib.codes if code.kind != "sass")
        faults += [f"{lib.name} has {what} ×{count}" for what, count in sorted(other.items())]
    return _judged("no PTX", faults, "no PTX and no LTO-IR")


def _ptx_everywhere(facts: PackageFacts, policy: Policy) -> Finding:
    """PTX for the architecture in each compiled source, and no other."""
    wanted = policy.arch.replace("sm_", "compute_")
    faults = []
    total = 0
    for lib in facts.libraries:
        have = {c.container for c in lib.codes if c.kind == "ptx" and c.arch == policy.arch}
        bare = {code.container for code in lib.codes} - have
        if bare:
            faults.append(f"{lib.name}: {len(bare)} compiled sources have none for {wanted}")
        other = Counter(
            f"{code.kind} {code.arch}"
            for code in lib.codes
            if code.kind != "sass" and (code.kind, code.arch) != ("ptx", policy.arch)
        )
        faults += [f"{lib.name} has {what} ×{count}" for what, count in sorted(other.items())]
        total += len(have)
    return _judged("PTX", faults, f"{wanted} in each of {total} compiled sources")


def _second_reading(facts: PackageFacts, policy: Policy) -> Finding:
    rule = "cuobjdump agrees"
    read = [(lib, lib.listed) for lib in facts.libraries if lib.listed is not None]
    if not read:
        return Finding(rule=rule, state="not checked", evidence="no cuobjdump was given")
    return _judged(
        rule,
        (
            f"{lib.name}: {difference}"
            for lib, listed in read
            if (difference := cubin.disagreement(lib.codes, listed))
        ),
        f"{sum(len(listed) for _, listed in read)} entries in both readings",
    )


def _ceilings(facts: PackageFacts, policy: Policy) -> Finding:
    faults = []
    highest: dict[str, str] = {}
    for lib in facts.libraries:
        for family, ceiling in policy.ceilings:
            version = lib.elf.versions.get(family, "0")
            highest[family] = max(highest.get(family, "0"), version, key=version_key)
            if version_key(version) > version_key(ceiling):
                faults.append(f"{lib.name} needs {family} {version}, the ceiling is {ceiling}")
    return _judged(
        "glibc and libstdc++",
        faults,
        ", ".join(f"{name} {highest.get(name, '0')} <= {top}" for name, top in policy.ceilings),
    )


def _needed(facts: PackageFacts, policy: Policy) -> Finding:
    return _judged(
        "needed libraries",
        (
            f"{lib.name} needs {name}"
            for lib in facts.libraries
            for name in lib.elf.needed
            if not NEEDED.fullmatch(name)
        ),
        ", ".join(sorted({name for lib in facts.libraries for name in lib.elf.needed})),
    )


def _runpath(facts: PackageFacts, policy: Policy) -> Finding:
    return _judged(
        "run path",
        (
            f"{lib.name} has {entry}"
            for lib in facts.libraries
            for entry in (*lib.elf.rpath, *lib.elf.runpath)
            if not re.fullmatch(r"(?:\$ORIGIN|\$\{ORIGIN\})(?:/.*)?", entry)
        ),
        "empty or $ORIGIN-relative",
    )


def _build_paths(facts: PackageFacts, policy: Policy) -> Finding:
    found = dict(facts.leaks)
    for lib in _ours(facts):
        if lib.build_places:
            found[lib.name] = (*found.get(lib.name, ()), *lib.build_places)
    return _judged(
        "no build path",
        (
            f"{name} holds {paths[0]}" + (f" and {len(paths) - 1} more" if len(paths) > 1 else "")
            for name, paths in sorted(found.items())
        ),
        f"none in {counted(len(facts.names), 'file')}",
    )


def _stripped(facts: PackageFacts, policy: Policy) -> Finding:
    return _judged(
        "stripped",
        (
            f"{lib.name} has a symbol table"
            + (f" naming {lib.elf.file_symbols[0]}" if lib.elf.file_symbols else "")
            for lib in _ours(facts)
            if lib.elf.symbol_table
        ),
        f"{counted(len(_ours(facts)), 'library', 'libraries')} without symbol table",
    )


def _abi3(facts: PackageFacts, policy: Policy) -> Finding:
    audits = [(lib.name, lib.abi3) for lib in facts.libraries if lib.abi3 is not None]
    return _judged(
        "abi3",
        (
            f"{name} uses {', '.join(audit.outside[:3])}, not in the stable ABI"
            if audit.outside
            else f"{name} needs Python {audit.computed}, the oldest target has {audit.baseline}"
            for name, audit in audits
            if not audit.sound
        ),
        f"{counted(len(audits), 'extension keeps', 'extensions keep')} the stable ABI of Python "
        f"{policy.python}",
    )


def _torch_cxx(facts: PackageFacts, policy: Policy) -> Finding:
    return _judged(
        "no torch C++ symbols",
        (
            f"{lib.name} needs {len(lib.elf.torch_cxx)} ({lib.elf.torch_cxx[0]}, …)"
            for lib in facts.libraries
            if lib.elf.torch_cxx
        ),
        "none undefined",
    )


def _torch_c(facts: PackageFacts, policy: Policy) -> Finding:
    rule = "torch C shim"
    used = sorted({name for lib in facts.libraries for name in lib.elf.torch_c})
    if policy.shim is None:
        evidence = f"{counted(len(used), 'function')} used; no list of declared ones was given"
        return Finding(rule=rule, state="not checked", evidence=evidence)
    shim = policy.shim
    return _judged(
        rule,
        (f"{name} is not declared by the oldest torch" for name in used if name not in shim),
        f"{counted(len(used), 'function')}, all declared",
    )


def _dist_info(facts: PackageFacts, policy: Policy) -> Finding:
    faults = []
    if not facts.metadata:
        faults.append("there is no vllm-*.dist-info/METADATA")
    elif facts.metadata.get("name") != "vllm" or not _same(
        facts.metadata.get("version", ""), policy.version
    ):
        faults.append(
            f"METADATA says {facts.metadata.get('name')} {facts.metadata.get('version')},"
            f" not vllm {policy.version}"
        )
    parser = configparser.ConfigParser(delimiters=("=",), interpolation=None)
    parser.optionxform = str  # type: ignore[assignment, method-assign]  # names are case-sensitive
    try:
        parser.read_string(facts.entry_points)
        script = parser.get("console_scripts", policy.entry_point[0], fallback="")
    except configparser.Error as err:
        script = f"unreadable ({err.message})"
    if script != policy.entry_point[1]:
        faults.append(f"entry point {policy.entry_point[0]} is {script or 'missing'}")
    return _judged(
        "dist-info", faults, f"vllm {policy.version}, {policy.entry_point[0]} = {script}"
    )


def _command(facts: PackageFacts, policy: Policy) -> Finding:
    """The console script exists: as a file, or as an entry point that conda makes one of."""
    name, target = policy.entry_point
    linked = (facts.info.get("link") or {}).get("noarch") or {}
    made = [re.sub(r"\s*=\s*", " = ", entry.strip()) for entry in linked.get("entry_points", ())]
    there = f"bin/{name}" in facts.names or f"{name} = {target}" in made
    return _judged(
        "command",
        [] if there else [f"nothing puts {name} into bin/: neither a file nor link.json"],
        f"{name} is put into bin/",
    )


def _same(one: str, other: str) -> bool:
    try:
        return Version(one) == Version(other)
    except InvalidVersion:
        return False


def _rust(facts: PackageFacts, policy: Policy) -> Finding:
    mode = _rust_mode(facts)
    present = any(lib.name.endswith("/vllm-rs") for lib in facts.libraries)
    faults = []
    if mode not in policy.rust_modes:
        modes = ", ".join(policy.rust_modes)
        faults.append(f"about.json's extra.rust_frontend is {mode!r}, not one of {modes}")
    elif present == (mode == "none"):
        faults.append(f"mode {mode}, but vllm-rs is {'there' if present else 'missing'}")
    return _judged("Rust frontend", faults, f"{mode}; vllm-rs {'present' if present else 'absent'}")


RULES: tuple[Callable[[PackageFacts, Policy], Finding], ...] = (
    _identity,
    _extensions,
    _machine,
    _sass,
    _ptx,
    _second_reading,
    _ceilings,
    _needed,
    _runpath,
    _build_paths,
    _stripped,
    _abi3,
    _torch_cxx,
    _torch_c,
    _dist_info,
    _command,
    _rust,
)


def graph_rules(graph: BuildGraph | None, policy: Policy) -> tuple[Finding, ...]:
    """The rules on the build a package came from; not checked when that is not known."""
    rules = ("no foreign kernels", "build targets", "build arches")
    if graph is None:
        return tuple(
            Finding(rule=rule, state="not checked", evidence="no build.ninja was given")
            for rule in rules
        )
    wanted = [policy.arch, *([policy.arch.replace("sm_", "compute_")] if policy.ptx else [])]
    pattern = re.compile("|".join(FORBIDDEN), re.IGNORECASE)
    foreign = [
        name
        for name in (*graph.objects, *graph.libraries, *graph.sources)
        # only the tail: the directory a tree happens to be in says nothing about what it holds
        if pattern.search("/".join(name.rsplit("/", 3)[-3:])) or pattern.search(_target(name))
    ]
    strange = set(graph.targets) - {*DEVICE_EXTENSIONS, *HOST_EXTENSIONS}
    objects = f"{counted(len(graph.objects), 'object')}, {len(graph.cuda_objects)} of them CUDA"
    return (
        _judged(rules[0], foreign[:5], f"none in {objects}"),
        _judged(
            rules[1],
            [
                *(f"target {name} should not be built" for name in sorted(strange)),
                *([] if graph.objects else ["it compiles nothing"]),
            ],
            ", ".join(graph.targets),
        ),
        _judged(
            rules[2],
            [
                *(f"it asks for {code}" for code in graph.codes if code not in wanted),
                *(f"it never asks for {code}" for code in wanted if code not in graph.codes),
            ],
            f"{' and '.join(wanted)} only",
        ),
    )


def _target(name: str) -> str:
    match = re.search(r"CMakeFiles/([^/]+)\.dir/", name)
    return match[1] if match else ""
