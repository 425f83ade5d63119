"""Steps that the hosts of a run can restore together: from own disks, peers', and a store."""

from __future__ import annotations

import json
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np

from graphtrain.checkpoints.host_tier import METADATA, PART, HeldPart, HostTier, Part
from graphtrain.checkpoints.info import CheckpointInfo, decode_checkpoint_info
from graphtrain.checkpoints.layer_rows import Index
from graphtrain.checkpoints.manifest import DamagedCheckpoint
from graphtrain.checkpoints.peers import Peers
from graphtrain.checkpoints.pieces import FOLDER, assemble
from graphtrain.checkpoints.remote_manifest import DamagedRemoteCheckpoint
from graphtrain.checkpoints.remote_parts import RemoteStep
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
    first_holders: dict[int, int]  # lowest rank that has the part of each group
    remote: RemoteStep | None = None  # the same save in the object store


class PeerSteps:
    """Steps on the disks of the hosts of a run.

    Args:
        tier: Parts on the disk of this host.
        peers: The other hosts.
    """

    def __init__(self, tier: HostTier, peers: Peers) -> None:
        self._tier, self._peers = tier, peers
        self._lock = threading.Lock()  # of the counts: several pieces are read at once
        self.received = 0  # pieces that the other hosts sent to this one
        self.downloaded = 0  # pieces that the object store sent to it
        self.found: dict[int, PeerStep] = {}
        self.lost: dict[int, list[int]] = {}  # steps that were complete, and who has no part
        self._holders: dict[tuple[int, str], dict[int, int]] = {}  # by step and save, as below

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
            self._holders[step, save] = _first_holders(by_rank)
            if set(self._holders[step, save]) == set(range(parts[0][1])):
                self._add(step, save, sorted(by_rank))
            elif any(is_complete for _, _, is_complete in parts):
                self.lost[step] = [r for r in range(distributed.count()) if r not in by_rank]

    def _add(self, step: int, save: str, holders: list[int]) -> None:
        """Add a step if every host can read its metadata."""
        found, reason = None, ""
        try:
            read = partial(self._read, step, save, holders, None)
            metadata = parse_object(read(METADATA))
            info = decode_checkpoint_info(metadata, self._tier.own(step), step)
            part = validate(Part, parse_object(read(PART)))
            found = PeerStep(step, save, info, part, holders, self._holders[step, save])
        except (TrainingError, DocumentError, KeyError) as error:
            reason = str(error)
        reasons = list(filter(None, distributed.all_gather_text(reason)))
        if found is not None and not reasons:
            self.found[step] = found
        elif distributed.rank() == 0:
            warnings.warn(
                f"step {step} of the hosts' disks is not used: {reasons[0]}", stacklevel=1
            )

    def add_remote(self, remote: RemoteStep) -> None:
        """Add a step that is in the object store; pieces that no host has are read from there.

        A step of the hosts' disks that was saved again, after the upload, stays as it is.
        """
        step, save = remote.manifest.step, remote.part.save
        known = self.found.get(step)
        if known is not None and known.save != save:
            return
        holders = self._holders.get((step, save), {})
        ranks = known.holders if known else sorted(set(holders.values()))
        info = known.info if known else remote.info
        self.found[step] = PeerStep(step, save, info, remote.part, ranks, holders, remote)
        self.lost.pop(step, None)

    def open_arrays(self, step: int) -> Callable[[str], Callable[[Index], np.ndarray]]:
        """Return what opens an array by its path, to read parts of it.

        Reading raises DamagedCheckpoint if no host has a sound piece.
        """
        one = self.found[step]

        def open_array(path: str) -> Callable[[Index], np.ndarray]:
            shape, dtype = one.info.arrays[path]

            @lru_cache(_REMEMBERED)
            def read(name: str) -> bytes:
                return self._read(step, one.save, one.holders, one.remote, name)

            def part(index: Index) -> np.ndarray:
                sizes = tuple(one.part.shapes[path])
                return assemble(path, index, tuple(shape), sizes, np.dtype(dtype), read)

            return part

        return open_array

    def _read(
        self, step: int, save: str, holders: list[int], remote: RemoteStep | None, name: str
    ) -> bytes:
        """Return a file of a save: from this host, another one, or the object store.

        Raises:
            DamagedCheckpoint: none has it as it was written.
            CacheError: no host has it, and the store cannot be read.
        """
        content = self._tier.read(step, save, name)
        if content is not None:
            return content
        for rank in self._sources(holders):
            if (content := self._peers.read(rank, step, save, name)) is not None:
                with self._lock:
                    self.received += name.startswith(f"{FOLDER}/")
                return content
        reason = f"no host has {name} as it was written"
        if remote is not None:
            try:
                content = remote.read(name)
                with self._lock:
                    self.downloaded += name.startswith(f"{FOLDER}/")
                return content
            except DamagedRemoteCheckpoint as error:
                reason += f", and {error}"
        raise DamagedCheckpoint(self._tier.own(step), reason)

    def _sources(self, holders: list[int]) -> Iterator[int]:
        """Yield the other holders; the next host first, which has the copies."""
        rank, count = distributed.rank(), distributed.count()
        for distance in range(1, count):
            if (peer := (rank + distance) % count) in holders:
                yield peer


def _first_holders(by_rank: dict[int, list[tuple[int, int, bool]]]) -> dict[int, int]:
    """Return the lowest rank that has the part of each group."""
    first: dict[int, int] = {}
    for rank, parts in sorted(by_rank.items()):
        for group, _, _ in parts:
            first.setdefault(group, rank)
    return first


def _said(one: HeldPart) -> tuple[int, str, int, int, bool]:
    """Return what the other hosts are told of a part."""
    return one.step, one.part.save, one.part.group, one.part.groups, one.is_complete


def new_save() -> str:
    """Return a name for a save, equal on all ranks. Called on every rank."""
    return distributed.all_gather_text(f"{time.time_ns()}")[0]
