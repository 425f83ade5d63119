"""Locations of checkpoints, as commands of `graphtrain checkpoints` name them: runs and stores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from graphtrain.cli.options import RunPath, StepName
from graphtrain.errors import TrainingError

if TYPE_CHECKING:
    from graphtrain.checkpoints.listing import StoredCheckpoint
    from graphtrain.checkpoints.remote import RemoteCheckpoints
    from graphtrain.checkpoints.steps import StepName as Step

_STEPS = "v1/steps"  # in an object store


class _Location(RunPath):
    """A run, or an object store: its URL, or the directory that serves as one."""

    name = "location"

    def convert(self, value: Any, param: Any, ctx: Any) -> Path | str:
        is_store = "://" in str(value) or (Path(str(value)) / _STEPS).is_dir()
        return str(value) if is_store else super().convert(value, param, ctx)


location_argument = click.argument("location", metavar="RUN|URL", type=_Location())
endpoint_option = click.option(
    "--endpoint",
    metavar="URL",
    help="Server of an S3-compatible store. [default: $AWS_ENDPOINT_URL, else that of the cloud]",
)


def step_option(help_text: str) -> Callable:
    """Return the option --step."""
    return click.option("--step", type=StepName(), help=help_text)


def open_remote(url: str, endpoint: str | None, *, create: bool = False) -> RemoteCheckpoints:
    """Return the checkpoints in an object store; make its directory if `create` says so."""
    from graphtrain.checkpoints.remote import RemoteCheckpoints

    return RemoteCheckpoints(url, endpoint, create=create)


def find(location: Path | str, endpoint: str | None) -> list[StoredCheckpoint]:
    """Return the checkpoints at a location.

    Raises:
        TrainingError: there is no such directory.
    """
    from graphtrain.checkpoints.listing import list_local, list_remote

    if isinstance(location, str):
        return list_remote(open_remote(location, endpoint))
    if not location.is_dir():
        raise TrainingError(f"{location}: no such run; name its directory, or its configuration")
    return list_local(location)


def find_in_any(location: Path | str, endpoint: str | None) -> list[StoredCheckpoint]:
    """Return the checkpoints of a run or a store, which may have none.

    Raises:
        TrainingError: there is neither a run nor a store.
    """
    from graphtrain.checkpoints.listing import holds_run

    found = find(location, endpoint)
    if isinstance(location, Path):
        is_any = bool(found) or holds_run(location)
    else:
        is_any = bool(found) or not open_remote(location, endpoint).is_empty()
    if not is_any:
        raise no_checkpoints(location)
    return found


def no_checkpoints(location: Path | str) -> TrainingError:
    """Return the error for a location without checkpoints."""
    return TrainingError(
        f"no checkpoints in {location}; name the directory of a run, its configuration, or the "
        "location of an object store"
    )


def choose(found: Sequence[StoredCheckpoint], step: Step, location: Path | str) -> StoredCheckpoint:
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
