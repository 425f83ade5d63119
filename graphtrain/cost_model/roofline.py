"""Roofline of each part of the model: FLOPs and the weights that its products read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from graphtrain.config.resolve import ResolvedProgram
from graphtrain.config.schema.types import item_bytes
from graphtrain.cost_model.compute import PartFlops
from graphtrain.cost_model.padded_stages import with_padding_layers
from graphtrain.cost_model.product_peaks import part_peak
from graphtrain.cost_model.weights import ShardedWeight, shard_weights
from graphtrain.models.flops import Part


@dataclass(frozen=True)
class PartRoofline:
    """One part of the model on one device, in a step. None: unknown."""

    flops: PartFlops
    device_flops: float
    compute_seconds: float | None  # at the device's peak FLOP/s
    weight_bytes: float  # read by its products, in the forward and the backward pass
    weight_seconds: float | None  # at the bandwidth of the device's memory


def rooflines(program: ResolvedProgram, parts: Sequence[PartFlops]) -> tuple[PartRoofline, ...]:
    """Return the roofline of each part of a program."""
    native, target = with_padding_layers(program), program.target
    peaks = {part.name: part_peak(program, part.name) / target.devices for part in parts}
    bandwidth = target.specification.get("bandwidth")
    read = _weight_bytes(native)
    return tuple(
        PartRoofline(
            part,
            device_flops := part.computed / target.devices,
            compute_seconds=device_flops / peaks[part.name] if peaks[part.name] else None,
            weight_bytes=read.get(part.name, 0.0),
            weight_seconds=read.get(part.name, 0.0) / bandwidth if bandwidth else None,
        )
        for part in parts
    )


def _weight_bytes(program: ResolvedProgram) -> dict[Part, float]:
    """Return the bytes of weights that a device's products read in a step, by part."""
    item = item_bytes(program.model.dtype)
    stages = program.mesh.axes.get("stage", 1)
    read: dict[Part, float] = {}
    for weight in shard_weights(program):
        if (part := _part(weight, tied=program.model.tie_word_embeddings)) is None:
            continue
        layers = weight.spec.shape[0] / stages if weight.in_layers else 1
        passes = 2 * program.batch.microbatches
        size = passes * layers * weight.used_of_a_layer(program.mesh) * item
        read[part] = read.get(part, 0.0) + size
    return read


def _part(weight: ShardedWeight, *, tied: bool) -> Part | None:
    """Return the part whose products read a weight; None for norms and the lookup."""
    if weight.path.startswith("layers/attention/"):
        return "attention projections"
    if weight.path == ("embedding/tokens" if tied else "head"):
        return "LM head"
    is_matrix = sum(axis not in ("layers", None) for axis in weight.spec.axes) > 1
    return "MLP" if weight.in_layers and is_matrix else None
