"""Sharding of each weight, its gradient and its moments on a mesh.

It does not depend on microbatches or remat, so that a search computes it once for all variants.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from graphtrain.config.resolve import ResolvedProgram
from graphtrain.models.lora.trainable import CODES, SCALES, frozen_arrays, trained_arrays
from graphtrain.models.optimizer_state import optimizer_arrays
from graphtrain.models.shapes import parameter_arrays
from sharding_rules.arrays import ArraySpec, Role
from sharding_rules.axes import MESH_AXES
from sharding_rules.mesh import MeshShape
from sharding_rules.pipeline import divide_layers
from sharding_rules.plan import ArrayLayout, make_layout
from sharding_rules.rules import Rules


@dataclass(frozen=True)
class ShardedWeight:
    """One parameter, of all layers, and the mesh axes that shard it in each of its roles.

    A frozen weight has no gradient and no moments, and may be stored quantized.
    """

    path: str
    spec: ArraySpec
    stored: tuple[str, ...]  # between steps
    gradient: tuple[str, ...]  # during gradient accumulation
    optimizer: tuple[str, ...]  # in the optimizer update
    in_use: tuple[str, ...]  # in matrix products
    parameter_bytes: int  # per device
    moment_bytes: int  # per device, of all optimizer state of the weight
    frozen: bool = False

    @property
    def in_layers(self) -> bool:
        return self.path.startswith("layers/")

    @property
    def elements_per_layer(self) -> int:
        """Number of elements in one layer, or in total outside of the layers."""
        return math.prod(self.spec.shape) // (self.spec.shape[0] if self.in_layers else 1)

    def elements(self, role: Role, mesh: MeshShape) -> float:
        """Return the number of elements per device in a role."""
        axes = {"parameter": self.stored, "gradient": self.gradient, "optimizer": self.optimizer}
        return math.prod(self.spec.shape) / mesh.size(axes[role])

    def used_of_a_layer(self, mesh: MeshShape) -> float:
        """Return the number of elements of one layer that a device computes with."""
        return self.elements_per_layer / mesh.size(self.in_use)


def shard_weights(program: ResolvedProgram) -> tuple[ShardedWeight, ...]:
    """Return the sharding of a program's weights, whatever its microbatches and remat.

    Raises:
        ShardingError: a dimension does not divide, or there are fewer layers than stages.
    """
    stages, pipeline = program.mesh.axes.get("stage", 1), program.pipeline
    divided = divide_layers(
        program.model.layers, stages, pipeline.virtual_stages, pipeline.layers_per_stage
    )
    trained = tuple(
        _shard_weight(path, _stacked(path, spec, len(divided.rows)), program)
        for path, spec in trained_arrays(program.settings).items()
    )
    return trained + _shard_frozen_weights(program, len(divided.rows))


def _shard_frozen_weights(program: ResolvedProgram, rows: int) -> tuple[ShardedWeight, ...]:
    """Return the sharding of frozen weights, in these rows of layers.

    A weight's codes and scales are one.
    """
    rules, mesh = program.rules, program.mesh
    layouts_by_path: dict[str, list[ArrayLayout]] = {}
    for path, spec in frozen_arrays(program).items():
        stem = path.removesuffix(f"/{CODES}").removesuffix(f"/{SCALES}")
        layouts_by_path.setdefault(stem, []).append(
            make_layout(f"frozen/{path}", _stacked(path, spec, rows), rules, mesh)
        )
    arrays = parameter_arrays(program.model)
    return tuple(
        ShardedWeight(
            path=path,
            spec=_stacked(path, arrays[path], rows),
            stored=_axes(layouts[0]),
            gradient=(),
            optimizer=(),
            in_use=axes_in_use(arrays[path], rules, mesh),
            parameter_bytes=sum(_bytes(layout, mesh) for layout in layouts),
            moment_bytes=0,
            frozen=True,
        )
        for path, layouts in layouts_by_path.items()
    )


def _stacked(path: str, spec: ArraySpec, rows: int) -> ArraySpec:
    """Return the spec with the rows of zeros that pad the shorter stages."""
    if not path.startswith("layers/"):
        return spec
    return replace(spec, shape=(rows, *spec.shape[1:]))


def _shard_weight(path: str, spec: ArraySpec, program: ResolvedProgram) -> ShardedWeight:
    rules, mesh = program.rules, program.mesh
    layout = make_layout(f"state/parameters/{path}", spec, rules, mesh)
    gradient = make_layout(f"gradient/{path}", replace(spec, role="gradient"), rules, mesh)
    updated = make_layout(f"state/optimizer/{path}", replace(spec, role="optimizer"), rules, mesh)
    moments = [
        make_layout(f"state/optimizer/{name}", array, rules, mesh)
        for name, array in optimizer_arrays({path: spec}, program.optimizer).items()
    ]
    return ShardedWeight(
        path=path,
        spec=spec,
        stored=_axes(layout),
        gradient=_axes(gradient),
        optimizer=_axes(updated),
        in_use=axes_in_use(spec, rules, mesh),
        parameter_bytes=_bytes(layout, mesh),
        moment_bytes=sum(_bytes(moment, mesh) for moment in moments),
    )


def axes_in_use(spec: ArraySpec, rules: Rules, mesh: MeshShape) -> tuple[str, ...]:
    """Return the mesh axes that shard a weight in matrix products."""
    sharding_axes = {name for axis in spec.axes if axis for name in rules.activations.get(axis, ())}
    return tuple(name for name in MESH_AXES if name in sharding_axes and mesh.axes.get(name, 1) > 1)


def _axes(placed: ArrayLayout) -> tuple[str, ...]:
    sharding_axes = {name for names in placed.split for name in names}
    return tuple(name for name in MESH_AXES if name in sharding_axes)


def _bytes(placed: ArrayLayout, mesh: MeshShape) -> int:
    return placed.spec.nbytes // mesh.size(_axes(placed))
