"""The newest checkpoint of a run, here or in its object store, before the run resumes."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

from graphtrain.checkpoints.checkpoint import quarantine_path
from graphtrain.checkpoints.info import CheckpointInfo
from graphtrain.checkpoints.listing import list_local
from graphtrain.checkpoints.output_directory import write_errors
from graphtrain.checkpoints.remote import RemoteCheckpoints
from graphtrain.checkpoints.remote_manifest import DamagedRemoteCheckpoint
from graphtrain.checkpoints.same_run import check_store
from graphtrain.config.schema import CheckpointSettings
from graphtrain.errors import CacheError, TrainingError


def fetch_newest(
    directory: Path,
    settings: CheckpointSettings,
    check: Callable[[str, int, CheckpointInfo], None],
    note: Callable[[str], None],
    *,
    fresh: bool = False,
    on_hosts: int = 0,
    progress: Callable[[], None] = lambda: None,
) -> None:
    """Download the newest checkpoint of the object store if it is newer than every one here.

    Args:
        directory: Directory of the run, which the caller has locked.
        settings: Settings of its checkpoints; without `remote`, nothing is done.
        check: Called with name, step and metadata of a checkpoint before it is downloaded; raises
            if it is of another run.
        note: Called with lines for the log of the run.
        fresh: Whether the run starts at step 0 in any case.
        on_hosts: Newest step that the disks of the hosts have together; 0 if they have none.
        progress: Called now and then.

    Raises:
        TrainingError: `fresh`, and the store has checkpoints; or they are of another run than
            those here; or the store cannot be read or has only damaged ones, and there is no
            checkpoint here.
    """
    if settings.remote is None:
        return
    local = [one.step for one in list_local(directory) if one.status == "complete"]
    whole = max(local, default=0)
    newest = max(whole, on_hosts)
    try:
        remote = RemoteCheckpoints(settings.remote, settings.endpoint, create=True)
        steps = remote.steps()
        if fresh and steps:
            raise refuse_fresh(remote.url, steps)
        for step in reversed([step for step in steps if step > newest]):
            if fetch_checkpoint(remote, step, directory, check, progress):
                note(f"downloaded the checkpoint of step {step} from {remote.url}")
                return
        if whole and not fresh:
            check_store(remote, directory / "checkpoints", whole)
    except CacheError as error:
        if not newest:
            raise TrainingError(
                f"the checkpoints of this run cannot be read, and there is none in {directory}: "
                f"{error}; correct it, or unset run.checkpoints.remote to start at step 0"
            ) from error
        place = directory if newest == whole else "the disks of the hosts"
        warnings.warn(f"resuming from {place}, step {newest}: {error}", stacklevel=1)
        return
    if not newest and steps and not fresh:
        raise TrainingError(
            f"every checkpoint in {remote.url} is damaged, and there is none in {directory}; set "
            "run.checkpoints.remote and run.directory to new locations to start again"
        )


def refuse_fresh(url: str, steps: Sequence[int]) -> TrainingError:
    """Return the error that a run is to start at step 0, and its store has checkpoints."""
    return TrainingError(
        f"{url} has checkpoints (steps {', '.join(map(str, steps))}), from which a later start "
        "would resume; with --fresh, set run.checkpoints.remote to a new location, or remove them"
    )


def fetch_between(
    directory: Path,
    settings: CheckpointSettings,
    check: Callable[[str, int, CheckpointInfo], None],
    low: int,
    high: int,
    progress: Callable[[], None] = lambda: None,
) -> int | None:
    """Download the newest sound checkpoint of the object store after a step, in place of a damaged.

    A store that cannot be read is a warning.

    Args:
        directory: Directory of the run, which the caller has locked.
        settings: Settings of its checkpoints, with `remote`.
        check: As of `fetch_newest`.
        low: Step of the checkpoint from which the run would resume otherwise.
        high: Step of the damaged checkpoint, which is moved to quarantine if the store has it.
        progress: Called now and then.

    Returns:
        The step; None if the store has none.

    Raises:
        TrainingError: the checkpoint is of another run, or cannot be written.
    """
    assert settings.remote is not None
    try:
        remote = RemoteCheckpoints(settings.remote, settings.endpoint, create=True)
        for step in reversed([step for step in remote.steps() if low < step <= high]):
            if fetch_checkpoint(remote, step, directory, check, progress):
                return step
    except CacheError as error:
        warnings.warn(f"no copy of step {high} is looked for: {error}", stacklevel=1)
    return None


def fetch_checkpoint(
    remote: RemoteCheckpoints,
    step: int,
    directory: Path,
    check: Callable[[str, int, CheckpointInfo], None],
    progress: Callable[[], None],
) -> bool:
    """Download one checkpoint; return False, with a warning, if it is damaged."""
    try:
        info = remote.info(step)
    except DamagedRemoteCheckpoint as error:
        _warn_of_damage(remote, error)
        return False
    check(f"{remote.url}, step {step},", step, info)

    def move_away(damaged: Path) -> None:
        with write_errors(directory):
            shutil.move(damaged, destination := quarantine_path(directory, step))
        warnings.warn(
            f"{damaged} is damaged: moved it to {destination}, and took the copy in {remote.url}",
            stacklevel=1,
        )

    try:
        remote.download(step, directory, progress, move_away)
    except DamagedRemoteCheckpoint as error:
        _warn_of_damage(remote, error)
        return False
    return True


def _warn_of_damage(remote: RemoteCheckpoints, error: DamagedRemoteCheckpoint) -> None:
    warnings.warn(
        f"{remote.url}, step {error.step} is damaged: {error.reason}; it is not used, and an "
        "earlier checkpoint is looked for",
        stacklevel=1,
    )
