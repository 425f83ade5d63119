"""Collectives that compilers make of a strategy, for machines that are not here."""

import dataclasses
import functools
import importlib.util
from collections import Counter

import pytest
from programs import LLAMA, lower, program

from graphtrain.config.schema import Batch, Mesh
from graphtrain.graphs import build
from lowering.hlo.collectives import read
from lowering.hlo.text import parse

_for_cards = pytest.mark.skipif(
    not importlib.util.find_spec("jax_plugins"), reason="needs the extra gpu"
)
TARGETS = [
    pytest.param(
        "v5e:2x4",
        marks=pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="extra tpu"),
    ),
    pytest.param("h100:8", marks=_for_cards),
]
LAYERS, BATCH, LENGTH, EMBED, VOCAB = 3, 8, 256, 256, 4096
MODEL = dataclasses.replace(
    LLAMA,
    layers=LAYERS,
    embed=EMBED,
    heads=8,
    kv_heads=8,
    head_dim=32,
    mlp=768,
    vocab=VOCAB,
    dtype="bfloat16",
)


@functools.cache
def collectives(target, mesh, rules, remat="none", kv_heads=8):
    """Those of loss and gradients."""
    return facts(target, mesh, rules, remat, kv_heads).collectives


def facts(target, mesh, rules, remat="none", kv_heads=8):
    """Return products and collectives of loss and gradients."""
    of = program(
        target=target,
        mesh=mesh,
        rules=rules,
        model=dataclasses.replace(MODEL, remat=remat, kv_heads=kv_heads),
        batch=Batch(global_batch_size=BATCH, seq_len=LENGTH),
    )
    lowered = lower(of, "gradients")
    compiled = lowered.handle.compile(compiler_options=lowered.options)
    return read(compiled.as_text(), lowered.plan.mesh)


def per_layer(found, mesh_axis):
    """How often each kind runs along a mesh axis for one layer, forward and backward together."""
    counts = Counter()
    for each in found:
        if each.axes == (mesh_axis,) and each.loops[:1] == (LAYERS,):
            counts[each.op] += each.count // LAYERS
    return counts


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("mesh", [Mesh(tensor=8), Mesh(data=2, tensor=4)], ids=["8", "2 x 4"])
def test_tensor_parallelism_reduces_twice_forward_and_twice_backward(target, mesh):
    found = collectives(target, mesh, ("data", "tensor"))
    assert per_layer(found, "tensor") == {"all-reduce": 4}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("mesh", [Mesh(tensor=8), Mesh(data=2, tensor=4)], ids=["8", "2 x 4"])
def test_sequence_parallelism_scatters_and_gathers_in_place_of_every_reduction(target, mesh):
    found = collectives(target, mesh, ("data", "tensor", "sequence"))
    assert per_layer(found, "tensor") == {"reduce-scatter": 4, "all-gather": 4}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("rules", [("data", "tensor"), ("data", "tensor", "sequence")], ids=len)
def test_neither_scores_nor_the_table_are_gathered_over_the_vocabulary(target, rules):
    found = collectives(target, Mesh(data=2, tensor=4), rules)
    over_tensor = [each for each in found if "tensor" in each.axes and not each.loops]
    scores = BATCH // 2 * LENGTH * VOCAB * 2
    table = VOCAB * EMBED * 2
    assert over_tensor
    for each in over_tensor:
        assert each.bytes < min(scores, table), each


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kv_heads", [8, 2])
def test_ulysses_exchanges_four_arrays_forward_and_four_backward(target, kv_heads):
    found = collectives(target, Mesh(data=2, context=4), ("data", "ulysses"), kv_heads=kv_heads)
    assert per_layer(found, "context") == {"all-to-all": 8}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.usefixtures("little_effort")
def test_a_ring_only_passes_on_and_goes_around_once_forward_and_once_backward(target):
    """Though remat computes the rest of a layer again."""
    kept, again = (
        collectives(target, Mesh(data=2, context=4), ("data", "context"), remat)
        for remat in ("none", "dots")
    )
    assert set(per_layer(kept, "context")) == {"collective-permute"}
    assert per_layer(again, "context") == per_layer(kept, "context")


@_for_cards
def test_devices_of_cards_add_up_in_bfloat16_what_one_device_would_round():
    found = collectives("h100:8", Mesh(data=2, tensor=4), ("data", "tensor", "sequence"))
    moved = {each.dtype for each in found if each.axes == ("tensor",) and each.loops}
    assert moved == {"bf16"}


@_for_cards
def test_older_cards_multiply_while_gradients_travel():
    of = program(target="a100:8", mesh=Mesh(data=8), rules=("data",), model=MODEL)
    lowered = lower(of, "gradients")
    compiled = lowered.handle.compile(compiler_options=lowered.options)
    computations = parse(compiled.as_text()).computations.values()
    assert any(products_behind(each, "all-reduce") for each in computations)


def products_behind(computation, op):
    """Matrix products that a computation begins between a collective's start and its end."""
    lines = list(computation.instructions.values())
    at = {each.name: position for position, each in enumerate(lines)}
    spans = [
        lines[at[each.operands[0]] : position]
        for position, each in enumerate(lines)
        if each.opcode == f"{op}-done"
    ]
    return [each for span in spans for each in span if "__cublas" in each.rest]


@_for_cards
def test_mlp_blocks_neither_gather_nor_compute_twice(monkeypatch):
    at_once = facts("h100:8", Mesh(fsdp=8), ("fsdp",), "full")
    monkeypatch.setattr(build, "mlp_block_count", lambda program: 2)
    in_blocks = facts("h100:8", Mesh(fsdp=8), ("fsdp",), "full")
    assert in_blocks.wire_bytes == at_once.wire_bytes > 0
    assert in_blocks.flops == at_once.flops > 0
    assert len(in_blocks.collectives) > len(at_once.collectives)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.usefixtures("little_effort")
def test_mlp_blocks_with_tensor_parallelism_reduce_once_what_devices_sum(target, monkeypatch):
    """On GPUs, the input of attention is gathered once more, and normed again."""
    arguments = target, Mesh(fsdp=2, tensor=4), ("data", "fsdp", "tensor", "sequence"), "full"
    at_once = facts(*arguments)
    monkeypatch.setattr(build, "mlp_block_count", lambda program: 2)
    in_blocks = facts(*arguments)
    assert in_blocks.flops == at_once.flops > 0
    for mesh_axis, more in (("fsdp", {}), ("tensor", {"all-gather": target == "h100:8"})):
        before, after = (bytes_by_op(found, mesh_axis) for found in (at_once, in_blocks))
        stream = BATCH // 2 * LENGTH * EMBED * 2
        assert after == before + Counter(
            {op: LAYERS * stream * times for op, times in more.items()}
        )


def bytes_by_op(found, mesh_axis):
    """Bytes of the results that a step's collectives of each kind have along a mesh axis."""
    sums = Counter()
    for each in found.collectives:
        if each.axes == (mesh_axis,):
            sums[each.op] += each.count * each.bytes
    return sums
