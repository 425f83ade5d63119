"""`graphtrain checkpoints`: list, show, verify, copy and remove the checkpoints of a run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from graphtrain.cache.sizes import format_size
from graphtrain.cli.checkpoint_location import (
    choose,
    endpoint_option,
    find,
    find_in_any,
    location_argument,
    no_checkpoints,
    open_remote,
    step_option,
)
from graphtrain.cli.checkpoint_tables import print_checkpoints, print_facts, print_json
from graphtrain.cli.options import RunPath, json_option
from graphtrain.cli.terminal import printable, say
from graphtrain.cli.usage import Group
from graphtrain.errors import TrainingError
from graphtrain.files import counted

if TYPE_CHECKING:
    from graphtrain.checkpoints.remote import RemoteCheckpoints
    from graphtrain.checkpoints.steps import StepName as Step

_run_argument = click.argument("run", metavar="RUN", type=RunPath())
_url_argument = click.argument("url", metavar="URL")


@click.group("checkpoints", cls=Group)
def command() -> None:
    """List, show, verify, copy and remove the checkpoints of a run."""


@command.command("ls")
@location_argument
@endpoint_option
@json_option
def ls(location: Path | str, endpoint: str | None, as_json: bool) -> None:
    """List the checkpoints of a run, or in an object store, oldest first.

    Sizes of files are compared with the manifest; `verify` reads their contents. A damaged
    checkpoint that a run set aside is in quarantine.
    """
    found = find_in_any(location, endpoint)
    losses = _training_losses(location)
    if as_json:
        print_json(found, losses)
        return
    print_checkpoints(found, losses)
    total = format_size(sum(one.nbytes for one in found))
    say(f"{counted(len(found), 'checkpoint')}, {total}, in {location}")


@command.command("show")
@location_argument
@step_option("Step of the checkpoint; best is that of the lowest validation loss. [default: last]")
@endpoint_option
@json_option
def show(location: Path | str, step: Step, endpoint: str | None, as_json: bool) -> None:
    """Show what a checkpoint is: its arrays, the settings and data it is of, digests of its files.

    Of an object store, only the metadata are read.
    """
    import tempfile

    from graphtrain.checkpoints.description import describe_checkpoint

    chosen = choose(find(location, endpoint), step, location)
    if isinstance(location, Path):
        facts = describe_checkpoint(location / "checkpoints", chosen.step)
    else:
        with tempfile.TemporaryDirectory() as temporary:
            path = Path(temporary) / str(chosen.step)
            manifest = open_remote(location, endpoint).download_description(chosen.step, path)
            files = {name: asdict(file) for name, file in manifest.checkpoint.items()}
            facts = describe_checkpoint(Path(temporary), chosen.step, files)
    facts |= {"bytes": chosen.nbytes, "saved_at": chosen.saved_at}
    if as_json:
        click.echo(json.dumps(facts, indent=1))
    else:
        print_facts(facts)


@command.command("verify")
@location_argument
@step_option("Step of the checkpoint. [default: every one]")
@endpoint_option
@json_option
def verify(location: Path | str, step: Step, endpoint: str | None, as_json: bool) -> None:
    """Read every byte and compare it with the digests of the manifest. Exits with 2 if one differs.

    A run records XXH3 digests when it saves, an upload SHA-256 digests. Where there is no
    checkpoint, it exits with 2 too.
    """
    from graphtrain.checkpoints.listing import verify_local, verify_remote

    found = [one for one in find(location, endpoint) if one.status != "quarantined"]
    if not found:
        raise no_checkpoints(location)
    chosen = found if step is None else [choose(found, step, location)]
    if isinstance(location, Path):
        reasons = {one.step: verify_local(location, one.step) for one in chosen}
    else:
        remote = open_remote(location, endpoint)
        reasons = {one.step: verify_remote(remote, one.step) for one in chosen}
    damaged = {one: reason for one, reason in reasons.items() if reason}
    if as_json:
        facts = [{"step": one, "reason": reason} for one, reason in reasons.items()]
        click.echo(json.dumps(facts, indent=1))
    else:
        for one, reason in reasons.items():
            click.echo(printable(f"{one}: {f'damaged: {reason}' if reason else 'intact'}"))
    if damaged:
        raise TrainingError(
            f"damaged in {location}: {len(damaged)} of {counted(len(chosen), 'checkpoint')}"
        )
    say(f"intact: {counted(len(chosen), 'checkpoint')}")


@command.command("gc")
@location_argument
@click.option(
    "--keep", type=click.IntRange(1), required=True, help="Number of newest checkpoints to keep."
)
@click.option("--keep-best", is_flag=True, help="Keep that of the lowest validation loss too.")
@click.option(
    "--keep-every",
    metavar="N",
    type=click.IntRange(1),
    help="Keep every checkpoint whose step is a multiple of N too.",
)
@click.option("--dry-run", is_flag=True, help="Report what would be removed, and remove nothing.")
@endpoint_option
def gc(
    location: Path | str,
    keep: int,
    keep_best: bool,
    keep_every: int | None,
    dry_run: bool,
    endpoint: str | None,
) -> None:
    """Remove all but the newest checkpoints, and what was begun and never completed.

    Damaged checkpoints, and those in quarantine, are neither counted nor removed. A run that is
    being trained is refused. In an object store, the rests of uploads are removed after a day.
    """
    from graphtrain.checkpoints.listing import superfluous
    from graphtrain.checkpoints.steps import Retention

    found = find_in_any(location, endpoint)
    steps = superfluous(found, Retention(keep, keep_best, keep_every))
    if isinstance(location, Path):
        rests = _collect_local(location, steps, dry_run=dry_run)
    else:
        rests = _collect_remote(open_remote(location, endpoint), steps, dry_run=dry_run)
    listed = f": {', '.join(map(str, steps))}" if steps else ""
    verb = "would remove" if dry_run else "removed"
    click.echo(f"{verb} {counted(len(steps), 'checkpoint')} and {rests} unfinished ones{listed}")


def _collect_local(run: Path, steps: Sequence[int], *, dry_run: bool) -> int:
    """Delete checkpoints and leftovers of a run; return the number of the latter."""
    import shutil

    from graphtrain.checkpoints.listing import delete_local, leftovers
    from graphtrain.run.directory_lock import locked_run_directory

    with locked_run_directory(run):
        rests = list(leftovers(run))
        if not dry_run:
            for step in steps:
                delete_local(run, step)
            for path in rests:
                shutil.rmtree(path)
    return len(rests)


def _collect_remote(remote: RemoteCheckpoints, steps: Sequence[int], *, dry_run: bool) -> int:
    rests = remote.unfinished()
    if not dry_run:
        for step in steps:
            remote.delete(step)
        for names in rests.values():
            remote.delete_objects(names)
    return len(rests)


@command.command("push")
@_run_argument
@_url_argument
@step_option("Step of the checkpoint. [default: last]")
@click.option(
    "--replace",
    is_flag=True,
    help="Replace the checkpoint of this step in the store if there is one.",
)
@endpoint_option
def push(run: Path, url: str, step: Step, replace: bool, endpoint: str | None) -> None:
    """Upload a checkpoint of RUN, with the files that describe the run, to an object store.

    Every file is verified before it is sent. The checkpoint exists there when it is complete. A
    store with checkpoints of another run is refused.
    """
    from graphtrain.checkpoints.same_run import check_store

    chosen = choose(find(run, None), step, run)
    remote = open_remote(url, endpoint, create=True)
    check_store(remote, run / "checkpoints", chosen.step)
    if not replace and remote.has(run, chosen.step):
        click.echo(f"{url} has step {chosen.step} already")
        return
    if not replace and chosen.step in remote.steps():
        raise TrainingError(
            f"{url} has another checkpoint of step {chosen.step}, or a damaged one; push to "
            "another location, or replace it with --replace"
        )
    manifest = remote.upload(run, chosen.step)
    click.echo(f"uploaded step {chosen.step}, {format_size(manifest.nbytes)}, to {url}")


@command.command("pull")
@_url_argument
@_run_argument
@step_option("Step of the checkpoint. [default: last]")
@endpoint_option
def pull(url: str, run: Path, step: Step, endpoint: str | None) -> None:
    """Download a checkpoint from an object store into the directory RUN, and verify it.

    Where RUN has no config.toml, metrics or tokenizer, those of the checkpoint are downloaded too,
    so that RUN can be resumed, evaluated and exported. If RUN is another run, it is refused.
    """
    from graphtrain.checkpoints.same_run import check_directory
    from graphtrain.run.directory_lock import locked_run_directory

    chosen, remote = choose(find(url, endpoint), step, url), open_remote(url, endpoint)
    with locked_run_directory(run):
        check_directory(remote, chosen.step, run)
        path = remote.download(chosen.step, run)
    click.echo(f"downloaded {path}, {format_size(chosen.nbytes)}")


def _training_losses(location: Path | str) -> dict[int, float]:
    """Return the training loss of the steps of a run; of an object store, none."""
    from graphtrain.run.metrics import read_journal

    records = read_journal(location) if isinstance(location, Path) else []
    return {record["step"]: record["loss"] for record in records if "loss" in record}
