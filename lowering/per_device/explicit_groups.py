"""Replica groups of collectives in the only form that neuronx-cc reads: lists of ranks.

XLA (jaxlib 0.10) writes three newer forms, which older readers silently ignore: a collective would
then include all ranks, and training would give a wrong loss.
"""

import math

import numpy as np

from lowering.hlo.proto import Message, make_message
from lowering.hlo.replica_groups import Groups, groups_along_axes, groups_from_iota

_COLLECTIVES = {
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "ragged-all-to-all",
    "reduce-scatter",
}
_NEWER_FORMS = (
    "collective_device_list",
    "iota_collective_device_list",
    "mesh_axes_replica_group_list",
)


def write_explicit_groups(instruction: Message, ranks: int) -> None:
    """Rewrite a collective so that it lists its ranks, as replica ids."""
    if instruction.opcode in _COLLECTIVES:
        groups = _groups(instruction, ranks)
        del instruction.replica_groups[:]
        for group in groups:
            instruction.replica_groups.append(make_message("ReplicaGroup", replica_ids=group))
    for form in _NEWER_FORMS:
        instruction.ClearField(form)
    # Without a channel, ids are those of replicas. XLA's partitioner writes ids of partitions, but
    # a module that is loaded once for each rank has only one partition.
    instruction.ClearField("channel_id")
    instruction.ClearField("use_global_device_ids")


def _groups(instruction: Message, ranks: int) -> Groups:
    if instruction.HasField("mesh_axes_replica_group_list"):
        return _of_mesh(instruction.mesh_axes_replica_group_list)
    if instruction.HasField("iota_collective_device_list"):
        return _of_iota(instruction.iota_collective_device_list)
    listed = instruction.collective_device_list
    if listed.HasField("iota_replica_group_list"):
        return _of_iota(listed.iota_replica_group_list)
    lists = listed.replica_groups or instruction.replica_groups
    groups = tuple(tuple(group.replica_ids) for group in lists if group.replica_ids)
    return groups or (tuple(range(ranks)),)


def _of_iota(groups: Message) -> Groups:
    shape = groups.num_replica_groups, groups.num_devices_per_group
    return groups_from_iota(shape, groups.iota_reshape_dims, groups.iota_transpose_perm)


def _of_mesh(groups: Message) -> Groups:
    mesh = groups.mesh
    sizes = {str(index): axis.size for index, axis in enumerate(mesh.axes)}
    order = mesh.iota_device_ids
    ids = np.arange(math.prod(sizes.values()))
    if mesh.device_ids:
        ids = np.array(mesh.device_ids)
    elif order.reshape_dims:
        ids = ids.reshape(order.reshape_dims).transpose(order.transpose_perm).reshape(-1)
    spans = []
    for axis in groups.axes:
        name, sub_axis = str(axis.mesh_axis_index), axis.sub_axis_info
        is_whole_axis = not axis.HasField("sub_axis_info")
        spans.append(
            (name, 1, sizes[name]) if is_whole_axis else (name, sub_axis.pre_size, sub_axis.size)
        )
    return groups_along_axes(sizes, ids, spans)
