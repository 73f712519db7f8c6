"""The one place that runs py-rattler's coroutines.

py-rattler 0.28 kills the interpreter (SIGSEGV or SIGABRT) in about half of the short programs that
end right after one of its coroutines: a thread of its Rust runtime still drops Python objects while
CPython tears down (PyO3/pyo3-async-runtimes issue 40). Two remedies, both here:

* :func:`run` makes the exit of the process wait a moment, before the teardown, for those threads;
* a command line that wants neither the wait nor any risk ends with :func:`exit_process`, which
  flushes the standard streams and leaves through ``os._exit``.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import os
import sys
import threading
import time
from collections.abc import Coroutine
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")

# Seconds. Measured with py-rattler 0.28 on 2 cores, 20 processes each: 10 crashed without the
# wait, none with 0.2 s.
_SETTLE = 0.2


@functools.cache
def _settle_at_exit() -> None:
    atexit.register(time.sleep, _SETTLE)


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run one coroutine to its end, also from inside a running event loop.

    Args:
        coroutine: Something of ``rattler``.

    Returns:
        Its result; its exception is raised.
    """
    _settle_at_exit()
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    result: list[T] = []
    failure: list[BaseException] = []

    def target() -> None:
        try:
            result.append(asyncio.run(coroutine))
        except BaseException as err:  # handed to the caller below
            failure.append(err)

    thread = threading.Thread(target=target, name="rattler")
    thread.start()
    thread.join()
    if failure:
        raise failure[0]
    return result[0]


def exit_process(code: int) -> NoReturn:
    """End the process now, without the interpreter's teardown.

    Nothing registered with ``atexit`` runs: close files and locks first.

    Args:
        code: Exit status.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
