"""Places of the checkpoints of a run: run.checkpoints.local and remote."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphtrain.checkpoints.info import CheckpointInfo
from graphtrain.checkpoints.local_tier import link_local_tier
from graphtrain.config.schema import Run
from graphtrain.run.agreement import (
    check_shared_directory,
    on_all_ranks,
    on_rank_zero,
)
from graphtrain.run.log import RunLog
from graphtrain.run.resume import check_identity
from graphtrain.run.stalls import LOADING, UPLOADING
from graphtrain.run.watchdog import Watchdog
from lowering.xla import distributed

if TYPE_CHECKING:
    from graphtrain.run.host_disks import HostDisks
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
    stack: ExitStack,
    *,
    fresh: bool,
) -> HostDisks | None:
    """Link the local directory, or open the disks of the hosts; download a newer checkpoint.

    Called on every rank.

    Args:
        run: Settings of the run.
        identity: Returns what the run computes at a step.
        allowed_changes: Settings whose values may differ from those of the checkpoint.
        watchdog: Watchdog of this process.
        log: Log of the run.
        stack: Ends what is opened.
        fresh: Whether the run starts at step 0 in any case.

    Returns:
        The disks of the hosts, if `local` is one; None if all hosts share it.

    Raises:
        TrainingError: a place cannot be used, or the checkpoint is of another run.
    """
    directory, settings = Path(run.directory), run.checkpoints
    disks = None
    if settings.local is not None:
        disks = _open_local(directory, settings.local, stack, fresh=fresh)
    if settings.local is None or disks is not None:
        check_shared_directory("run.directory", directory)
    if disks is not None and not fresh:
        disks.steps.find()
    if run.checkpoints.remote is not None:
        on_hosts = max(disks.steps.found, default=0) if disks is not None else 0
        _fetch(run, identity, allowed_changes, watchdog, log, fresh=fresh, on_hosts=on_hosts)
    return disks


def _open_local(directory: Path, local: str, stack: ExitStack, *, fresh: bool) -> HostDisks | None:
    """Return the disks of the hosts, if `local` is one; else link to it. Called on every rank."""
    from graphtrain.run.host_disks import is_disk_of_host, locked_disk, open_disks

    if is_disk_of_host(Path(local).absolute()):
        on_all_ranks(lambda: stack.enter_context(locked_disk(Path(local).absolute())))
        disks = open_disks(directory, Path(local), fresh=fresh)
        stack.callback(disks.server.close)
        return disks
    is_first = distributed.rank() == 0
    on_all_ranks(
        partial(link_local_tier, directory, local, fresh=fresh) if is_first else _do_nothing
    )
    return None


def _fetch(
    run: Run,
    identity: Callable[[int], Mapping[str, Any]],
    allowed_changes: Sequence[str],
    watchdog: Watchdog,
    log: RunLog,
    *,
    fresh: bool,
    on_hosts: int,
) -> None:
    """Download the newest checkpoint on rank 0, if the store has a newer one."""
    directory, settings = Path(run.directory), run.checkpoints
    from graphtrain.run.remote_resume import fetch_newest

    def wait() -> None:
        watchdog.move(LOADING)

    def check(checkpoint: str, step: int, info: CheckpointInfo) -> None:
        check_identity(checkpoint, info, identity(step), allowed_changes)

    place = directory, settings
    action = partial(
        fetch_newest, *place, check, log.note, fresh=fresh, on_hosts=on_hosts, progress=wait
    )
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
