"""Whether a place of a log belongs to a build or to a server.

Some failures look the same in both (``Killed``) and want other steps. The lines before decide.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from sm75.explain import lines
from sm75.explain.knowledge import Area

# Words of programs that compile, of pip and of Docker's builder.
_BUILD = re.compile(
    r"\b(?:CMake|ninja|nvcc|cicc|ptxas|cc1plus|rustc|cargo)\b|^make(?:\[\d+\])?: |"
    r"Building (?:CXX|CUDA|wheel|editable)|^-- [A-Z]|^#\d{1,4} (?:\d+\.\d|\[)|"
    r"RUN (?:pip|uv|python)|orchestrator\.py build"
)
# Words of vLLM while it starts and serves, and of what runs it.
_SERVE = re.compile(
    r"checkpoint shards|vLLM API server|EngineCore|APIServer|VllmWorker|Uvicorn running|vllm serve|"
    r"vllm\.entrypoints|vllm[\w.@-]{0,20}\.service|vllm\[\d+\]|\bVLLM::|orchestrator\.py serve"
)
# A cheap test of several lines, before the patterns; each match has one of these.
_WORDS = (
    "CMake", "ninja", "make", "nvcc", "cicc", "ptxas", "cc1plus", "rustc", "cargo", "Building ",
    "-- ", "#", "RUN ", "orchestrator.py", "checkpoint shards", "LLM", "vllm", "Vllm",
    "EngineCore", "APIServer", "Uvicorn", ".py:",
)  # fmt: skip


class Context:
    """Follows a log.

    Args:
        areas: Those that are asked about; where it is one, it is the answer.
    """

    def __init__(self, areas: Iterable[Area] = ()) -> None:
        wanted = set(areas)
        self._fixed: Area | None = next(iter(wanted)) if len(wanted) == 1 else None
        self._seen: Area | None = None

    @property
    def area(self) -> Area | None:
        """That of the last line that said; ``None`` when none has."""
        return self._fixed or self._seen

    def read(self, text: str) -> None:
        """Take the next line.

        Args:
            text: The line.
        """
        if not self._fixed and (found := _area(text)):
            self._seen = found

    def skip(self, several: Iterable[str], whole: str) -> None:
        """Take several lines at once.

        Args:
            several: The lines, the last one first.
            whole: The same lines as one text.
        """
        if self._fixed or not any(word in whole for word in _WORDS):
            return
        self._seen = next((found for text in several if (found := _area(text))), self._seen)


def _area(text: str) -> Area | None:
    # vLLM may compile a kernel while it serves, and print what a user says of compilers.
    if lines.level(text) or _SERVE.search(text):
        return "serve"
    return "build" if _BUILD.search(text) else None
