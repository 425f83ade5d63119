"""Places of the checkpoints of a run: run.checkpoints.local and remote."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphtrain.checkpoints.info import CheckpointInfo
from graphtrain.checkpoints.local_tier import link_local_tier
from graphtrain.config.schema import Run
from graphtrain.run.agreement import check_shared_directory, on_all_ranks, on_rank_zero
from graphtrain.run.log import RunLog
from graphtrain.run.resume import check_identity
from graphtrain.run.stalls import LOADING, UPLOADING
from graphtrain.run.watchdog import Watchdog
from lowering.xla import distributed

if TYPE_CHECKING:
    from graphtrain.run.uploads import Uploads


def open_uploads(run: Run, log: RunLog) -> Uploads | None:
    """Return what uploads the checkpoints of a run, on rank 0."""
    if run.checkpoints.remote is None or distributed.rank() != 0:
        return None
    from graphtrain.run.uploads import Uploads

    return Uploads(Path(run.directory), run.checkpoints, log.note)


def prepare_checkpoints(
    run: Run,
    identity: Callable[[int], Mapping[str, Any]],
    allowed_changes: Sequence[str],
    watchdog: Watchdog,
    log: RunLog,
    *,
    fresh: bool,
) -> None:
    """Link the local directory; download the newest checkpoint, if the store has a newer one.

    Called on every rank.

    Args:
        run: Settings of the run.
        identity: Returns what the run computes at a step.
        allowed_changes: Settings whose values may differ from those of the checkpoint.
        watchdog: Watchdog of this process.
        log: Log of the run.
        fresh: Whether the run starts at step 0 in any case.

    Raises:
        TrainingError: a place cannot be used, or the checkpoint is of another run.
    """
    directory, settings = Path(run.directory), run.checkpoints
    if settings.local is not None and distributed.rank() == 0:
        link = partial(link_local_tier, directory, settings.local, fresh=fresh)
    else:
        link = _do_nothing
    on_all_ranks(link)
    if settings.local is not None:
        check_shared_directory("run.checkpoints.local", Path(settings.local).absolute())
    else:
        check_shared_directory("run.directory", directory)
    if run.checkpoints.remote is None:
        return
    from graphtrain.run.remote_resume import fetch_newest

    def wait() -> None:
        watchdog.move(LOADING)

    def check(checkpoint: str, step: int, info: CheckpointInfo) -> None:
        check_identity(checkpoint, info, identity(step), allowed_changes)

    action = partial(fetch_newest, directory, settings, check, log.note, fresh=fresh, progress=wait)
    on_rank_zero(action, wait)


def fetch_instead(
    run: Run,
    identity: Callable[[int], Mapping[str, Any]],
    allowed_changes: Sequence[str],
    watchdog: Watchdog,
) -> Callable[[int, int], int | None]:
    """Return what downloads a checkpoint in place of a damaged one (`Resumption.fetch`).

    It is called on every rank; rank 0 downloads. Arguments are as of `prepare_checkpoints`.
    """

    def wait() -> None:
        watchdog.move(LOADING)

    def check(checkpoint: str, step: int, info: CheckpointInfo) -> None:
        check_identity(checkpoint, info, identity(step), allowed_changes)

    def fetch(low: int, high: int) -> int | None:
        if run.checkpoints.remote is None:
            return None
        from graphtrain.run.remote_resume import fetch_between

        steps = []

        def download() -> None:
            place = Path(run.directory), run.checkpoints
            steps.append(fetch_between(*place, check, low, high, wait))

        on_rank_zero(download, wait)
        text = str(steps[0] or "") if steps else ""
        step = distributed.all_gather_text(text)[0]
        return int(step) if step else None

    return fetch


def _do_nothing() -> None:
    """Do nothing, as the ranks that share the directory with rank 0."""


def finish_uploads(run: Run, uploads: Uploads | None, watchdog: Watchdog, step: int) -> None:
    """Wait on every rank for the last upload of rank 0."""
    if run.checkpoints.remote is None:
        return
    from graphtrain.run.uploads import wait_for_uploads

    def agree(text: str) -> str:
        watchdog.move(UPLOADING, step)
        return distributed.all_gather_text(text)[0]

    wait_for_uploads(uploads, run.checkpoints.remote_timeout, agree)
