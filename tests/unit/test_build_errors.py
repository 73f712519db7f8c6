"""What a failed build says: the cause, the next command, the exit code."""

from __future__ import annotations

from collections import deque
from pathlib import Path

import pytest

from sm75.build import _explain
from sm75.compilelog import CompileLog
from sm75.errors import BuildError, DiskError, PatchError, Sm75Error

OBJECT = "CMakeFiles/_C_stable_libtorch.dir/csrc/cache_kernels.cu.o"
COMPILE = "sm75: step compile\n"
STOPPED = "ninja: build stopped: subcommand failed.\nsm75: ninja failed with exit code 1\n"
SCRIPT = "Script failed with status 1"


def explained(text: str, error: str = SCRIPT) -> Sm75Error:
    """The error that a log with this end leads to."""
    log = CompileLog()
    for line in text.splitlines():
        log.feed(line)
    with pytest.raises(Sm75Error) as caught:
        _explain(error, deque(text.splitlines(), maxlen=400), log, Path("logs/build-1.log"))
    assert "logs/build-1.log" in caught.value.why
    assert caught.value.fix
    return caught.value


@pytest.mark.parametrize(
    "message",
    [
        "csrc/cache_kernels.cu(12): error: identifier \"x\" is undefined",
        # A missing header, in GCC's words: nothing was killed.
        "a.cpp:2:10: fatal error: nope.h: No such file or directory\ncompilation terminated.",
        "a.cpp:1: error: unterminated #if",
        "internal compiler error: Segmentation fault signal 11",
    ],
)  # fmt: skip
def test_compiler_error(message: str) -> None:
    fault = explained(f"{COMPILE}FAILED: [code=1] {OBJECT} \nnvcc …\n{message}\n{STOPPED}")
    assert type(fault) is BuildError
    assert fault.exit_code == 7
    assert OBJECT in fault.what
    assert fault.why.startswith("compiler error")
    assert message.splitlines()[-1] in fault.why
    assert "--jobs" not in fault.fix


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("[code=137] ", "kill"),
        ("[code=1] ", "g++: fatal error: Killed signal terminated program cc1plus"),
        ("[code=9] ", "nvcc error   : 'cicc' died due to signal 9 (Kill signal)"),
        ("", "Killed"),
    ],
)
def test_killed_compiler(code: str, message: str) -> None:
    fault = explained(f"{COMPILE}FAILED: {code}{OBJECT} \n{message}\n{STOPPED}")
    assert type(fault) is BuildError
    assert "memory" in fault.why
    assert "--jobs 1" in fault.fix
    assert "resumes" in fault.fix
    # kill alone is ninja's business: nothing in the log says so.
    assert ("what is known of this" in fault.why) is (message != "kill" or "137" in code)


def test_what_the_knowledge_base_has_is_said() -> None:
    fault = explained(
        f"{COMPILE}FAILED: [code=1] {OBJECT} \n/bin/sh: 1: nvcc: not found\n{STOPPED}"
    )
    assert type(fault) is BuildError
    assert fault.exit_code == 7
    assert "There is no CUDA compiler" in fault.why
    plain = explained(f"{COMPILE}FAILED: [code=1] {OBJECT} \na.cu(1): error: x\n{STOPPED}")
    assert "what is known" not in plain.why


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (f"{COMPILE}FAILED: [code=1] {OBJECT} \nerror writing to x.s: No space left on device", ""),
        ("", "failed to link: No space left on device (os error 28)"),
        ("sm75: step install\nOSError: [Errno 28] No space left on device: 'vllm'\n", SCRIPT),
    ],
)
def test_full_disk(text: str, error: str) -> None:
    fault = explained(text, error)
    assert type(fault) is DiskError
    assert fault.exit_code == 9
    assert "free some space" in fault.fix


def test_full_disk_without_a_word_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """py-rattler-build drops the reason why it could not unpack a file."""
    error = "Failed to extract archive: failed to unpack `m10.py`"
    assert type(explained("", error)) is BuildError
    monkeypatch.setattr("sm75.build._free", lambda _: 3 << 20)
    fault = explained("", error)
    assert type(fault) is DiskError
    assert fault.exit_code == 9
    assert "3 MiB are free" in fault.why
    assert error in fault.why
    # A compiler's own error stays one.
    text = f"{COMPILE}FAILED: [code=1] {OBJECT} \na.cu(1): error: x\n{STOPPED}"
    assert type(explained(text)) is BuildError


def test_refused_patch() -> None:
    """As ``python -m sm75.patching apply`` says it inside the build."""
    refusal = "0001-cmake-turing-only.patch does not apply to CMakeLists.txt"
    fault = explained(
        f"sm75: step patch\nerror: {refusal}\n  why:  hunk 1 at line 40: the tree has other lines\n"
        "  next: …\nsm75: python failed with exit code 5\n"
    )
    assert type(fault) is PatchError
    assert fault.exit_code == 5
    assert fault.what == refusal
    assert "hunk 1 at line 40" in fault.why
    assert "patches check" in fault.fix


def test_a_line_like_a_refusal_in_another_step() -> None:
    fault = explained("sm75: step configure\nerror: x\nsm75: cmake failed with exit code 1\n")
    assert type(fault) is BuildError
    assert "'configure'" in fault.what


def test_environment() -> None:
    """Nothing of the build script's has run: the solver or the installer failed."""
    error = "failed to solve: Cannot solve the request because of: No candidates for cuda-nvcc"
    fault = explained("Starting build of 1 outputs\n", error + "\nmore of it")
    assert type(fault) is BuildError
    assert fault.exit_code == 7
    assert "'environment'" in fault.what
    assert "cuda-nvcc" in fault.what


@pytest.mark.parametrize("error", ["", "the build process ended without a word"])
def test_nothing_at_all(error: str) -> None:
    fault = explained("", error)
    assert type(fault) is BuildError
    assert error in fault.what


def test_only_the_end_of_a_long_log_is_shown() -> None:
    lines = "".join(f"line {n}\n" for n in range(300))
    fault = explained("sm75: step configure\n" + lines)
    assert "line 299" in fault.why
    assert "line 270" not in fault.why
