"""Checkpoints of a run in two tiers: often on a disk of each host, rarely where all find them.

That is a shared disk, where a checkpoint is whole; or, if the hosts share none, an object store.
"""

from __future__ import annotations

import json
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from graphtrain.checkpoints.arrays import check_same_arrays, describe_arrays
from graphtrain.checkpoints.checkpoint import Checkpoints, RestoredState
from graphtrain.checkpoints.host_tier import HostTier, Part
from graphtrain.checkpoints.layer_order import LayerOrder, load_reordered, shape_pairs
from graphtrain.checkpoints.manifest import DamagedCheckpoint
from graphtrain.checkpoints.part_uploads import PartUploads
from graphtrain.checkpoints.peer_steps import PeerSteps, new_save
from graphtrain.checkpoints.peers import Peers
from graphtrain.checkpoints.pieces import groups_of_ranks, pieces_on_host, shard_shapes
from graphtrain.checkpoints.read_ahead import ReadAhead
from graphtrain.checkpoints.steps import Retention
from graphtrain.errors import CacheError, TrainingError
from lowering.errors import PeerLost
from lowering.trees import Tree
from lowering.xla import distributed

_POLL_SECONDS = 0.1


class TieredCheckpoints(Checkpoints):
    """Checkpoints of one run, most of them on disks of its hosts.

    Args:
        directory: Directory of the whole checkpoints.
        retention: Which checkpoints to retain.
        layer_order: Order of the layer rows.
        tier: Parts on the disk of this host.
        peers: The other hosts.
        peer_steps: Steps from which the run could resume.
        whole_every: Steps between checkpoints that all hosts share. None: only at the end of the
            run if they are saved whole; if parts are uploaded, every checkpoint.
        copies: Whether each host has a copy of the part of another one.
        uploads: Uploads of parts, if `directory` is not on a disk that all hosts share; then no
            checkpoint is saved whole.
        steps_in_use: As of `Checkpoints`.
        run_long: Runs an action on every rank; ranks that are done wait for the others without
            a limit, as while one of them downloads its pieces.
    """

    def __init__(
        self,
        directory: Path,
        retention: Retention,
        layer_order: LayerOrder,
        *,
        tier: HostTier,
        peers: Peers,
        peer_steps: PeerSteps,
        whole_every: int | None = None,
        copies: bool = False,
        uploads: PartUploads | None = None,
        steps_in_use: Callable[[], set[int]] = set,
        run_long: Callable[[Callable[[], None]], None] = lambda action: action(),
    ) -> None:
        super().__init__(
            directory,
            retention,
            layer_order,
            steps_in_use=steps_in_use,
            is_shared=uploads is None,
        )
        self._order = layer_order
        self._tier, self._peers, self._peer_steps = tier, peers, peer_steps
        self._whole_every, self._uploads, self._run_long = whole_every, uploads, run_long
        self._copies, self._keep = copies, retention.newest
        self._groups: list[int] | None = None
        self._thread: threading.Thread | None = None
        self._failed: list[Exception] = []
        self._newest = max(peer_steps.found, default=0)

    def save(
        self,
        step: int,
        state: Tree,
        loader: Mapping[str, Any],
        *,
        validation_loss: float | None = None,
        is_whole: bool = True,
        **records: Any,
    ) -> None:
        """Start saving, as `Checkpoints.save`; what is not whole is saved on the hosts' disks.

        A step is complete when every host has written its part.
        """
        self.wait()
        if is_whole and self._uploads is None:
            super().save(step, state, loader, validation_loss=validation_loss, **records)
            return
        metadata = self._metadata(step, state, loader, validation_loss, records)
        if self._groups is None:
            self._groups = groups_of_ranks(state, distributed.count())
        group, groups = self._groups[distributed.rank()], max(self._groups) + 1
        shapes = {path: list(shape) for path, shape in shard_shapes(state).items()}
        upload = self._uploads if is_whole else None
        save = new_save() if upload is None else upload.add(step, state)
        part = Part(save, group, groups, shapes)
        arguments = step, part, metadata, pieces_on_host(state)
        self._thread = threading.Thread(
            target=self._write, args=arguments, name="checkpoint of this host", daemon=True
        )
        self._thread.start()

    def restore(self, step: int, described: Tree) -> RestoredState:
        """Load a checkpoint, as `Checkpoints.restore`; pieces that this host lacks come from peers.

        Raises:
            DamagedCheckpoint: there is no sound copy of a piece that a host needs; on every rank.
            TrainingError: a host needs the object store, which cannot be read; on every rank.
        """
        if step not in self._peer_steps.found:
            restored = super().restore(step, described)
            # What the hosts' disks have is older, or cannot be restored.
            self._newest = 0 if self._uploads is None else step
            return restored
        path, loaded, outcome = self._tier.own(step), list[Tree](), {"damaged": "", "failed": ""}

        def load() -> None:
            try:
                loaded.append(self._load(step, path, described))
            except DamagedCheckpoint as damaged:
                outcome["damaged"] = damaged.reason
            except CacheError as error:
                outcome["failed"] = str(error)

        self._run_long(load)
        counts = {"received": self._peer_steps.received, "downloaded": self._peer_steps.downloaded}
        outcomes = list(map(json.loads, distributed.all_gather_text(json.dumps(outcome | counts))))
        if failed := [one["failed"] for one in outcomes if one["failed"]]:
            raise TrainingError(f"step {step} cannot be restored now: {failed[0]}")
        if reasons := [one["damaged"] for one in outcomes if one["damaged"]]:
            raise DamagedCheckpoint(path, reasons[0])
        if distributed.rank() == 0:
            _warn_of_pieces(step, outcomes)
        self._newest = step  # later steps cannot be restored
        return RestoredState(step, loaded[0], self._peer_steps.found[step].info.data_position)

    def _load(self, step: int, path: Path, described: Tree) -> Tree:
        info, open_array = self._peer_steps.found[step].info, self._peer_steps.open_arrays(step)
        shapes = shape_pairs(info.arrays, described)
        if rows := self._order.reordering_from(info.rows, shapes):
            return load_reordered(path, info, described, self._order, *rows, open_array)
        check_same_arrays(path, info.arrays, describe_arrays(described))
        with ReadAhead(described, open_array) as shards:
            return self._order.load_arrays(
                described, lambda name, shape, index: shards.take(name, index)
            )

    def quarantine(self, damaged: DamagedCheckpoint) -> Path:
        """Move a damaged checkpoint away, as `Checkpoints.quarantine`; each host its part."""
        if damaged.checkpoint_path.parent.parent != self._tier.directory:
            return super().quarantine(damaged)
        with self._save_errors():
            return self._tier.set_aside(int(damaged.checkpoint_path.name))

    def is_due_whole(self, step: int) -> bool:
        """Return whether the checkpoint of a step must be one that all hosts share."""
        if self._whole_every is None:
            return self._uploads is not None
        return step % self._whole_every == 0

    def newest(self) -> int:
        """Return the step of the newest complete checkpoint, on the hosts' disks or whole."""
        return self._newest if self._uploads else max(super().newest(), self._newest)

    def path(self, step: int) -> Path:
        """Return the directory of a whole checkpoint, or of the part of this host."""
        return super().path(step) if step in super().steps() else self._tier.own(step)

    def steps(self) -> list[int]:
        """Return the steps of the complete checkpoints, on the hosts' disks or whole."""
        on_hosts = {step for step in self._tier.steps() if step <= self._newest}
        return sorted({*super().steps(), *on_hosts})

    def is_writing(self) -> bool:
        is_alive = self._thread is not None and self._thread.is_alive()
        return is_alive or super().is_writing()

    def raise_if_failed(self) -> None:
        super().raise_if_failed()
        if self._failed:
            self._raise(self._failed[0])

    def wait(self) -> None:
        """Wait until every checkpoint that was started is complete, on all hosts."""
        while self._thread is not None and self._thread.is_alive() and not self._failed:
            self._thread.join(_POLL_SECONDS)
        self.raise_if_failed()
        self._thread = None
        super().wait()

    def close(self) -> None:
        if self._thread is not None and not self._failed:
            self.wait()
        super().close()

    def _raise(self, error: Exception) -> None:
        if not isinstance(error, OSError):
            raise error
        raise TrainingError(
            f"{self._tier.directory} cannot be written ({error.strerror or error}); free space "
            "there, or set run.checkpoints.local to another directory"
        ) from error

    def _write(
        self, step: int, part: Part, metadata: Mapping[str, Any], pieces: dict[str, np.ndarray]
    ) -> None:
        """Write the part of this host, on a thread; then wait for the other hosts."""
        names = set(pieces)
        try:
            self._tier.write(step, part, metadata, pieces)
            pieces.clear()
            distributed.wait_for_all(f"graphtrain/tier/{part.save}/written")
            self._check_alone(step, part, names)
            if self._copies and distributed.count() > 1:
                self._copy_from_previous(step, part)
            self._tier.set_complete(step)
            self._tier.remove_others(step, self._keep, self._uploaded())
            self._newest = step
        except Exception as error:  # raised by the thread that trains
            self._failed.append(error)

    def _uploaded(self) -> set[int]:
        """Return the steps that are uploaded from the disk of this host, or may be."""
        if self._uploads is None:
            return set()
        return {*self._steps_in_use(), *self._uploads.steps()}

    def _check_alone(self, step: int, part: Part, names: set[str]) -> None:
        """Check that no other host has replaced the part of this one, as on a disk that they share.

        Raises:
            TrainingError: one has. Earlier steps are still there.
        """
        if not names <= set(self._tier.names(step, part.save) or ()):
            rank = distributed.names([distributed.rank()])
            raise TrainingError(
                f"{self._tier.directory} seemed to be a disk of each host (run.checkpoints.local), "
                f"but another host has replaced the part of {rank} of step {step} there; set it to "
                "a disk of each host, or to a file system on which hosts see each other's files at "
                "once"
            )

    def _copy_from_previous(self, step: int, part: Part) -> None:
        """Copy the part of the previous host, unless it has the same pieces."""
        assert self._groups is not None
        previous = (distributed.rank() - 1) % distributed.count()
        if self._groups[previous] != part.group:
            self._tier.copy(step, self._files_of(previous, step, part.save))
        distributed.wait_for_all(f"graphtrain/tier/{part.save}/copied")

    def _files_of(self, rank: int, step: int, save: str) -> Iterator[tuple[str, bytes]]:
        """Yield the files of the part of a rank, with their content.

        Raises:
            PeerLost: it does not send them.
        """
        names = self._peers.names(rank, step, save)
        for name in names or [""]:
            content = self._peers.read(rank, step, save, name) if name else None
            if content is None:
                raise PeerLost(
                    f"{distributed.names([rank])} did not send its part of step {step}, which "
                    "run.checkpoints.copies copies"
                )
            yield name, content


def _warn_of_pieces(step: int, outcomes: Sequence[Mapping[str, Any]]) -> None:
    """Say which hosts did not have all of their pieces."""
    for rank, outcome in enumerate(outcomes):
        places = {"received": "by other hosts", "downloaded": "by the object store"}
        for count, place in places.items():
            if outcome[count]:
                warnings.warn(
                    f"{distributed.names([rank])} was sent {outcome[count]} of its pieces of step "
                    f"{step} {place}",
                    stacklevel=1,
                )
