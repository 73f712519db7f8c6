"""An option that would be ignored is refused, with what to type instead: the whole command line.

Each option of each command is in one of the two tables, so that a new one has to be looked at.
"""

from __future__ import annotations

from collections.abc import Iterator

import click
import pytest

from orchestrator import cli
from tests.unit.commandkit import Runner

# What was typed, and which of it would be ignored.
REFUSED = [
    ("verify --gpu --smem", "--smem"),
    ("verify --gpu --channel x", "--channel"),
    ("verify --gpu --bundle b.pyz --json", "--json"),
    ("verify --gpu --result r.json --bundle b.pyz", "--bundle"),
    ("verify --gpu --result r.json --kernels k", "--kernels"),
    ("verify --gpu --result r.json --store s", "--store"),
    ("verify --gpu --result r.json --release 0.33.0", "--release"),
    ("verify --gpu --result r.json some.conda", "PACKAGE"),
    ("verify --bundle b.pyz", "--bundle"),
    ("verify --smem --kernels k", "--kernels"),
    ("verify --result r.json", "--result"),
    ("inspect - --release 0.33.0", "--release"),
    ("inspect - --store s", "--store"),
    ("inspect - --target t", "--target"),
    ("kernels build --files k --channel c", "--channel"),
    ("kernels build --unproved", "--unproved"),
    ("lock --tools --rust", "--rust"),
    ("lock --tools --check", "--check"),
    ("lock --tools --release 0.33.0", "--release"),
    ("lock --tools --json", "--json"),
    ("lock --rust --check", "--check"),
    ("lock --rust --json", "--json"),
    ("lock --check --json", "--json"),
    ("lock --store s", "--store"),
    ("lock --torch 2.12.0", "--torch"),
    ("lock --dry-run", "--dry-run"),
    ("lock --no-closure", "--no-closure"),
    ("lock --target x", "--target"),
    ("lock --from 0.28.0", "--from"),
    ("lock --upgrade", "--upgrade"),
    ("lock --vllm 0.33.0 --check", "--check"),
    ("lock --vllm 0.33.0 --tools", "--tools"),
    ("lock --vllm 0.33.0 --rust", "--rust"),
    ("lock --vllm 0.33.0 --release 0.33.0", "--release"),
    ("patches releases --check --write", "--write"),
    ("patches releases --check --json", "--json"),
    ("patches releases --check --store s", "--store"),
    ("patches releases --write --json", "--json"),
    ("doctor --dry-run", "--dry-run"),
    ("doctor --name x", "--name"),
    ("doctor --replace", "--replace"),
    ("doctor --write-contract --strict", "--strict"),
    ("doctor --write-contract --imds", "--imds"),
    ("doctor --write-contract --model m", "--model"),
    ("explain --write-page serve.log", "SUBJECT"),
    ("explain --write-page --json", "--json"),
    ("serve /srv/model --json", "--json"),
    ("serve /srv/model --wait 5 --dry-run", "--wait"),
    ("health --interval 5", "--interval"),
    ("health --failures 2", "--failures"),
    ("bench --size 64 --dry-run", "--size"),
    ("bench --device 1 --dry-run", "--device"),
    ("bench --prefix p --dry-run", "--prefix"),
    ("bench --bandwidth 300 --dry-run", "--bandwidth"),
    ("bench --tool vllm --prefix p --timeout 5 --dry-run", "--timeout"),
    ("bench --memory --url x --dry-run", "--url"),
    ("bench --memory --served x --dry-run", "--served"),
    ("bench --memory --model x --dry-run", "--model"),
    ("bench --memory --weight-bytes 5 --dry-run", "--weight-bytes"),
    ("bench --memory --bandwidth 5 --dry-run", "--bandwidth"),
    ("bench --memory --prompt-tokens 64 --dry-run", "--prompt-tokens"),
    ("bench --memory --output-tokens 64 --dry-run", "--output-tokens"),
    ("bench --memory --concurrency 1 --dry-run", "--concurrency"),
    ("bench --memory --warmups 1 --dry-run", "--warmups"),
    ("bench --memory --seed 1 --dry-run", "--seed"),
    ("bench --memory --timeout 1 --dry-run", "--timeout"),
    ("bench --memory --no-health --dry-run", "--no-health"),
    ("bench --memory --tool vllm --dry-run", "--tool"),
]
# What counts in every way that the command can be run. --dry-run takes all that the run takes.
ALWAYS = {
    "fetch": "release store rust platform dry_run as_json",
    "build": "release store rust platform toolchain dry_run as_json channel ptx jobs offline "
    "recompile remote_cache no_wait check kernels twice",
    "toolchain": "release store toolchain",
    "verify": "gpu",
    "inspect": "as_json source",
    "channel verify": "channel as_json",
    "channel lock": "release store as_json upgrade check",
    "channel build": "release store channel dry_run as_json target offline",
    "channel sizes": "channel as_json",
    "channel missing": "release channel as_json target",
    "channel export": "channel dry_run as_json out",
    "channel publish": "channel dry_run as_json replace delete reread target",
    "kernels build": "release store as_json files",
    "kernels add": "channel sha256 package",
    "kernels prove": "store results",
    "kernels show": "as_json home",
    "lock": "vllm",
    "patches check": "release store as_json against",
    "patches rebase": "store dry_run as_json release source tree accept replace",
    "patches releases": "check",
    "patches seal": "release",
    "report": "release channel dry_run as_json out",
    "install": "release channel dry_run as_json target prefix python extra_channel image foreign",
    "doctor": "as_json write_contract path",
    "explain": "write_page",
    "serve": "dry_run prefix ask model arguments",
    "health": "as_json url model timeout max_tokens patience watch",
    "bench": "memory dry_run as_json out repeats",
    "test": "arguments",
    "lint": "",
}


@pytest.mark.parametrize(("typed", "ignored"), REFUSED, ids=[typed for typed, _ in REFUSED])
def test_what_would_be_ignored_is_refused(run: Runner, typed: str, ignored: str) -> None:
    ended = run(*typed.split())
    assert ended.code == 2, ended.out
    assert ended.out == ""
    assert ignored in ended.err
    assert ended.err.startswith("error: ")


def test_a_variable_of_the_environment_is_no_option(
    run: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SM75_STORE is there for all commands."""
    monkeypatch.setenv("SM75_STORE", "/nowhere")
    assert run("lock").code == 0
    assert run("patches", "releases", "--check").code == 0


def leaves(group: click.Group, above: str = "") -> Iterator[tuple[str, click.Command]]:
    for name, command in group.commands.items():
        path = f"{above} {name}".strip()
        if isinstance(command, click.Group):
            yield from leaves(command, path)
        else:
            yield path, command


def test_every_option_was_looked_at() -> None:
    """A new option is put into one of the tables above, after a look at each way to run it."""
    for path, command in leaves(cli):
        words = path.split()
        refused = {ignored for typed, ignored in REFUSED if typed.split()[: len(words)] == words}
        known = set(ALWAYS[path].split())
        new = [
            one.name
            for one in command.params
            if one.name not in known
            and not refused & {*one.opts, *one.secondary_opts, one.human_readable_name}
        ]
        assert new == [], path
        assert known <= {one.name for one in command.params}, path
