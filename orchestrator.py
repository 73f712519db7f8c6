#!/usr/bin/env python3
"""The command line of vllm-sm75. Everything it does is in the package ``sm75``.

Any python3 >= 3.11 starts it; it makes ``.venv`` from ``lock/tools.txt`` and goes on there.
Exit codes are those of ``sm75/errors.py``.
"""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))

from sm75 import venv  # noqa: E402

if __name__ == "__main__":
    for number, stream in ((0, sys.stdin), (1, sys.stdout), (2, sys.stderr)):
        if stream is None:  # closed by the shell; any file opened next would take its number
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
            name = ("stdin", "stdout", "stderr")[number]
            setattr(sys, name, os.fdopen(number, "r" if number == 0 else "w", closefd=False))
        elif number and isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            # A locale may lack …, × or a letter of a file's name.
            stream.reconfigure(errors="backslashreplace")
    # `channel lock` and `lock --vllm` resolve the closure with uv.
    _resolves = sys.argv[1:2] == ["lock"] and any(
        argument.startswith(("--vllm", "--tools")) for argument in sys.argv[2:]
    )
    _dev = (
        sys.argv[1:2] in (["test"], ["lint"])
        or sys.argv[1:3] == ["channel", "lock"]
        or (_resolves and "--no-closure" not in sys.argv)
    )
    venv.ensure(ROOT, dev=_dev)

import signal  # noqa: E402
import subprocess  # noqa: E402

import click  # noqa: E402

from sm75 import __version__  # noqa: E402
from sm75.cli import (  # noqa: E402
    box,
    building,
    channels,
    kernels,
    locking,
    patching,
    reporting,
)
from sm75.errors import Sm75Error, UsageError  # noqa: E402
from sm75.words import visible  # noqa: E402


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="vllm-sm75")
def cli() -> None:
    """Build vLLM for AWS g5g (Graviton2 + T4G, sm_75) as an offline conda channel."""


for _command in (
    *building.COMMANDS, *patching.COMMANDS, *locking.COMMANDS, *channels.COMMANDS,
    *kernels.COMMANDS, *box.COMMANDS, *reporting.COMMANDS,
):  # fmt: skip
    cli.add_command(_command)


@cli.command(context_settings={"ignore_unknown_options": True})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def test(arguments: tuple[str, ...]) -> None:
    """Run lint, types and all tests, with the build of the real package among them."""
    steps = [["-m", "pytest", *arguments]] if arguments else [*_LINT, ["-m", "pytest"]]
    _run_steps(steps)


@cli.command()
def lint() -> None:
    """Run ruff and mypy."""
    _run_steps(_LINT)


# The recipes' build scripts have one name, which mypy takes one at a time.
_LINT = [["-m", "ruff", "check"], ["-m", "ruff", "format", "--check"], ["-m", "mypy"],
         ["-m", "mypy", "recipes/dlami-torch/build.py"]]  # fmt: skip


def _run_steps(steps: list[list[str]]) -> None:
    for step in steps:
        done = subprocess.run([sys.executable, *step], cwd=ROOT, check=False)
        if done.returncode:
            raise SystemExit(1)


def main() -> int:
    """Run the command line; turn errors into messages and exit codes."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if sys.flags.isolated:  # what was kept from us must not reach what we start either
        for name in ("PYTHONPATH", "PYTHONHOME"):
            os.environ.pop(name, None)
    try:
        result = cli.main(standalone_mode=False)
    except Sm75Error as error:
        click.echo(f"error: {visible(str(error))}", err=True)
        return error.exit_code
    except click.exceptions.Abort:
        click.echo("interrupted; the same command resumes", err=True)
        return 130
    except KeyboardInterrupt:
        click.echo("interrupted; the same command resumes", err=True)
        return 130
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except BrokenPipeError:  # whoever read our output is gone, as with head(1)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 141
    except RuntimeError as error:
        # pathlib's words for a ~ that nothing stands for: no HOME, and nobody of this number.
        if str(error) != "Could not determine home directory.":
            raise
        fault = UsageError(
            "there is no home directory for ~", why="HOME is not set, and the user has no entry "
            "among the system's users", fix="write the path out, or: export HOME=DIR",
        )  # fmt: skip
        click.echo(f"error: {fault}", err=True)
        return fault.exit_code
    except OSError as error:
        from sm75.atomic import is_disk_error

        if not is_disk_error(error):
            raise
        click.echo(f"error: {error.strerror}: {error.filename}", err=True)
        return 9
    return result if isinstance(result, int) else 0


if __name__ == "__main__":
    code = main()
    for output in (sys.stdout, sys.stderr):
        try:
            output.flush()
        except BrokenPipeError:
            pass
        except OSError:  # it is a file on a full disk
            code = code or 9
    # See sm75/rattler_rt.py: the interpreter's own exit can crash once rattler has run.
    os._exit(code)
