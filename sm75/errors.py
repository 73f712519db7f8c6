"""Errors made for people.

Every foreseeable fault is one of these. Each says what is wrong, where, why, and the next
command; the command line prints it without a traceback and exits with ``exit_code``.

=========  ==========================================================
exit code  meaning
=========  ==========================================================
0          done
1          a check failed (``verify``, ``patches check``, ``lock --check``, ``doctor``), or
           ``explain LOG`` knows nothing that is in the log, the model of ``serve`` does not fit,
           or ``bench`` met nonsense, failed requests, or counts that cannot be
2          wrong command line; ``health``, ``bench``: the server refuses the key
3          lock: unknown release, bad or disagreeing lock file
4          fetch: unreachable, truncated, altered or unhashed input
5          patch: a patch does not apply at its exact place
6          toolchain: a compiler or tool is missing or unsuitable
7          build: a step of the recipe failed
8          channel: a package or the index is damaged or incomplete
9          the disk is full or a file cannot be written
10         another run holds the lock, or ``serve``: another server has the port
11         ``health``, ``bench``: the server does not answer
70         a fault in this program (please report it)
130        interrupted (Ctrl-C)
=========  ==========================================================
"""

from __future__ import annotations


class Sm75Error(Exception):
    """A fault a person can act on.

    Args:
        what: One sentence: what is wrong and where.
        why: The reason or the evidence, when it is known.
        fix: The next command or action.
    """

    exit_code = 70

    def __init__(self, what: str, *, why: str = "", fix: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.why = why
        self.fix = fix

    def __str__(self) -> str:
        lines = [self.what]
        if self.why:
            lines.append(f"  why:  {self.why}")
        if self.fix:
            lines.append(f"  next: {self.fix}")
        return "\n".join(lines)


class CheckFailed(Sm75Error):
    """A check ran to its end and its verdict is no."""

    exit_code = 1


class UsageError(Sm75Error):
    """The command line asks for something that does not exist."""

    exit_code = 2


class LockError(Sm75Error):
    """The release lock is missing, malformed, or disagrees with the pinned tree."""

    exit_code = 3


class FetchError(Sm75Error):
    """An input cannot be had, or is not what the lock pins."""

    exit_code = 4


class PatchError(Sm75Error):
    """A patch does not apply at its exact place."""

    exit_code = 5


class ToolchainError(Sm75Error):
    """A compiler or build tool is missing or unsuitable."""

    exit_code = 6


class BuildError(Sm75Error):
    """A step of the recipe failed."""

    exit_code = 7


class ChannelError(Sm75Error):
    """A package or the channel's index is damaged or incomplete."""

    exit_code = 8


class DiskError(Sm75Error):
    """The disk is full or a file cannot be written."""

    exit_code = 9


class ServerError(Sm75Error):
    """A server does not answer."""

    exit_code = 11


class BusyError(Sm75Error):
    """Another run holds the lock."""

    exit_code = 10
