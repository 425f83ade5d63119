"""Places of the checkpoints of a run: run.checkpoints.local and remote."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphtrain.checkpoints.info import CheckpointInfo
from graphtrain.checkpoints.local_tier import link_local_tier
from graphtrain.checkpoints.output_directory import write_errors
from graphtrain.checkpoints.part_uploads import PartUploads
from graphtrain.config.schema import Run
from graphtrain.errors import TrainingError
from graphtrain.run.agreement import (
    check_shared_directory,
    is_shared_directory,
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


def open_uploads(run: Run, log: RunLog, disks: HostDisks | None) -> Uploads | None:
    """Return what uploads the checkpoints of a run: on rank 0, or each rank those of its disk."""
    parts = disks.uploads if disks is not None else None
    if run.checkpoints.remote is None or (parts is None and distributed.rank() != 0):
        return None
    from graphtrain.run.uploads import Uploads

    return Uploads(Path(run.directory), run.checkpoints, log.note, parts)


def shares_directory(disks: HostDisks | None) -> bool:
    """Return whether all hosts of the run see the same directory of the run."""
    return disks is None or disks.uploads is None


def note_restored(disks: HostDisks | None, step: int) -> None:
    """Note the step from which the run resumes, to upload it if the store lacks it.

    Called on every rank.
    """
    if disks is None or disks.uploads is None:
        return
    one = disks.steps.found.get(step)
    if one is not None and one.remote is None:
        disks.uploads.add_restored(one)


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
    if disks is None and settings.local is None:
        check_shared_directory("run.directory", directory)
    if disks is not None:
        disks = _with_uploads(disks, run)
        if not fresh:
            disks.steps.find()
    if disks is not None and disks.uploads is not None:
        _find_in_store(run, disks, identity, allowed_changes, watchdog, log, fresh=fresh)
    elif run.checkpoints.remote is not None:
        on_hosts = max(disks.steps.found, default=0) if disks is not None else 0
        _fetch(run, identity, allowed_changes, watchdog, log, fresh=fresh, on_hosts=on_hosts)
    return disks


def _open_local(directory: Path, local: str, stack: ExitStack, *, fresh: bool) -> HostDisks | None:
    """Return the disks of the hosts, if `local` is one; else link to it. Called on every rank."""
    from graphtrain.run.host_disks import is_disk_of_host, locked_disk, open_disks

    place = Path(local).absolute()
    if is_disk_of_host(place):
        on_all_ranks(lambda: stack.enter_context(locked_disk(place)))
        disks = open_disks(directory, Path(local), fresh=fresh)
        stack.callback(disks.server.close)
        return disks

    def link() -> None:
        stack.enter_context(locked_disk(place))
        link_local_tier(directory, local, fresh=fresh)

    on_all_ranks(link if distributed.rank() == 0 else _do_nothing)
    return None


def _with_uploads(disks: HostDisks, run: Run) -> HostDisks:
    """Return the disks, with uploads of their parts if the hosts do not share run.directory.

    Called on every rank.

    Raises:
        TrainingError: they do not, and a setting needs that they do.
    """
    directory, remote = Path(run.directory), run.checkpoints.remote

    def create() -> None:
        with write_errors(directory):
            directory.mkdir(parents=True, exist_ok=True)

    on_all_ranks(create)
    if is_shared_directory("run.directory", directory):
        return disks
    if remote is None:
        raise TrainingError(
            f"the hosts share neither run.directory ({directory}) nor run.checkpoints.local; set "
            "run.checkpoints.remote to an object store, where they bring their parts together, or "
            "run.directory to a file system that all hosts share"
        )
    if "://" not in remote:
        place = Path(remote).expanduser().absolute()
        on_all_ranks(partial(_create_store, place))
        if not is_shared_directory("run.checkpoints.remote", place):
            raise TrainingError(
                f"run.checkpoints.remote = {remote} is on a disk of each host, as run.directory "
                "is; set one of both to what all hosts share, such as an object store"
            )
    return replace(disks, uploads=PartUploads(disks.tier))


def _create_store(place: Path) -> None:
    with write_errors(place):
        place.mkdir(parents=True, exist_ok=True)


def _find_in_store(
    run: Run,
    disks: HostDisks,
    identity: Callable[[int], Mapping[str, Any]],
    allowed_changes: Sequence[str],
    watchdog: Watchdog,
    log: RunLog,
    *,
    fresh: bool,
) -> None:
    """Add the steps in the store to those of the hosts' disks. Called on every rank."""
    from graphtrain.run.remote_steps import add_remote_steps

    def wait() -> None:
        watchdog.move(LOADING)

    def check(checkpoint: str, step: int, info: CheckpointInfo) -> None:
        check_identity(checkpoint, info, identity(step), allowed_changes)

    place = Path(run.directory), run.checkpoints
    add_remote_steps(*place, disks.steps, check, log.note, fresh=fresh, wait=wait)


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
    disks: HostDisks | None,
    identity: Callable[[int], Mapping[str, Any]],
    allowed_changes: Sequence[str],
    watchdog: Watchdog,
) -> Callable[[int, int], int | None]:
    """Return what downloads a checkpoint in place of a damaged one (`Resumption.fetch`).

    It is called on every rank; rank 0 downloads. Arguments are as of `prepare_checkpoints`. Where
    hosts share no disk, each reads what is damaged from the store, and nothing else is done.
    """

    def wait() -> None:
        watchdog.move(LOADING)

    def check(checkpoint: str, step: int, info: CheckpointInfo) -> None:
        check_identity(checkpoint, info, identity(step), allowed_changes)

    def fetch(low: int, high: int) -> int | None:
        if run.checkpoints.remote is None or not shares_directory(disks):
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
