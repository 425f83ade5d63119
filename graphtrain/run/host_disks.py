"""Disks of the hosts of a run (`run.checkpoints.local`), each with its part of checkpoints."""

from __future__ import annotations

import errno
import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from graphtrain.checkpoints.host_tier import HostTier
from graphtrain.checkpoints.local_tier import remove_link
from graphtrain.checkpoints.output_directory import write_errors
from graphtrain.checkpoints.part_uploads import PartUploads
from graphtrain.checkpoints.peer_steps import PeerSteps
from graphtrain.checkpoints.peers import Peers, PeerServer, connect_peers
from graphtrain.errors import TrainingError
from graphtrain.run.agreement import is_shared_directory, on_all_ranks
from lowering.xla import distributed

_LOCK_SECONDS = 30.0  # for which a start waits for an earlier process of the run to end
_POLL_SECONDS = 0.2


@dataclass(frozen=True)
class HostDisks:
    """Disks of the hosts of a run, each with its part of checkpoints."""

    tier: HostTier
    server: PeerServer
    peers: Peers
    steps: PeerSteps
    uploads: PartUploads | None = None  # of parts, if the hosts do not share run.directory either


def is_disk_of_host(local: Path) -> bool:
    """Return whether a directory is on a disk of each host. Called on every rank.

    Raises:
        TrainingError: only some hosts share it, or it cannot be written; or all share it, and it
            has parts of checkpoints from when they did not.
    """

    def create() -> None:
        with write_errors(local):
            local.mkdir(parents=True, exist_ok=True)

    on_all_ranks(create)
    if distributed.count() == 1:  # perhaps after the other hosts of the run were lost
        return bool(HostTier(local).steps())
    is_shared = is_shared_directory("run.checkpoints.local", local)
    if is_shared:
        on_all_ranks(lambda: _check_no_parts(local))
    return not is_shared


def _check_no_parts(local: Path) -> None:
    """Check that no host has saved its part in a directory that all hosts share now.

    Raises:
        TrainingError: one has; the run would silently start before that step.
    """
    if steps := HostTier(local).steps():
        found = ", ".join(map(str, steps))
        raise TrainingError(
            f"{local} has parts of checkpoints (steps {found}) from when it was a disk of one "
            "host, and now all processes of the run share it; start them on hosts with a disk "
            "each, or move own/ and copies/ away to resume without these steps"
        )


@contextmanager
def locked_disk(local: Path) -> Iterator[None]:
    """Let no other run on this host save its parts in a directory: each would delete the other's.

    Raises:
        TrainingError: another run does, or the directory cannot be written.
    """
    with write_errors(local):
        file = (local / ".lock").open("wb")
    with file:
        _lock(file, local)
        yield


def _lock(file: BinaryIO, local: Path) -> None:
    """Lock a file; a process that was killed may need some seconds to end."""
    deadline = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            # Of this process alone: processes that it has forked may outlive it.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                return  # the file system has no locks
        if time.monotonic() > deadline:
            raise TrainingError(
                f"another run on this host saves checkpoints in {local}; end it, or set "
                "run.checkpoints.local to a directory for each run"
            )
        time.sleep(_POLL_SECONDS)


def open_disks(directory: Path, local: Path, *, fresh: bool) -> HostDisks:
    """Serve the disk of this host to the others. Called on every rank.

    Args:
        directory: Directory of the run.
        local: Setting run.checkpoints.local.
        fresh: Whether the run starts at step 0 in any case.

    Raises:
        TrainingError: `fresh`, and there are checkpoints; or there are some elsewhere that the
            other hosts do not see; or a host cannot be served from.
    """
    tier = HostTier(local)

    def check() -> None:
        if distributed.rank() == 0:
            remove_link(directory)
        if fresh and (steps := tier.steps()):
            raise TrainingError(
                f"{tier.directory} has checkpoints (steps {', '.join(map(str, steps))}), from "
                "which a later start would resume; with --fresh, move them away, or set "
                "run.checkpoints.local to another directory"
            )

    on_all_ranks(check)
    server, peers = connect_peers(tier)
    return HostDisks(tier, server, peers, PeerSteps(tier, peers))
