"""What is read from a compiled program is what the program does."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from programs import LLAMA, loaded, program

from graphtrain.config.schema import Mesh
from graphtrain.models.flops import attention_flops_per_token, flops_per_token
from lowering.errors import LoweringError
from lowering.hlo.collectives import ProgramFacts, read
from lowering.machine.target import Target
from lowering.xla import backend as xla
from sharding_rules.mesh import MeshShape

MESH = MeshShape({"data": 2, "tensor": 4})
TARGETS = ("cpu:8", "v5e:2x4", "h100:8")
ROWS, WIDTH = 256, 512  # of the piece of one device; far smaller, a TPU gathers by an all-reduce
PIECE = ROWS * WIDTH * 4  # bytes
WHOLE, SPLIT = PartitionSpec(), PartitionSpec(("data", "tensor"))
RING = [(i, (i + 1) % 4) for i in range(4)]


def compiled_text(target, step, *shapes, mesh=MESH, out=WHOLE):
    """The optimized text of a step whose inputs are whole arrays split over the mesh."""
    on = Target.parse(target)
    try:
        placed_on = xla.compile_devices(on)
    except LoweringError as error:
        pytest.skip(str(error))
    grid = xla.make_mesh(mesh, placed_on)
    inputs = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(grid, split))
        for shape, dtype, split in shapes
    ]
    jitted = jax.jit(functools.partial(step, grid), out_shardings=NamedSharding(grid, out))
    return jitted.lower(*inputs).compile().as_text()


def by_hand(body):
    """A step that gives each device its piece and runs the body there."""

    def step(grid, x):
        return jax.shard_map(body, mesh=grid, in_specs=SPLIT, out_specs=SPLIT, check_vma=False)(x)

    return step


def ring(x):
    def one_hop(x, _):
        return jnp.tanh(jax.lax.ppermute(x, "tensor", RING)), None

    return jax.lax.scan(one_hop, x, None, length=7)[0]


BODIES = {
    "psum": (lambda x: jax.lax.psum(x, "tensor"), "all-reduce", ("tensor",), 4, PIECE),
    "psum of all": (
        lambda x: jax.lax.psum(x, ("data", "tensor")),
        "all-reduce",
        ("data", "tensor"),
        8,
        PIECE,
    ),
    "all_gather": (
        lambda x: jax.lax.all_gather(x, "tensor"),
        "all-gather",
        ("tensor",),
        4,
        4 * PIECE,
    ),
    "psum_scatter": (
        lambda x: jax.lax.psum_scatter(x, "data", tiled=True),
        "reduce-scatter",
        ("data",),
        2,
        PIECE,
    ),
    "all_to_all": (
        lambda x: jax.lax.all_to_all(x, "tensor", 1, 0, tiled=True),
        "all-to-all",
        ("tensor",),
        4,
        PIECE,
    ),
    "ppermute": (
        lambda x: jax.lax.ppermute(x, "tensor", RING),
        "collective-permute",
        ("tensor",),
        4,
        PIECE,
    ),
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", BODIES)
def test_a_collective_is_read_with_its_axes_and_bytes(name, target):
    body, op, axes, devices, size = BODIES[name]
    whole = (8 * ROWS, WIDTH), "float32", SPLIT
    text = compiled_text(target, by_hand(body), whole, out=SPLIT)
    (found,) = read(text, MESH).collectives
    assert (found.op, found.axes, found.devices, found.count) == (op, axes, devices, 1)
    assert (found.bytes, found.dtype, found.loops) == (size, "f32", ())


@pytest.mark.parametrize("target", TARGETS)
def test_a_ring_in_a_loop_is_counted_at_every_turn(target):
    whole = (8 * ROWS, WIDTH), "float32", SPLIT
    reading = read(compiled_text(target, by_hand(ring), whole, out=SPLIT), MESH)
    assert reading.unknown_loops == 0
    assert {each.op for each in reading.collectives} == {"collective-permute"}
    assert sum(each.count for each in reading.collectives) == 7
    assert reading.wire_bytes == 7 * PIECE
    line = ring.__code__.co_firstlineno + 2
    assert {each.source for each in reading.collectives} == {
        f"tests/graphs/test_collectives.py:{line}"
    }


def layers(unroll):
    """Seven products with weights that rest in pieces and are gathered for use."""

    def step(grid, weights, x):
        def one_layer(x, weight):
            whole = jax.lax.with_sharding_constraint(weight, NamedSharding(grid, WHOLE))
            product = jnp.tanh(jnp.dot(x, whole, precision="highest"))
            return jax.lax.with_sharding_constraint(product, NamedSharding(grid, SPLIT)), None

        return jax.lax.scan(one_layer, x, weights, unroll=unroll)[0]

    return step


WEIGHTS = (7, WIDTH, WIDTH), "float32", PartitionSpec(None, "tensor")
INPUT = (8 * ROWS, WIDTH), "float32", SPLIT


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("unroll", [1, 7], ids=["scanned", "unrolled"])
def test_scanned_layers_count_as_unrolled_ones_do(unroll, target):
    reading = read(compiled_text(target, layers(unroll), WEIGHTS, INPUT, out=SPLIT), MESH)
    sent = 7 * 3 * WIDTH * WIDTH * 4 // 4  # three of four pieces of every layer's weights
    assert reading.unknown_loops == 0
    assert {each.axes for each in reading.collectives} == {("tensor",)}
    assert {each.decomposed_from or each.op for each in reading.collectives} == {"all-gather"}
    assert {each.arrays for each in reading.collectives} == {("weights",)}
    assert reading.wire_bytes == sent
    assert reading.flops == 7 * 2 * ROWS * WIDTH * WIDTH


def test_the_record_of_a_program_says_what_a_step_sends():
    of = program(target="cpu:8", mesh=Mesh(fsdp=8), rules=("fsdp",))
    record = loaded(of, "train", optimized=True).record
    reading = ProgramFacts.from_record(record)
    gathered = {
        path
        for each in reading.collectives
        if each.op == "all-gather" and "transpose" not in each.scope
        for path in each.arrays
    }
    assert gathered == {path for path in record["inputs"] if path.startswith("state/parameters/")}
    assert {each.axes for each in reading.collectives} == {("fsdp",)}
    assert {each.loops for each in reading.collectives} == {(), (LLAMA.layers,)}
    assert all(each.source.startswith("graphtrain/") for each in reading.collectives)
    # On a CPU the backward pass computes scores again, one of the six products of attention.
    again = attention_flops_per_token(of.model, of.batch.seq_len) / 6
    products = (flops_per_token(of.model, of.batch.seq_len) + again) * of.batch.tokens
    assert reading.flops == pytest.approx(products / 8)
