"""Steps in the object store of a run whose hosts share no disk, before the run resumes.

Every host reads the store itself: of a step that hosts uploaded together, only the pieces that it
lacks; a checkpoint that was uploaded as a whole, as a whole.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

from graphtrain.checkpoints.info import CheckpointInfo
from graphtrain.checkpoints.output_directory import write_errors
from graphtrain.checkpoints.peer_steps import PeerSteps
from graphtrain.checkpoints.remote import RemoteCheckpoints
from graphtrain.checkpoints.remote_manifest import DamagedRemoteCheckpoint, RemoteManifest
from graphtrain.checkpoints.remote_parts import RemoteStep, open_remote_step
from graphtrain.checkpoints.run_files import METRICS
from graphtrain.checkpoints.steps import saved_steps
from graphtrain.config.schema import CheckpointSettings
from graphtrain.errors import CacheError, TrainingError
from graphtrain.run.agreement import (
    on_all_ranks_long,
    on_rank_zero,
    steps_on_all_ranks,
)
from graphtrain.run.remote_resume import fetch_checkpoint, refuse_fresh
from lowering.xla import distributed

_CONSIDERED = 3  # newest steps of the store

Check = Callable[[str, int, CheckpointInfo], None]


def add_remote_steps(
    directory: Path,
    settings: CheckpointSettings,
    found: PeerSteps,
    check: Check,
    note: Callable[[str], None],
    *,
    fresh: bool,
    wait: Callable[[], None],
) -> None:
    """Add the newest steps in the object store to those of the hosts' disks. Called on every rank.

    A newest one that was uploaded as a whole is downloaded by every host into its directory.

    Args:
        directory: Directory of the run, which the hosts do not share.
        settings: Settings of its checkpoints, with `remote`.
        found: Steps on the hosts' disks.
        check: As of `fetch_newest`.
        note: Called with lines for the log of the run.
        fresh: Whether the run starts at step 0 in any case.
        wait: Called now and then.

    Raises:
        TrainingError: `fresh`, and the store has checkpoints; or it cannot be read, or has only
            damaged ones, and the hosts have none.
    """
    here, _ = steps_on_all_ranks(saved_steps(directory / "checkpoints"))
    newest = max([*found.found, *here], default=0)
    steps = _list_steps(settings, newest, fresh=fresh, wait=wait)
    used: list[RemoteManifest] = []
    for step in [] if fresh else reversed(steps[-_CONSIDERED:]):
        if (opened := _open_everywhere(settings, step, wait)) is None:
            continue
        if isinstance(opened, RemoteStep):
            found.add_remote(opened)
            used.append(opened.manifest)
        elif step > newest and not used:
            fetch = partial(_fetch_whole, directory, settings, step, check, note)
            on_all_ranks_long(fetch, wait)
            used.append(opened)
    if used:
        files = partial(_fetch_run_files, directory, settings, used[0], note)
        on_rank_zero(files, wait)
    elif steps and not newest and not fresh:
        raise TrainingError(
            f"no checkpoint in {settings.remote} can be read by all hosts, and there is none on "
            "their disks; correct it, or set run.checkpoints.remote to a new location to start "
            "again"
        )


def _list_steps(
    settings: CheckpointSettings, newest: int, *, fresh: bool, wait: Callable[[], None]
) -> list[int]:
    """Return the steps in the store, which rank 0 lists.

    Raises:
        TrainingError: `fresh`, and there are some; or the store cannot be read, and the hosts have
            no checkpoint.
    """
    listed: list[int] = []

    def list_steps() -> None:
        try:
            remote = _open_store(settings)
            listed.extend(remote.steps())
        except CacheError as error:
            if not newest:
                raise TrainingError(
                    "the checkpoints of this run cannot be read, and the hosts have none on their "
                    f"disks: {error}; correct it, or set run.checkpoints.remote to a new location"
                ) from error
            warnings.warn(
                f"resuming from the disks of the hosts, step {newest}: {error}", stacklevel=1
            )
        if fresh and listed:
            raise refuse_fresh(str(settings.remote), listed)

    on_rank_zero(list_steps, wait)
    return json.loads(distributed.all_gather_text(json.dumps(listed))[0])


def _open_store(settings: CheckpointSettings) -> RemoteCheckpoints:
    assert settings.remote is not None
    return RemoteCheckpoints(settings.remote, settings.endpoint, create=True)


def _open_everywhere(
    settings: CheckpointSettings, step: int, wait: Callable[[], None]
) -> RemoteStep | RemoteManifest | None:
    """Return a step, or the manifest of a whole checkpoint; None if a host cannot read it.

    All hosts return the same; that one cannot is a warning.
    """
    opened: list[RemoteStep | RemoteManifest] = []
    reasons: list[str] = []

    def read() -> None:
        try:
            remote = _open_store(settings)
            manifest = remote.manifest(step)
            opened.append(open_remote_step(remote, manifest) or manifest)
        except (DamagedRemoteCheckpoint, CacheError) as error:
            reasons.append(f"{distributed.names([distributed.rank()])}: {error}")

    on_all_ranks_long(read, wait)
    prefix = [one.prefix if isinstance(one, RemoteManifest) else one.manifest.prefix
              for one in opened]  # fmt: skip
    words = list(map(json.loads, distributed.all_gather_text(json.dumps([prefix, reasons]))))
    failed = [reason for _, some in words for reason in some]
    if not failed and all(word == words[0] for word in words):
        return opened[0]
    if distributed.rank() == 0:
        reason = failed[0] if failed else "it is replaced meanwhile"
        warnings.warn(f"step {step} of {settings.remote} is not used: {reason}", stacklevel=1)
    return None


def _fetch_whole(
    directory: Path,
    settings: CheckpointSettings,
    step: int,
    check: Check,
    note: Callable[[str], None],
) -> None:
    remote = _open_store(settings)
    with write_errors(directory):
        (directory / "checkpoints").mkdir(exist_ok=True)
    if step in saved_steps(directory / "checkpoints"):
        return
    if not fetch_checkpoint(remote, step, directory, check, lambda: None):
        raise TrainingError(f"{remote.url} has a damaged checkpoint of step {step}; delete it")
    note(f"downloaded the checkpoint of step {step} from {remote.url}")


def _fetch_run_files(
    directory: Path,
    settings: CheckpointSettings,
    manifest: RemoteManifest,
    note: Callable[[str], None],
) -> None:
    """Download the metrics of the run, where rank 0 is now on a host that has none of it."""
    if (directory / METRICS).exists():
        return
    try:
        with write_errors(directory):
            _open_store(settings).download_run_files(manifest, directory)
    except (DamagedRemoteCheckpoint, CacheError) as error:
        warnings.warn(f"the metrics of earlier starts are missing: {error}", stacklevel=1)
    else:
        note(f"downloaded the metrics up to step {manifest.step} from {settings.remote}")
