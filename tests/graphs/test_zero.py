"""ZeRO and deferred reduction: the numbers of one device, with the traffic each promises."""

from importlib.util import find_spec

import pytest
from programs import GPT2, LLAMA, batch, lower, program
from test_parallel import assert_close, loss_and_gradients

from graphtrain.config.resolve import resolve
from graphtrain.config.schema import Batch, Mesh, Model
from graphtrain.cost_model.memory import lower_bound, memory
from graphtrain.models import updated_weights
from graphtrain.models.flops import parameter_count
from lowering.hlo.collectives import Collective
from lowering.xla import backend as xla

WAYS = {
    "zero1": {"mesh": Mesh(data=8), "rules": ("zero1",)},
    "zero2": {"mesh": Mesh(data=8), "rules": ("zero2",)},
    "zero1-tensor-sequence": {
        "mesh": Mesh(data=4, tensor=2),
        "rules": ("zero1", "tensor", "sequence"),
    },
    "zero2-fsdp": {"mesh": Mesh(data=2, fsdp=4), "rules": ("zero2", "fsdp")},
    "zero1-fsdp-tensor": {
        "mesh": Mesh(data=2, fsdp=2, tensor=2),
        "rules": ("zero1", "fsdp", "tensor", "sequence"),
    },
}


@pytest.mark.parametrize("model", [LLAMA, GPT2], ids=["llama", "gpt2"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("reduction", ["per_microbatch", "per_step"])
def test_loss_and_gradients_equal_those_of_one_device(way, reduction, model):
    sizes = Batch(global_batch_size=16, seq_len=16, microbatches=2)
    alone = program(model=model, batch=sizes)
    parts = Batch(global_batch_size=16, seq_len=16, microbatches=2, gradient_reduction=reduction)
    split = program(model=model, target="cpu:8", batch=parts, **WAYS[way])
    assert_close(loss_and_gradients(split, batch(alone)), loss_and_gradients(alone))


def test_a_single_microbatch_can_be_reduced_last():
    sizes = Batch(global_batch_size=8, seq_len=16, gradient_reduction="per_step")
    split = program(target="cpu:8", mesh=Mesh(data=8), rules=("zero1",), batch=sizes)
    assert_close(loss_and_gradients(split), loss_and_gradients(program()))


# An eighth of embed is one tile of a TPU; of smaller shards it all-reduces the whole instead.
MODEL = Model(layers=4, embed=1024, heads=8, mlp=1024, vocab=4096)
COMPILERS = [
    pytest.param(
        target,
        marks=pytest.mark.skipif(not find_spec(module), reason=f"no {module}"),
    )
    for target, module in (("v5e:2x4", "libtpu"), ("h100:8", "jax_plugins"))
]
LARGE = 100_000  # bytes: more than norms, and than sums of the loss


def traffic(target, rules, mesh, reduction="per_microbatch"):
    """Large collectives of a training step of 4 microbatches."""
    batch = Batch(global_batch_size=64, seq_len=256, microbatches=4, gradient_reduction=reduction)
    of = program(target=target, model=MODEL, rules=rules, mesh=mesh, batch=batch)
    record = xla.compile(lower(of, "train")).record
    found = [Collective.from_record(one) for one in record["collectives"]]
    return [one for one in found if one.bytes > LARGE]


@pytest.mark.parametrize("target", COMPILERS)
@pytest.mark.usefixtures("little_effort")
def test_zero2_scatters_gradients_and_gathers_weights_once_a_step(target, monkeypatch):
    monkeypatch.setattr(updated_weights, "_MIN_SAVING", 0.0)  # in a loop over layers
    found = traffic(target, ("zero2",), Mesh(data=8))
    weights = [one for one in found if one.op == "all-gather" and one.dtype == "f32"]
    assert {one.loops for one in weights} == {(MODEL.layers,), ()}
    gathered = sum(one.count * one.bytes for one in weights)
    assert gathered == pytest.approx(4 * parameter_count(MODEL), rel=0.001)
    assert sum(one.count for one in found if one.op == "reduce-scatter") >= 4 * MODEL.layers
    assert not [one for one in found if one.op == "all-reduce" and one.loops]


@pytest.mark.skipif(not find_spec("jax_plugins"), reason="no jax_plugins")
def test_updated_weights_take_no_memory_beside_the_stored_ones():
    """With all layers gathered at once, the peak was 1.26 times the minimum."""
    of = program(
        target="h100:8",
        mesh=Mesh(data=8),
        rules=("zero1",),
        model=Model(layers=8, embed=1024, heads=8, mlp=2816, vocab=1024),
        batch=Batch(global_batch_size=32, seq_len=256),
    )
    made, record = resolve(of), xla.compile(lower(of, "train")).record
    assert record["memory"]["peak"] <= 1.15 * lower_bound(made)
    assert memory(made).peak == pytest.approx(record["memory"]["peak"], rel=0.1)


@pytest.mark.parametrize("target", COMPILERS)
@pytest.mark.usefixtures("little_effort")
def test_zero3_gathers_weights_by_layer_and_scatters_gradients(target):
    found = traffic(target, ("fsdp",), Mesh(fsdp=8))
    assert not [one for one in found if one.op == "all-reduce" and one.dtype == "f32"]
    assert {one.loops for one in found if one.op == "reduce-scatter"} >= {(4, MODEL.layers)}


@pytest.mark.parametrize("target", COMPILERS)
@pytest.mark.usefixtures("little_effort")
@pytest.mark.parametrize("rules", [("data",), ("zero1",)], ids=lambda rules: rules[0])
def test_reduced_last_gradients_travel_once_a_step_from_inside_the_backward_loop(target, rules):
    found = traffic(target, rules, Mesh(data=8), reduction="per_step")
    op = "all-reduce" if rules == ("data",) else "reduce-scatter"
    reductions = [one for one in found if one.op == op]
    trips = {one.loops for one in reductions}
    # XLA:GPU may begin the last layer's behind the loop, which then goes around once less.
    assert trips in ({(MODEL.layers,), ()}, {(MODEL.layers - 1,), ()})
    whole = sum(one.count * one.bytes for one in reductions if one.op == op)
    assert whole == pytest.approx(4 * parameter_count(MODEL), rel=0.35)
