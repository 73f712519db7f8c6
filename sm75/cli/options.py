"""What several commands have in common: options, the lock, the store, and how things are said."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from sm75.errors import UsageError

if TYPE_CHECKING:
    from sm75.lockfile import ReleaseLock
    from sm75.progress import Reporter
    from sm75.store import Store
    from sm75.toolchain import Provider

ROOT = Path(__file__).resolve().parents[2]

Command = TypeVar("Command", bound=Callable[..., Any])
FILE = click.Path(path_type=Path)
TARGET = click.option(
    "--target", default="", help="Contract below lock/targets; default: the lock's."
)


def shared(*names: str) -> Callable[[Command], Command]:
    """The options that several commands have."""
    options = {
        "release": click.option(
            "--release", help="vLLM release; default: the one lock/default names."
        ),
        "store": click.option(
            "--store", type=FILE, envvar="SM75_STORE",
            help="Where fetched files are kept (SM75_STORE); default: the user's cache directory.",
        ),
        "rust": click.option(
            "--rust", type=click.Choice(["prebuilt", "source", "none"]),
            help="How the Rust frontend is had; default: as the lock says.",
        ),
        "channel": click.option(
            "--channel", type=FILE, default=ROOT / "channel", help="The conda channel to fill."
        ),
        "platform": click.option(
            "--target", "platform", type=click.Choice(["linux-aarch64", "linux-64"]),
            default="linux-aarch64", show_default=True,
            help="What is built for; linux-64 is for proofs only (docs/proofs.md).",
        ),
        "toolchain": click.option(
            "--toolchain", type=click.Choice(["auto", "bootstrap", "conda-forge"]), default="auto",
            help="Where compilers and tools come from.",
        ),
        "json": click.option("--json", "as_json", is_flag=True, help="Print JSON."),
        "dry": click.option("--dry-run", is_flag=True, help="Say what would be done."),
    }  # fmt: skip

    def decorate(command: Command) -> Command:
        for name in reversed(names):
            command = options[name](command)
        return command

    return decorate


def refuse(names: Collection[str], why: str, fix: str) -> None:
    """Refuse what was typed and would be ignored, so that nobody believes that it counted.

    Each command calls this for what does not count in the way it is run. ``--dry-run`` is no such
    way: it takes all that the run takes, so that it can be put behind any command.

    Args:
        names: Parameters of the command that runs. Only typed ones are refused: a variable of the
            environment (SM75_STORE) is there for other commands too.
        why: When they count.
        fix: The command that does what was meant.

    Raises:
        UsageError: One was typed.
    """
    context = click.get_current_context()
    typed = [
        _as_typed(one, context.params)
        for one in context.command.params
        if one.name in names
        and context.get_parameter_source(one.name) is click.core.ParameterSource.COMMANDLINE
    ]
    if typed:
        raise UsageError(f"{', '.join(typed)} would be ignored", why=why, fix=fix)


class Forwarding(click.Command):
    """A command that passes on what stands behind ``--``, and says so of a flag before it."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read a command line.

        Raises:
            UsageError: It has a flag that is none of this command's.
        """
        before = args[: args.index("--")] if "--" in args else list(args)
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            typed = next((one for one in before if one.startswith(error.option_name)),
                         error.option_name)  # fmt: skip
            meant = error.possibilities or []
            raise UsageError(
                f"{self.name} has no option {typed}",
                why="its own stand before --, vLLM's go after it",
                fix=f"did you mean {' or '.join(meant)}?" if meant
                else f"python3 orchestrator.py {self.name} MODEL -- {typed} ...",
            ) from error  # fmt: skip


def _as_typed(one: click.Parameter, values: Mapping[str, Any]) -> str:
    if not isinstance(one, click.Option):
        return one.human_readable_name
    off = one.secondary_opts and values.get(one.name or "") is False
    return max(one.secondary_opts if off else one.opts, key=len)


def load_lock(release: str | None) -> ReleaseLock:
    from sm75.lockfile import load_release

    return load_release(ROOT, release)


def open_store(path: Path | None) -> Store:
    from sm75.store import Store, default_root

    return Store(path.expanduser().absolute() if path else default_root())


def choose_provider(
    name: str, lock: ReleaseLock, reporter: Reporter, *, install: bool = True
) -> Provider:
    from sm75.toolchain.choice import choose

    return choose(name, ROOT, lock, reporter, install=install)


def print_json(data: object) -> None:
    click.echo(json.dumps(data, indent=2, sort_keys=True))


def warn(text: str) -> None:
    if text:
        click.echo(f"warning: {text}", err=True)
