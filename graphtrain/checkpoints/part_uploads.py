"""Agreement of hosts that share no disk on the steps that they upload together.

One upload is under way at a time: the hosts need different times, and would otherwise upload parts
of different steps. A step that is saved meanwhile is left out, unless a host cannot go on with the
one before, or rank 0 waits for parts that no host uploads any more: then all take the new one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from graphtrain.checkpoints.host_tier import HostTier
from graphtrain.checkpoints.peer_steps import PeerStep
from graphtrain.checkpoints.pieces import pieces_to_upload
from graphtrain.checkpoints.remote_manifest import new_prefix
from graphtrain.checkpoints.remote_parts import PartSource, PartsUpload
from lowering.trees import Tree
from lowering.xla import distributed

# Of the upload that a host was asked for. Only rank 0 waits, for the parts of the others. A host
# whose part was refused is failing until it is asked for the next one.
State = Literal["idle", "busy", "waiting", "failing"]


@dataclass
class PartUploads:
    """Uploads of the steps on the disks of the hosts.

    Args:
        tier: Parts on the disk of this host.
        state: Returns how far this host is with the upload that it was asked for.
    """

    tier: HostTier
    state: Callable[[], State] = lambda: "idle"
    _uploads: dict[int, PartsUpload] = field(default_factory=dict)  # by step
    _left_out: set[int] = field(default_factory=set)
    _pieces: tuple[list[str], list[int]] | None = None

    def add(self, step: int, state: Tree) -> str:
        """Note a step that is saved; return a name for the save. Called on every rank.

        All ranks get the same name, and decide in the same way whether the step can be uploaded.
        """
        rank = distributed.rank()
        if self._pieces is None:
            self._pieces = pieces_to_upload(state, rank)
        word = json.dumps([new_prefix(step), self.state()])
        words = [json.loads(word) for word in distributed.all_gather_text(word)]
        prefix, states = words[0][0], {state for _, state in words}
        names, ranks = self._pieces
        directory = str(self.tier.own(step))
        # Rank 0 has the metadata, whether or not it has pieces that no lower rank has.
        sources = [PartSource(rank, directory, names)] if rank in ranks or rank == 0 else []
        self._uploads[step] = PartsUpload(prefix, sources, sorted({0, *ranks}), rank == 0)
        if "busy" in states and "failing" not in states:
            self._left_out.add(step)
        self._forget_before(step)
        return prefix.rpartition("/")[2]

    def add_restored(self, one: PeerStep) -> None:
        """Note the step from which the run resumes, for the case that the store lacks it.

        Called on every rank. The hosts that have its parts may have other ranks than when it was
        saved.
        """
        prefix = distributed.all_gather_text(new_prefix(one.step))[0]
        rank, chosen = distributed.rank(), one.first_holders
        if chosen.get(0) != 0:
            return  # the disk of rank 0 was lost, and with it the metadata that it uploads
        groups = [group for group, holder in chosen.items() if holder == rank]
        sources = [
            PartSource(held.part.group, str(held.directory))
            for held in self.tier.parts()
            if (held.step, held.part.save) == (one.step, one.save) and held.part.group in groups
        ]
        self._uploads[one.step] = PartsUpload(prefix, sources, sorted(chosen), rank == 0)

    def upload(self, step: int) -> PartsUpload | None:
        """Return the upload of a step; None if the step was not saved, or not by this process."""
        return self._uploads.get(step)

    def is_left_out(self, step: int) -> bool:
        """Return whether an earlier step was still being uploaded when this one was saved."""
        return step in self._left_out

    def steps(self) -> Sequence[int]:
        """Return the steps that may still be uploaded, whose parts must stay."""
        return list(self._uploads)

    def _forget_before(self, step: int) -> None:
        for earlier in [one for one in self._uploads if one < step]:
            del self._uploads[earlier]
            self._left_out.discard(earlier)
