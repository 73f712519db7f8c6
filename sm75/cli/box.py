"""On the server: ``install``, ``doctor``, ``explain``, ``serve``, ``health``, ``bench``."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import click

from sm75.cli.options import (
    FILE,
    ROOT,
    TARGET,
    Forwarding,
    load_lock,
    print_json,
    refuse,
    shared,
    warn,
)
from sm75.errors import UsageError
from sm75.words import counted, visible


@click.command("install")
@shared("release", "channel", "dry", "json")
@TARGET
@click.option("--prefix", type=FILE, required=True, help="A new or empty directory.")
@click.option("--python", default="", help="Python minor; default: that of the image's torch.")
@click.option("--extra-channel", type=FILE, multiple=True, help="A directory with python, say.")
@click.option("--image", type=FILE, help="The environment that has the image's torch.")
@click.option("--foreign", is_flag=True, help="Install for a g5g from another machine.")
def install_command(
    release: str | None, channel: Path, dry_run: bool, as_json: bool, target: str, prefix: Path,
    python: str, extra_channel: tuple[Path, ...], image: Path | None, foreign: bool,
) -> None:  # fmt: skip
    """Install vllm-sm75 from the channel without a conda client and without network."""
    from sm75 import channelcommands

    done = channelcommands.install(
        ROOT, load_lock(release), channel.absolute(), prefix, python=python, target=target,
        extra_channels=tuple(path.absolute() for path in extra_channel), foreign=foreign,
        image=image, dry_run=dry_run, exact=release is not None,
    )  # fmt: skip
    if as_json:
        print_json(done)
    else:
        would = "would install" if dry_run else "installed"
        click.echo(
            f"install: {would} {counted(len(done['packages']), 'package')} for Python "
            f"{done['python']} in {done['prefix']}"
        )
        for package in done["packages"] if dry_run else ():
            click.echo(f"  {package}")
    warn(done["warning"])


@click.command()
@shared("dry", "json")
@click.option("--write-contract", is_flag=True, help="Write lock/targets/NAME.toml.")
@click.option("--strict", is_flag=True, help="Warnings and what cannot be seen fail as well.")
@click.option("--imds", is_flag=True, help="Ask EC2's metadata service for the instance type.")
@click.option("--model", default="", help="A directory or an id, as for serve: can it run here?")
@click.option(
    "--path", type=FILE, default=Path("/opt/pytorch"), help="The environment that has torch."
)
@click.option("--name", default="", help="The contract's name; default: by torch and system.")
@click.option("--replace", is_flag=True, help="Overwrite a contract of that name.")
def doctor(
    dry_run: bool, as_json: bool, write_contract: bool, strict: bool, imds: bool, model: str,
    path: Path, name: str, replace: bool,
) -> None:  # fmt: skip
    """Say whether this machine is right for vllm-sm75, line by line with the fix.

    Exit code 1 when a line fails; with --strict also when one warns or is unknown. --model looks at
    a model as serve does: its files, the card's memory, the RAM. With --write-contract: describe
    the image as a target contract instead, to build for it.
    """
    if not write_contract:
        if dry_run or name or replace:
            raise UsageError("--dry-run, --name and --replace belong to --write-contract")
        _examine(model, path=path, imds=imds, strict=strict, as_json=as_json)
        return
    refuse(("strict", "imds", "model"), "--write-contract describes the image and judges nothing",
           "python3 orchestrator.py doctor, and --write-contract in a second run")  # fmt: skip
    from sm75 import channelcommands

    done = channelcommands.write_contract(
        ROOT, path=path, name=name, replace=replace, dry_run=dry_run
    )
    if as_json:
        print_json(done)
    elif dry_run:
        click.echo(done["text"], nl=False)
    else:
        click.echo(f"doctor: wrote {done['contract']}")
    warn(done["warning"])


@click.command()
@shared("json")
@click.option("--url", default="http://127.0.0.1:8000", show_default=True, help="The server.")
@click.option("--model", default="", help="Default: the first one that it lists.")
@click.option("--timeout", type=click.FloatRange(min=0.1), default=60.0, show_default=True,
              help="Seconds for each answer.")  # fmt: skip
@click.option("--max-tokens", type=click.IntRange(min=0), default=0,
              help="For each answer; more for models that think aloud.")  # fmt: skip
@click.option("--wait", "patience", type=click.FloatRange(min=0), default=0.0,
              help="Seconds to wait for a server that does not answer yet.")  # fmt: skip
@click.option("--watch", is_flag=True, help="Ask again and again; end when it fails.")
@click.option("--interval", type=click.FloatRange(min=0), default=60.0, show_default=True,
              help="With --watch: seconds between rounds.")  # fmt: skip
@click.option("--failures", type=click.IntRange(min=1), default=3, show_default=True,
              help="With --watch: failures in a row that end it.")  # fmt: skip
def health(
    as_json: bool, url: str, model: str, timeout: float, max_tokens: int, patience: float,
    watch: bool, interval: float, failures: int,
) -> None:  # fmt: skip
    """Ask a server small questions over chat and read what it says.

    Exit code 0: well; 1: it answers nonsense; 2: it refuses the key; 11: it does not answer. A key
    is taken from VLLM_API_KEY. See docs/health.md for systemd, Kubernetes and load balancers.
    """
    from sm75.health import check as checks
    from sm75.health.client import Server, base_url
    from sm75.health.questions import choose

    if not watch:
        refuse(("interval", "failures"), "they belong to --watch; without it one round is asked",
               "python3 orchestrator.py health --watch --interval 60 --failures 3")  # fmt: skip
    server = Server(base_url(url), api_key=os.environ.get("VLLM_API_KEY", ""), timeout=timeout)

    def ask() -> checks.Health:
        return checks.check(server, model=model, questions=choose(most_tokens=max_tokens))

    def say(found: checks.Health) -> None:
        if as_json:
            click.echo(json.dumps(found.to_json()))
        else:
            for line in found.lines():
                click.echo(visible(line))

    if patience or not watch:
        found = checks.wait(ask, patience)
    if watch:
        found = checks.watch(ask, say, interval=interval, failures=failures)
    else:
        say(found)
    if found.exit_code:
        raise SystemExit(found.exit_code)


@click.command(cls=Forwarding)
@shared("dry", "json")
@click.option("--prefix", type=FILE, help="The environment; default: the active conda one.")
@click.option("--health", "ask", is_flag=True, help="Say when it answers, and whether rightly.")
@click.option("--wait", "patience", type=click.FloatRange(min=0), default=900.0,
              show_default=True, help="With --health: seconds to wait for it.")  # fmt: skip
@click.argument("model")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def serve(
    dry_run: bool, as_json: bool, prefix: Path | None, ask: bool, patience: float, model: str,
    arguments: tuple[str, ...],
) -> None:  # fmt: skip
    """Start vllm serve MODEL with what a T4G needs; your own flags go behind --.

    MODEL: a directory, or an id whose files are in Hugging Face's cache. Says beforehand where the
    card's memory goes. The exit code is the server's, or 128 + n when signal n killed it; before
    its start: 1 when the model does not fit or is damaged, 2 when something asked for cannot work,
    10 when the port is taken.
    """
    if as_json and not dry_run:
        raise UsageError(
            "--json goes with --dry-run", why="the output of a server that runs is its own",
            fix="python3 orchestrator.py serve MODEL --dry-run --json",
        )  # fmt: skip
    if not ask:
        refuse(("patience",), "without --health nobody waits for the server's first answer",
               "python3 orchestrator.py serve MODEL --health --wait 900")  # fmt: skip
    from sm75.serve import start

    plan = start.plan(
        model, arguments, prefix=prefix, environment=os.environ, dry_run=dry_run
    )  # fmt: skip
    if as_json:
        print_json(plan.to_json())
        return
    for line in plan.lines():
        click.echo(visible(line), err=not dry_run)
    if not dry_run:
        code = start.run(plan, environment=os.environ, patience=patience if ask else None)
        raise SystemExit(code)


def _examine(model: str, *, strict: bool, as_json: bool, **what: Any) -> None:
    from sm75.doctor import facts, rules
    from sm75.doctor import model as models

    asked = list(models.lines(model, os.environ)) if model else []
    lines = rules.judge(facts.collect(ROOT, **what)) + asked
    code = rules.exit_code(lines, strict=strict)
    if as_json:
        print_json({"exit_code": code, "lines": [line.to_json() for line in lines]})
    else:
        for line in lines:
            click.echo(f"{line.status:<7}  {line.name:<17}  {visible(line.says)}")
            if line.fix:
                click.echo(f"{'':<28}next: {visible(line.fix)}")
    if code:
        raise SystemExit(code)


@click.command("explain")
@shared("json")
@click.option("--write-page", is_flag=True, help="Make docs/troubleshooting.md anew.")
@click.argument("subject", required=False, default="")
def explain_command(as_json: bool, write_page: bool, subject: str) -> None:
    """Explain a build or serve log (- reads it from stdin), or a version constraint by name.

    Of a log: the known failures in it, with cause, evidence, fix and link. Exit code 1 when nothing
    known is in it. Without SUBJECT: list what can be explained.
    """
    from sm75 import explain

    if write_page:
        refuse(("subject", "as_json"), "--write-page makes the page of all that is known",
               "python3 orchestrator.py explain LOG, without --write-page")  # fmt: skip
        from sm75.explain import knowledge, page

        changed = page.write(ROOT, knowledge.load())
        click.echo(f"explain: {page.PAGE} {'is written' if changed else 'is as it was'}")
        return
    if not subject:
        known = explain.names(ROOT)
        if as_json:
            print_json(known)
        else:
            click.echo("constraints: " + ", ".join(known))
            click.echo("logs: any file, or - for standard input")
        return
    found = explain.explain(ROOT, subject)
    if as_json:
        print_json(found.to_json())
    else:
        for line in found.lines():
            click.echo(visible(line))
    if found.exit_code:
        raise SystemExit(found.exit_code)


@click.command("bench")
@shared("dry", "json")
@click.option("--url", default="http://127.0.0.1:8000", show_default=True, help="The server.")
@click.option("--served", default="", help="The model's name there; default: the first listed.")
@click.option("--model", type=FILE, help="The model's files: what a token reads, for the ceiling.")
@click.option("--weight-bytes", type=click.IntRange(min=1), default=None,
              help="Instead: bytes of weights that are read for a token.")  # fmt: skip
@click.option("--bandwidth", type=click.FloatRange(min=0.1), default=None,
              help="GB/s that the card reads (bench --memory); default: 277, a T4G's.")  # fmt: skip
@click.option("--prompt-tokens", default="128,1024", show_default=True, help="Lengths, a list.")
@click.option("--output-tokens", default="128", show_default=True, help="Lengths, a list.")
@click.option("--concurrency", default="1,4,8", show_default=True, help="Streams, a list.")
@click.option("--repeats", type=click.IntRange(min=1), default=None,
              help="Measured rounds of each; default: 10, with --memory 20.")  # fmt: skip
@click.option("--warmups", type=click.IntRange(min=0), default=2, show_default=True,
              help="Rounds of each before, which do not count.")  # fmt: skip
@click.option("--seed", type=click.IntRange(min=0), default=None,
              help="Of the prompts; default: another each time.")  # fmt: skip
@click.option("--timeout", type=click.FloatRange(min=0.1), default=600.0, show_default=True,
              help="Seconds for each answer.")  # fmt: skip
@click.option("--no-health", is_flag=True, help="Do not read answers first.")
@click.option("--out", type=FILE, help="Write NAME.json and NAME.svg; default: bench-TIME.")
@click.option("--tool", type=click.Choice(["own", "vllm"]), default="own", show_default=True,
              help="vllm: measure with vllm bench serve of --prefix.")  # fmt: skip
@click.option("--prefix", type=FILE, help="With --tool vllm: the environment that has it.")
@click.option("--memory", is_flag=True, help="Measure this machine's card instead of a server.")
@click.option("--size", type=click.IntRange(min=1), multiple=True,
              help="With --memory: MiB to read; default: 1024.")  # fmt: skip
@click.option("--device", type=click.IntRange(min=0), default=0, show_default=True,
              help="With --memory: number of the GPU.")  # fmt: skip
@click.pass_context
def bench_command(context: click.Context, /, **given: Any) -> None:
    """Measure a server's speed against what the card's memory allows, or the card's memory.

    Exit code 0: measured; 1: requests failed, nonsense, or counts that cannot be; 6: no GPU; 11: no
    answer. A key is taken from VLLM_API_KEY. See docs/bench.md.
    """
    from sm75.bench import command

    default = click.core.ParameterSource.DEFAULT
    chosen = {name for name in given if context.get_parameter_source(name) is not default}
    if given["memory"]:
        data, said = command.memory(chosen, given), command.memory_lines
    else:
        data, said = command.server(chosen, given), command.server_lines
    if given["as_json"]:
        print_json(data)
    else:
        said(data)
    if not data.get("good", True):
        raise SystemExit(1)


COMMANDS = (install_command, doctor, explain_command, serve, health, bench_command)
