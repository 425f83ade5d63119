"""`graphtrain checkpoints`: list, show, verify, copy and remove the checkpoints of a run."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from graphtrain.cache.sizes import format_size
from graphtrain.cli.options import RunPath, StepName, json_option
from graphtrain.cli.terminal import printable, say
from graphtrain.cli.usage import Group
from graphtrain.errors import TrainingError
from graphtrain.files import counted

STEPS = "v1/steps"  # in an object store

if TYPE_CHECKING:
    from graphtrain.checkpoints.listing import StoredCheckpoint
    from graphtrain.checkpoints.remote import RemoteCheckpoints
    from graphtrain.checkpoints.steps import StepName as Step

_HEADER = ("step", "age", "size", "loss", "validation", "status")
_UNITS = (("d", 86400), ("h", 3600), ("min", 60))


class _Location(RunPath):
    """A run, or an object store: its URL, or the directory that serves as one."""

    name = "location"

    def convert(self, value: Any, param: Any, ctx: Any) -> Path | str:
        is_store = "://" in str(value) or (Path(str(value)) / STEPS).is_dir()
        return str(value) if is_store else super().convert(value, param, ctx)


location_argument = click.argument("location", metavar="RUN|URL", type=_Location())
_run_argument = click.argument("run", metavar="RUN", type=RunPath())
_url_argument = click.argument("url", metavar="URL")
_endpoint_option = click.option(
    "--endpoint",
    metavar="URL",
    help="Server of an S3-compatible store. [default: $AWS_ENDPOINT_URL, else that of the cloud]",
)


def _step_option(help_text: str) -> Callable:
    return click.option("--step", type=StepName(), help=help_text)


@click.group("checkpoints", cls=Group)
def command() -> None:
    """List, show, verify, copy and remove the checkpoints of a run."""


@command.command("ls")
@location_argument
@_endpoint_option
@json_option
def ls(location: Path | str, endpoint: str | None, as_json: bool) -> None:
    """List the checkpoints of a run, or in an object store, oldest first.

    Sizes of files are compared with the manifest; `verify` reads their contents. A damaged
    checkpoint that a run set aside is in quarantine.
    """
    found = _found_in_any(location, endpoint)
    losses = _training_losses(location)
    if as_json:
        click.echo(json.dumps([_facts(one, losses.get(one.step)) for one in found], indent=1))
        return
    rows = [_row(one, losses.get(one.step), time.time()) for one in found]
    if rows:
        _print_table([_HEADER, *rows])
    total = format_size(sum(one.nbytes for one in found))
    say(f"{counted(len(found), 'checkpoint')}, {total}, in {location}")


@command.command("show")
@location_argument
@_step_option("Step of the checkpoint; best is that of the lowest validation loss. [default: last]")
@_endpoint_option
@json_option
def show(location: Path | str, step: Step, endpoint: str | None, as_json: bool) -> None:
    """Show what a checkpoint is: its arrays, the settings and data it is of, digests of its files.

    Of an object store, only the metadata are read.
    """
    import tempfile

    from graphtrain.checkpoints.description import describe_checkpoint

    chosen = _choose(_found(location, endpoint), step, location)
    if isinstance(location, Path):
        facts = describe_checkpoint(location / "checkpoints", chosen.step)
    else:
        with tempfile.TemporaryDirectory() as temporary:
            path = Path(temporary) / str(chosen.step)
            manifest = _remote(location, endpoint).download_description(chosen.step, path)
            files = {name: asdict(file) for name, file in manifest.checkpoint.items()}
            facts = describe_checkpoint(Path(temporary), chosen.step, files)
    facts |= {"bytes": chosen.nbytes, "saved_at": chosen.saved_at}
    if as_json:
        click.echo(json.dumps(facts, indent=1))
    else:
        _print_facts(facts)


@command.command("verify")
@location_argument
@_step_option("Step of the checkpoint. [default: every one]")
@_endpoint_option
@json_option
def verify(location: Path | str, step: Step, endpoint: str | None, as_json: bool) -> None:
    """Read every byte and compare it with the digests of the manifest. Exits with 2 if one differs.

    A run records XXH3 digests when it saves, an upload SHA-256 digests. Where there is no
    checkpoint, it exits with 2 too.
    """
    from graphtrain.checkpoints.listing import verify_local, verify_remote

    found = [one for one in _found(location, endpoint) if one.status != "quarantined"]
    if not found:
        raise _no_checkpoints(location)
    chosen = found if step is None else [_choose(found, step, location)]
    if isinstance(location, Path):
        reasons = {one.step: verify_local(location, one.step) for one in chosen}
    else:
        remote = _remote(location, endpoint)
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
@_endpoint_option
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

    found = _found_in_any(location, endpoint)
    steps = superfluous(found, Retention(keep, keep_best, keep_every))
    if isinstance(location, Path):
        rests = _collect_local(location, steps, dry_run=dry_run)
    else:
        rests = _collect_remote(_remote(location, endpoint), steps, dry_run=dry_run)
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
@_step_option("Step of the checkpoint. [default: last]")
@click.option(
    "--replace",
    is_flag=True,
    help="Replace the checkpoint of this step in the store if there is one.",
)
@_endpoint_option
def push(run: Path, url: str, step: Step, replace: bool, endpoint: str | None) -> None:
    """Upload a checkpoint of RUN, with the files that describe the run, to an object store.

    Every file is verified before it is sent. The checkpoint exists there when it is complete. A
    store with checkpoints of another run is refused.
    """
    from graphtrain.checkpoints.same_run import check_store

    chosen = _choose(_found(run, None), step, run)
    remote = _remote(url, endpoint, create=True)
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
@_step_option("Step of the checkpoint. [default: last]")
@_endpoint_option
def pull(url: str, run: Path, step: Step, endpoint: str | None) -> None:
    """Download a checkpoint from an object store into the directory RUN, and verify it.

    Where RUN has no config.toml, metrics or tokenizer, those of the checkpoint are downloaded too,
    so that RUN can be resumed, evaluated and exported. If RUN is another run, it is refused.
    """
    from graphtrain.checkpoints.same_run import check_directory
    from graphtrain.run.directory_lock import locked_run_directory

    chosen, remote = _choose(_found(url, endpoint), step, url), _remote(url, endpoint)
    with locked_run_directory(run):
        check_directory(remote, chosen.step, run)
        path = remote.download(chosen.step, run)
    click.echo(f"downloaded {path}, {format_size(chosen.nbytes)}")


def _remote(url: str, endpoint: str | None, *, create: bool = False) -> RemoteCheckpoints:
    from graphtrain.checkpoints.remote import RemoteCheckpoints

    return RemoteCheckpoints(url, endpoint, create=create)


def _found(location: Path | str, endpoint: str | None) -> list[StoredCheckpoint]:
    """Return the checkpoints at a location.

    Raises:
        TrainingError: there is no such directory.
    """
    from graphtrain.checkpoints.listing import list_local, list_remote

    if isinstance(location, str):
        return list_remote(_remote(location, endpoint))
    if not location.is_dir():
        raise TrainingError(f"{location}: no such run; name its directory, or its configuration")
    return list_local(location)


def _found_in_any(location: Path | str, endpoint: str | None) -> list[StoredCheckpoint]:
    """Return the checkpoints of a run or a store, which may have none.

    Raises:
        TrainingError: there is neither a run nor a store.
    """
    from graphtrain.checkpoints.listing import holds_run

    found = _found(location, endpoint)
    if isinstance(location, Path):
        is_any = bool(found) or holds_run(location)
    else:
        is_any = bool(found) or not _remote(location, endpoint).is_empty()
    if not is_any:
        raise _no_checkpoints(location)
    return found


def _no_checkpoints(location: Path | str) -> TrainingError:
    return TrainingError(
        f"no checkpoints in {location}; name the directory of a run, its configuration, or the "
        "location of an object store"
    )


def _choose(
    found: Sequence[StoredCheckpoint], step: Step, location: Path | str
) -> StoredCheckpoint:
    """Return the checkpoint of a step, or by name; None for the last."""
    from graphtrain.checkpoints.steps import lowest_loss

    stored = {one.step: one for one in found if one.status != "quarantined"}
    losses = {one.step: one.validation_loss for one in stored.values() if one.validation_loss}
    if step == "best" and not losses:
        raise TrainingError(f"no checkpoint in {location} was saved with a validation loss")
    if step in (None, "last"):
        step = max(stored, default=None)
    elif step == "best":
        step = lowest_loss(losses)
    if step not in stored:
        available = f"available steps: {', '.join(map(str, stored))}" if stored else "there is none"
        raise TrainingError(f"no such checkpoint in {location}; {available}")
    return stored[step]


def _training_losses(location: Path | str) -> dict[int, float]:
    """Return the training loss of the steps of a run; of an object store, none."""
    from graphtrain.run.metrics import read_journal

    records = read_journal(location) if isinstance(location, Path) else []
    return {record["step"]: record["loss"] for record in records if "loss" in record}


def _facts(one: StoredCheckpoint, loss: float | None) -> dict[str, Any]:
    facts = asdict(one) | {"loss": loss}
    return {"bytes": facts.pop("nbytes"), **facts}


def _row(one: StoredCheckpoint, loss: float | None, now: float) -> tuple[str, ...]:
    status = one.status + (f": {one.reason}" if one.reason else "")
    age = _age(now - one.saved_at) if one.saved_at else ""
    return (
        str(one.step), age, format_size(one.nbytes), _number(loss), _number(one.validation_loss),
        status,
    )  # fmt: skip


def _age(seconds: float) -> str:
    for unit, size in _UNITS:
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0, seconds):.0f} s"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _print_table(rows: Sequence[Sequence[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row[:-1], widths, strict=False)]
        click.echo(printable("  ".join([*cells, row[-1]])))


def _print_facts(facts: dict[str, Any]) -> None:
    saved = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(facts["saved_at"]))
    click.echo(f"step {facts['step']}, saved {saved}, {format_size(facts['bytes'])}")
    for name in ("validation_loss", "data_position", "changes"):
        if facts[name]:
            click.echo(printable(f"{name}: {json.dumps(facts[name])}"))
    for title in ("identity", "arrays", "files"):
        click.echo(f"\n{title}")
        for name, value in facts[title].items():
            text = "  ".join(map(_plain, value.values() if isinstance(value, dict) else [value]))
            click.echo(printable(f"  {name}  {text}"))


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
