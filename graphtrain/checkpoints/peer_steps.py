"""Steps that the hosts of a run can restore together, each from its own disk and its peers'."""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from graphtrain.checkpoints.host_tier import METADATA, OWN, PART, HeldPart, HostTier, Part
from graphtrain.checkpoints.info import CheckpointInfo, decode_checkpoint_info
from graphtrain.checkpoints.layer_rows import Index
from graphtrain.checkpoints.manifest import DamagedCheckpoint
from graphtrain.checkpoints.peers import Peers
from graphtrain.checkpoints.pieces import FOLDER, assemble
from graphtrain.errors import TrainingError
from graphtrain.files import validate
from lowering.xla import distributed
from sharding_rules.documents import DocumentError, parse_object

_REMEMBERED = 64  # pieces of an array, while the shards that they overlap are put together


@dataclass(frozen=True)
class PeerStep:
    """A step of which the hosts have all pieces."""

    step: int
    save: str
    info: CheckpointInfo
    part: Part  # of any host: the shapes of the pieces
    holders: list[int]  # ranks that have a part


class PeerSteps:
    """Steps on the disks of the hosts of a run.

    Args:
        tier: Parts on the disk of this host.
        peers: The other hosts.
    """

    def __init__(self, tier: HostTier, peers: Peers) -> None:
        self._tier, self._peers = tier, peers
        self.received = 0  # pieces that the other hosts sent to this one
        self.found: dict[int, PeerStep] = {}
        self.lost: dict[int, list[int]] = {}  # steps that were complete, and who has no part

    def find(self) -> None:
        """Find the steps that can be restored. Called on every rank; all find the same."""
        held = self._tier.parts()
        words = distributed.all_gather_text(json.dumps([_said(one) for one in held]))
        saves: dict[tuple[int, str], dict[int, list[tuple[int, int, bool]]]] = {}
        for rank, word in enumerate(words):
            for step, save, group, groups, is_complete in json.loads(word):
                by_rank = saves.setdefault((step, save), {})
                by_rank.setdefault(rank, []).append((group, groups, is_complete))
        for (step, save), by_rank in sorted(saves.items()):
            parts = [part for some in by_rank.values() for part in some]
            if {group for group, _, _ in parts} == set(range(parts[0][1])):
                self._add(step, save, sorted(by_rank))
            elif any(is_complete for _, _, is_complete in parts):
                self.lost[step] = [r for r in range(distributed.count()) if r not in by_rank]

    def _add(self, step: int, save: str, holders: list[int]) -> None:
        """Add a step if every host can read its metadata."""
        found, reason = None, ""
        try:
            metadata = parse_object(self._read(step, save, METADATA, holders))
            path = self._tier.directory / OWN / str(step)
            info = decode_checkpoint_info(metadata, path, step)
            part = validate(Part, parse_object(self._read(step, save, PART, holders)))
            found = PeerStep(step, save, info, part, holders)
        except (TrainingError, DocumentError, KeyError) as error:
            reason = str(error)
        reasons = list(filter(None, distributed.all_gather_text(reason)))
        if found is not None and not reasons:
            self.found[step] = found
        elif distributed.rank() == 0:
            warnings.warn(
                f"step {step} of the hosts' disks is not used: {reasons[0]}", stacklevel=1
            )

    def open_arrays(self, step: int) -> Callable[[str], Callable[[Index], np.ndarray]]:
        """Return what opens an array by its path, to read parts of it.

        Reading raises DamagedCheckpoint if no host has a sound piece.
        """
        one = self.found[step]

        def open_array(path: str) -> Callable[[Index], np.ndarray]:
            shape, dtype = one.info.arrays[path]

            @lru_cache(_REMEMBERED)
            def read(name: str) -> bytes:
                return self._read(step, one.save, name, one.holders)

            def part(index: Index) -> np.ndarray:
                sizes = tuple(one.part.shapes[path])
                return assemble(path, index, tuple(shape), sizes, np.dtype(dtype), read)

            return part

        return open_array

    def _read(self, step: int, save: str, name: str, holders: list[int]) -> bytes:
        """Return a file of a save, from this host or another one.

        Raises:
            DamagedCheckpoint: no host has it as it was written.
        """
        content = self._tier.read(step, save, name)
        if content is not None:
            return content
        for rank in self._sources(holders):
            if (content := self._peers.read(rank, step, save, name)) is not None:
                self.received += name.startswith(f"{FOLDER}/")
                return content
        raise DamagedCheckpoint(
            self._tier.directory / OWN / str(step), f"no host has {name} as it was written"
        )

    def _sources(self, holders: list[int]) -> Iterator[int]:
        """Yield the other holders; the next host first, which has the copies."""
        rank, count = distributed.rank(), distributed.count()
        for distance in range(1, count):
            if (peer := (rank + distance) % count) in holders:
                yield peer


def _said(one: HeldPart) -> tuple[int, str, int, int, bool]:
    """Return what the other hosts are told of a part."""
    return one.step, one.part.save, one.part.group, one.part.groups, one.is_complete


def new_save() -> str:
    """Return a name for a save, equal on all ranks. Called on every rank."""
    return distributed.all_gather_text(f"{time.time_ns()}")[0]
