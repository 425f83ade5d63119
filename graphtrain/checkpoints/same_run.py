"""Check that the checkpoints of two places are of one run: by the settings and data they record."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from graphtrain.checkpoints.info import CheckpointInfo, read_checkpoint_info
from graphtrain.checkpoints.listing import list_local
from graphtrain.checkpoints.manifest import verify_files
from graphtrain.checkpoints.remote import RemoteCheckpoints
from graphtrain.config.identity import identity_changes, mathematics, say
from graphtrain.config.load import load_config
from graphtrain.config.run_record import CONFIG
from graphtrain.errors import TrainingError

_PHASE = "program.phase"
# What the phases of one run may differ in; program.phase says how.
_OF_PHASE = ("program.batch.", "program.model.rope_")
_OF_DATA = ("run.data.train", "tokenizer")  # which may be on another machine


class OtherRun(TrainingError):
    """A checkpoint is of another run than those of the place that it would be written to."""


def check_store(remote: RemoteCheckpoints, directory: Path, step: int) -> None:
    """Check that a checkpoint in a directory is of the run whose checkpoints are in a store.

    Raises:
        OtherRun: it is not; names each difference with both values.
        TrainingError: the checkpoint is damaged.
        CacheError: the store cannot be read.
    """
    for there in reversed(remote.steps()):
        try:
            stored = remote.info(there)
        except TrainingError:  # it is damaged, and the one before it tells as much
            continue
        verify_files(directory / str(step), only="about/")
        info = read_checkpoint_info(directory, step)
        changed = _differences(step, info, there, stored)
        _refuse(changed, f"step {step} of {directory.parent}", f"step {there} in {remote.url}")
        return


def check_directory(remote: RemoteCheckpoints, step: int, run_directory: Path) -> None:
    """Check that a checkpoint in a store is of the run that is in a directory, if there is one.

    Without a checkpoint there, the settings of its config.toml are compared.

    Raises:
        OtherRun: it is not; names each difference with both values.
        TrainingError: the checkpoint is damaged.
        ConfigError: config.toml cannot be read.
        CacheError: the store cannot be read.
    """
    what, path = f"step {step} in {remote.url}", run_directory / CONFIG
    local = [one.step for one in list_local(run_directory) if one.status == "complete"]
    if local:
        here = read_checkpoint_info(run_directory / "checkpoints", local[-1])
        changed = _differences(step, remote.info(step), local[-1], here)
        _refuse(changed, what, f"step {local[-1]} of {run_directory}")
    elif path.is_file():
        settings = mathematics(load_config(path), step)
        changed = identity_changes(remote.info(step).identity, settings)
        _refuse({one: changed[one] for one in changed if one not in _OF_DATA}, what, str(path))


def _differences(
    first_step: int, first: CheckpointInfo, second_step: int, second: CheckpointInfo
) -> dict[str, tuple[Any, Any]]:
    """Return what two checkpoints record as different beyond the changes that were permitted."""
    identities = (
        _identity_at(second_step, first, first_step),
        _identity_at(first_step, second, second_step),
    )
    changed = identity_changes(*identities)
    if any(info.identity.get(_PHASE) for info in (first, second)):
        return {name: both for name, both in changed.items() if not name.startswith(_OF_PHASE)}
    return changed


def _identity_at(step: int, info: CheckpointInfo, saved_step: int) -> dict[str, Any]:
    """Return what the run of a checkpoint computed at a step, before changes it permitted later."""
    identity = dict(info.identity)
    if step < saved_step:
        for change in reversed(info.changes):
            if change["step"] >= step:
                identity[change["name"]] = change["from"]
    return identity


def _refuse(changed: Mapping[str, tuple[Any, Any]], what: str, other: str) -> None:
    if not changed:
        return
    listed = "; ".join(
        f"{name} is {say(one)} and there {say(there)}" for name, (one, there) in changed.items()
    )
    raise OtherRun(
        f"{what} is of another run than {other}: {listed}; give each run a location of its own"
    )
