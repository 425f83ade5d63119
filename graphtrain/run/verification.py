"""Verification of a run against silent data corruption: repeated steps and compared replicas.

A device may compute or store a wrong value without any error. Every run.verify_every steps, a step
is computed twice from the same state, by the same program, and the checksums of both results are
compared on every device. Devices that store the same shard compare their checksums with each other,
also before each checkpoint is saved.
"""

from __future__ import annotations

import json
import socket
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from graphtrain.errors import CorruptionError
from graphtrain.graphs.names import CHECKSUMS, COPY_STATE
from graphtrain.run.programs import LoadedPrograms
from lowering.trees import Tree
from lowering.xla import distributed

Checksums = dict[str, dict[int, int]]  # by label and by the id of a device of this process
_MAX_NAMED = 8  # devices that a message names


@dataclass(frozen=True)
class _Device:
    """A device of the run, with what its process knows of it."""

    rank: int
    host: str
    id: int
    repeated: bool  # whether both computations of the step had the same result
    checksums: Mapping[str, int]

    def __str__(self) -> str:
        return f"device {self.id} of host {self.host} (rank {self.rank})"


def verified_step(
    programs: LoadedPrograms, compute: Callable[[Tree], Tree], state: Tree, step: int
) -> Tree:
    """Compute a step twice, compare the results on every device and between replicas; return one.

    Args:
        programs: Programs of the current phase.
        compute: Computes the step from a state, which it uses up.
        state: State before the step.
        step: Number of the step, for messages.

    Raises:
        CorruptionError: the results differ; names the host and the device where it is known.
    """
    first = compute(programs[COPY_STATE](state)["state"])
    before = _checksums(programs, first["state"])
    del first  # so that the memory holds two states, not three
    outputs = compute(state)
    found = _checksums(programs, outputs["state"])
    devices = _exchange(found, before)
    _check_repeated(devices, step)
    _check_replicas(devices, programs, step)
    return outputs


def compare_replicas(programs: LoadedPrograms, state: Tree, step: int) -> None:
    """Compare the state between the devices that store the same shards of it.

    Raises:
        CorruptionError: it differs; names the hosts and the devices.
    """
    found = _checksums(programs, state)
    _check_replicas(_exchange(found, found), programs, step)


def _checksums(programs: LoadedPrograms, state: Tree) -> Checksums:
    """Return the checksums of what each device of this process stores."""
    outputs = programs[CHECKSUMS](state)["checksums"]
    return {
        label: {shard.device.id: int(np.asarray(shard.data)) for shard in array.addressable_shards}
        for label, array in outputs.items()
    }


def _exchange(found: Checksums, before: Checksums) -> dict[int, _Device]:
    """Return all devices of the run by id."""
    own = {
        "host": socket.gethostname(),
        "differ": [one for label in found for one in found[label]
                   if found[label][one] != before[label][one]],
        "checksums": found,
    }  # fmt: skip
    devices = {}
    for rank, text in enumerate(distributed.all_gather_text(json.dumps(own))):
        told: dict[str, Any] = json.loads(text)
        labels: Mapping[str, Mapping[str, int]] = told["checksums"]
        for name in next(iter(labels.values())):
            device = int(name)
            values = {label: labels[label][name] for label in labels}
            is_repeated = device not in told["differ"]
            devices[device] = _Device(rank, told["host"], device, is_repeated, values)
    return devices


def _check_repeated(devices: Mapping[int, _Device], step: int) -> None:
    differing = [one for one in devices.values() if not one.repeated]
    if not differing:
        return
    where = _names(differing)
    if len(differing) == len(devices) > 1:
        where = (
            f"all {len(devices)} devices, because they add their gradients: which one computed a "
            f"wrong value is not known ({where})"
        )
    raise CorruptionError(
        f"step {step} was computed twice from the same state, with different results on {where}"
        f"{_ADVICE}"
    )


def _check_replicas(devices: Mapping[int, _Device], programs: LoadedPrograms, step: int) -> None:
    """Compare the checksums of the devices that store the same shards."""
    mesh = programs[CHECKSUMS].mesh
    wrong: dict[int, _Device] = {}
    is_majority = True
    for label in next(iter(devices.values())).checksums:
        for group in replica_groups(mesh.devices, mesh.axis_names, label):
            found, is_known = odd_ones({one: devices[one].checksums[label] for one in group})
            wrong |= {one: devices[one] for one in found}
            is_majority &= is_known
    if not wrong:
        return
    named = _names(list(wrong.values()))
    which = (
        f"{named} stores other values than its replicas"
        if is_majority
        else f"{named} are replicas with different values, and one of them is wrong"
    )
    raise CorruptionError(f"the state after step {step}: {which}{_ADVICE}")


_ADVICE = (
    "; memory or a device is probably broken. No later checkpoint was saved: replace the host and "
    "start the run again, which resumes from the last one"
)


def replica_groups(devices: Any, axes: Sequence[str], label: str) -> list[list[int]]:
    """Return the ids of devices that store the same shard of arrays with a label.

    Args:
        devices: Devices of the mesh, an array with one dimension for each axis.
        axes: Names of the mesh axes.
        label: Mesh axes that split the arrays, as in "fsdp+tensor".
    """
    split = label.split("+")
    groups: dict[tuple[int, ...], list[int]] = {}
    for place, device in np.ndenumerate(devices):
        key = tuple(index for index, axis in zip(place, axes, strict=True) if axis in split)
        groups.setdefault(key, []).append(int(device.id))
    return list(groups.values())


def odd_ones(checksums: Mapping[int, int]) -> tuple[list[int], bool]:
    """Return the devices whose checksum is not that of the majority, and whether there is one.

    Without a majority, all devices are returned.
    """
    (value, most), *others = Counter(checksums.values()).most_common()
    if not others:
        return [], True
    if 2 * most <= len(checksums):
        return list(checksums), False
    return [device for device, found in checksums.items() if found != value], True


def _names(devices: Sequence[_Device]) -> str:
    named = [str(one) for one in sorted(devices, key=lambda one: one.id)[:_MAX_NAMED]]
    more = len(devices) - len(named)
    return " and ".join([*named, *([f"{more} more"] if more else [])])
