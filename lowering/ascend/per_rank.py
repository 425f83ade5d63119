"""Per-rank files: one artifact serves all ranks, and loading fills in what differs by rank."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from lowering.ascend import mindir
from lowering.ascend.collectives import EXCHANGE, placeholder

Groups = Sequence[Sequence[int]]

_WORLD = {"CPU": "mccl_world_group", "Ascend": "hccl_world_group"}


def rank_groups(groups: Sequence[Groups], rank: int, device: str) -> list[tuple[str, list[int]]]:
    """Return names and ranks of the groups of a graph that contain a rank.

    The group of all ranks is left out, because it always exists.
    """
    named = [(_name(one, rank, device), _group_of(one, rank)) for one in groups]
    return [(name, ranks) for name, ranks in named if name != _WORLD[device]]


def fill_in_rank(
    binary: bytes,
    groups: Sequence[Groups],
    exchanges: Sequence[Sequence[int]],
    rank: int,
    device: str,
) -> bytes:
    """Return the MindIR file of one rank.

    Args:
        binary: the MindIR file with placeholders.
        groups: all groups of a collective, by the number in their placeholder.
        exchanges: source rank of each rank, by number of the exchange.
        rank: the rank.
        device: MindSpore's name: CPU or Ascend.
    """
    model = mindir.read(binary)
    names = {placeholder(n): _name(one, rank, device) for n, one in enumerate(groups)}
    for primitive in model.primitives:
        settings = {attribute.name: attribute for attribute in primitive.attribute}
        if "group" in settings:
            settings["group"].s = names[settings["group"].s.decode()].encode()
        if EXCHANGE in settings:
            sources = exchanges[settings[EXCHANGE].i]
            primitive.attribute.remove(settings[EXCHANGE])
            sent_to = [target for target, source in enumerate(sources) if source == rank]
            mindir.set_attribute(primitive, "recv_rank_ids", [sources[rank]])
            mindir.set_attribute(primitive, "send_rank_ids", sent_to)
    return model.SerializeToString(deterministic=True)


def _group_of(groups: Groups, rank: int) -> list[int]:
    return next(list(group) for group in groups if rank in group)


def _name(groups: Groups, rank: int, device: str) -> str:
    """Return a name that is equal on all ranks of a group and different for other groups."""
    group = _group_of(groups, rank)
    if len(groups) == 1:
        return _WORLD[device]
    return f"graphtrain_{hashlib.sha256(repr(group).encode()).hexdigest()[:16]}"
