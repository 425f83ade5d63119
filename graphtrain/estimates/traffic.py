"""The collectives of a training step, by arithmetic: what the strategies promise."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

from graphtrain.config.schema import Program
from graphtrain.estimates.arrays import parameter_arrays
from graphtrain.estimates.memory import Sizes
from lowering.collectives import Collective
from lowering.target import Target
from sharding_rules.arrays import ArraySpec
from sharding_rules.axes import MESH_AXES
from sharding_rules.mesh import MeshShape
from sharding_rules.plan import layout
from sharding_rules.rules import Rules


def traffic(program: Program, rules: Rules, mesh: MeshShape) -> tuple[Collective, ...]:
    """Every collective that moves more than a few numbers."""
    found = [*_of_weights(program, rules, mesh), *_of_activations(program, rules, mesh)]
    return tuple(one for one in found if one.devices > 1 and one.bytes and one.count)


def bubble_of(program: Program, mesh: MeshShape) -> float:
    """Share of a pipeline's ticks in which a stage waits."""
    stages, microbatches = mesh.axes.get("stage", 1), program.batch.microbatches
    if stages == 1:
        return 0.0
    if program.pipeline.schedule == "1f1b":
        return 2 * (stages - 1) / (microbatches + 2 * (stages - 1))
    return (stages - 1) / (microbatches * program.pipeline.rounds + stages - 1)


def _of_weights(program: Program, rules: Rules, mesh: MeshShape) -> Iterator[Collective]:
    """Weights gathered for use, and gradients reduced to where they rest."""
    batch = program.batch
    spread = _axes(rules.activations, ("batch", "seq"), mesh)
    width = 2 if program.model.dtype == "bfloat16" else 4
    sizes = Sizes.of(program, rules, mesh)
    looked_up = sizes.sequences * sizes.length * program.model.embed * width
    deferred = batch.reduce == "last" and "data" in spread
    for path, spec in parameter_arrays(program.model).items():
        in_layers = path.startswith("layers/")
        layers = spec.shape[0] / mesh.axes.get("stage", 1) if in_layers else 1
        if math.prod(spec.shape) // (spec.shape[0] if in_layers else 1) < 1e5:
            continue  # norms and biases
        rest, used = _split(path, spec, rules, mesh, "parameter"), _used(spec, rules, mesh)
        gathered = tuple(axis for axis in rest if axis not in used and axis != "stage")
        here = _whole(spec, mesh, used) / (spec.shape[0] if in_layers else 1)
        each = partial(_one, mesh=mesh, dtype="bf16" if width == 2 else "f32")
        times = int(layers * batch.microbatches)
        uses = 1 if path.startswith("embedding") else 2
        if program.model.remat == "full" and in_layers and not path.endswith("mlp/down"):
            uses += 1  # what is computed again asks for its weights again
        yield each("all-gather", gathered, times * uses, here * width)
        yield _scattered(path, gathered, times, here * 4, looked_up, mesh)
        held = here / mesh.size(gathered)
        role = "optimizer" if batch.microbatches == 1 or deferred else "gradient"
        pieces = _split(path, spec, rules, mesh, role)
        for axis in (name for name in spread if name not in gathered):
            count = int(layers if axis == "data" and deferred else times)
            if axis in pieces and not deferred:
                yield _scattered(path, (axis,), count, held * 4, looked_up, mesh)
                continue
            op = "reduce-scatter" if axis in pieces else "all-reduce"
            yield _one(op, (axis,), count, held * 4, mesh=mesh, dtype="f32")
        updated = _split(path, spec, rules, mesh, "optimizer")
        back = tuple(axis for axis in updated if axis not in rest)
        yield _one("all-gather", back, 1, held * layers * 4, mesh=mesh, dtype="f32")


def _scattered(
    path: str,
    axes: tuple[str, ...],
    count: int,
    size: float,
    looked_up: float,
    mesh: MeshShape,
) -> Collective:
    """A gradient reduced into pieces. That of an embedding is added up where its piece is, if the
    gradients of the rows looked up are fewer bytes to send there."""
    if path.startswith("embedding") and looked_up < size:
        return _one("all-to-all", axes, count, looked_up, mesh=mesh, dtype="bf16")
    return _one("reduce-scatter", axes, count, size, mesh=mesh, dtype="f32")


def _of_activations(program: Program, rules: Rules, mesh: MeshShape) -> Iterator[Collective]:
    """What tensor parallelism sums, sequence parallelism splits, and stages hand on."""
    model, batch = program.model, program.batch
    sizes, use = Sizes.of(program, rules, mesh), rules.activations
    times = round(sizes.layers) * batch.microbatches
    stream = sizes.sequences * sizes.inside * model.embed
    summed = tuple(axis for axis in _axes(use, ("heads", "mlp"), mesh))
    pieces = [axis for axis in _axes(use, ("residual",), mesh) if axis in summed]
    again = 1 if model.remat == "full" else 0
    # TPU programs reduce in the dtype of the result; GPU programs round after they have reduced.
    reduced = sizes.item if Target.parse(program.target).platform == "tpu" else 4
    each = partial(_one, mesh=mesh, dtype="bf16")
    if pieces:
        yield _one(
            "reduce-scatter", summed, times * (4 + again), stream * 4, mesh=mesh, dtype="f32"
        )
        yield _one(
            "all-gather", summed, times * (4 + 2), stream * sizes.item, mesh=mesh, dtype="bf16"
        )
    else:
        yield _one("all-reduce", summed, times * (4 + again), stream * 4, mesh=mesh, dtype="f32")
    vocab = _axes(use, ("vocab",), mesh)
    joined = "reduce-scatter" if pieces else "all-reduce"
    yield each(joined, vocab, batch.microbatches, stream * sizes.item)  # rows of the embedding
    yield each(joined, vocab, batch.microbatches, stream * reduced)  # gradient of hidden
    if pieces:
        yield each("all-gather", vocab, batch.microbatches * 3, stream * sizes.item)
    yield from _of_attention(program, rules, mesh, sizes)
    yield from _of_experts(program, rules, mesh, sizes)
    stages = ("stage",) if mesh.axes.get("stage", 1) > 1 else ()
    residual = sizes.sequences * sizes.length * model.embed * sizes.item
    ticks = batch.microbatches * program.pipeline.rounds + mesh.axes.get("stage", 1) - 1
    yield _one("collective-permute", stages, 2 * ticks, residual, mesh=mesh, dtype="bf16")


def _of_attention(
    program: Program, rules: Rules, mesh: MeshShape, sizes: Sizes
) -> Iterator[Collective]:
    """Keys and values around a ring, or heads against positions."""
    model, use = program.model, rules.activations
    assert model.head_dim and model.kv_heads
    times = round(sizes.layers) * program.batch.microbatches
    ring = _axes(use, ("attended",), mesh)
    pair = 2 * sizes.sequences * sizes.attended * sizes.kv_heads * model.head_dim
    each = partial(_one, mesh=mesh)
    hops = max(0, mesh.size(ring) - 1)
    yield each("collective-permute", ring, 2 * hops * times, pair * sizes.item, dtype="bf16")
    home = mesh.size(ring)  # their gradients go all the way around
    yield each("collective-permute", ring, home * times, pair * 4, dtype="f32")
    swapped = _axes(use, ("attention_heads",), mesh)
    token = sizes.sequences * sizes.inside * model.head_dim * sizes.item
    query = token * sizes.heads * mesh.size(swapped)
    # Key heads repeat where they are fewer than devices.
    together = model.kv_heads // mesh.size(_axes(use, ("kv_heads",), mesh))
    key = token * math.lcm(together, mesh.size(swapped))
    yield each("all-to-all", swapped, 4 * times, query, dtype="bf16")
    yield each("all-to-all", swapped, 4 * times, key, dtype="bf16")


def _of_experts(
    program: Program, rules: Rules, mesh: MeshShape, sizes: Sizes
) -> Iterator[Collective]:
    """Tokens to their experts and back, forward and backward."""
    model = program.model
    if model.mixture is None:
        return
    times = round(sizes.layers) * program.batch.microbatches
    over = _axes(rules.activations, ("experts",), mesh)
    stream = sizes.sequences * sizes.inside * model.embed
    each = partial(_one, mesh=mesh, dtype="bf16")
    if (capacity := model.mixture.capacity) is not None:
        sent = stream * model.mixture.per_token * capacity * sizes.item
        yield each("all-to-all", over, 4 * times, sent)
        return
    shared = stream * mesh.size(over)
    yield each("all-gather", over, 2 * times, shared * sizes.item)
    yield each("reduce-scatter", over, 2 * times, shared * 4)


def _one(
    op: str, axes: tuple[str, ...], count: int, size: float, *, mesh: MeshShape, dtype: str
) -> Collective:
    return Collective(op, axes, mesh.size(axes), count, round(size), dtype)


def _axes(table, names: tuple[str, ...], mesh: MeshShape) -> tuple[str, ...]:
    """Mesh axes of more than one device that split any of the array axes."""
    together = {axis for name in names for axis in table.get(name, ())}
    return tuple(axis for axis in MESH_AXES if axis in together and mesh.axes.get(axis, 1) > 1)


def _split(path: str, spec: ArraySpec, rules: Rules, mesh: MeshShape, role) -> tuple[str, ...]:
    split = layout(path, ArraySpec(spec.shape, spec.axes, spec.dtype, role), rules, mesh).split
    together = {axis for names in split for axis in names}
    return tuple(axis for axis in MESH_AXES if axis in together)


def _used(spec: ArraySpec, rules: Rules, mesh: MeshShape) -> tuple[str, ...]:
    """Mesh axes that split a weight while it is used: those of the products it makes."""
    return _axes(rules.activations, tuple(axis for axis in spec.axes if axis), mesh)


def _whole(spec: ArraySpec, mesh: MeshShape, used: tuple[str, ...]) -> float:
    """Numbers of a weight on a device while it is used."""
    return math.prod(spec.shape) / mesh.size(used)
