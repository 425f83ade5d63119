"""Updated weights gathered layer by layer: the numbers of one device, and skipped steps."""

import dataclasses

import jax
import numpy as np
import pytest
from programs import LLAMA, alone, batch, loaded, placed_inputs, program, state_of

from graphtrain.config.schema import Batch, Mesh, Optimizer
from graphtrain.graphs import build
from graphtrain.graphs.gathered_updates import gather_layers
from graphtrain.models.updated_weights import UPDATE_SCOPE, gathered_stacks
from graphtrain.run.spikes import Limits
from lowering.hlo.collectives import Collective
from lowering.machine.target import Target
from lowering.tracing.constrain import constrain_tree, use_placement
from lowering.trees import flatten, unflatten
from lowering.xla import backend as xla
from sharding_rules.arrays import ArraySpec
from sharding_rules.mesh import MeshShape
from sharding_rules.rules import Rules

TWO = Batch(global_batch_size=16, seq_len=16, microbatches=2)
# Adam divides a gradient by its own size, which shows the order of its sums.
ADAM = Optimizer(epsilon=1e-5)
WAYS = {
    "zero1": {"mesh": Mesh(data=8), "rules": ("zero1",)},
    "zero2": {"mesh": Mesh(data=8), "rules": ("zero2",)},
    "zero1-fsdp-tensor": {
        "mesh": Mesh(data=2, fsdp=2, tensor=2),
        "rules": ("zero1", "fsdp", "tensor", "sequence"),
    },
}


@pytest.fixture(scope="module", autouse=True)
def by_layer():
    """Make programs for CPUs gather as those for GPUs and TPUs do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "gathered_by_layer", gathered_stacks)
        yield


def steps(of):
    """Return the state and the losses of two steps, on the host."""
    train, losses = loaded(of, "train"), []
    state = placed_inputs(train, "state", state_of(of))
    for seed in range(2):
        inputs = placed_inputs(train, "batch", batch(of, seed))
        outputs = train(state, inputs, np.float32(0.01))
        state = outputs["state"]
        losses.append(float(outputs["metrics"]["loss"]))
    return flatten(jax.device_get(state)), losses


@pytest.mark.parametrize("way", WAYS)
def test_loss_and_weights_equal_those_of_one_device(way):
    of = program(target="cpu:8", **{"optimizer": ADAM, "batch": TWO} | WAYS[way])
    (found, losses), (wanted, wanted_losses) = steps(of), steps(alone(of))
    np.testing.assert_allclose(losses, wanted_losses, rtol=1e-5)
    for path, array in wanted.items():
        np.testing.assert_allclose(found[path], array, rtol=1e-5, atol=1e-5, err_msg=path)
    gathers = [
        Collective.from_record(one)
        for one in loaded(of, "train").record["collectives"]
        if f"/{UPDATE_SCOPE}/" in one.get("scope", "")
    ]
    assert {one.loops for one in gathers} == {(of.model.layers,)}


def test_stacks_of_unequal_length_are_gathered_each_in_its_loop():
    shapes = {"layers": (2, 16, 3), "dense_layers": (5, 16, 3)}
    specs = {
        f"{stack}/down": ArraySpec(shape, (stack, "embed", "mlp"))
        for stack, shape in shapes.items()
    }
    random = np.random.default_rng(0)
    stored, updated = (
        {path: random.normal(size=spec.shape) for path, spec in specs.items()} for _ in range(2)
    )
    mesh = xla.make_mesh(MeshShape({"data": 8}), xla.devices(Target.parse("cpu:8")))

    def gathered(stored, updated):
        updated = constrain_tree(updated, unflatten(specs), "optimizer")
        return gather_layers(stored, updated, specs)

    with use_placement(mesh, Rules.load(("zero1",))):
        found = jax.jit(gathered)(unflatten(stored), unflatten(updated))
    for path, array in flatten(found).items():
        np.testing.assert_array_equal(array, np.float32(updated[path]), err_msg=path)


def test_a_step_left_undone_returns_the_stored_weights():
    """A step is left undone by an overflow of float16 gradients, and by a limit."""
    of = program(
        target="cpu:8",
        model=dataclasses.replace(LLAMA, dtype="float16"),
        optimizer=Optimizer(skip_spikes=True),
        batch=TWO,
        **WAYS["zero1"],
    )
    train, before = loaded(of, "train"), state_of(of)
    too_large = batch(of)
    too_large["weights"][..., 0, :2] = 1 + 1e6, 1 - 1e6
    for inputs, limits, is_skipped in (
        (too_large, Limits(), True),
        (batch(of), Limits(grad_norm=0.0), True),
        (batch(of), Limits(), False),
    ):
        placed = placed_inputs(train, "state", before), placed_inputs(train, "batch", inputs)
        after = train(*placed, np.float32(0.01), limits.arrays())["state"]["parameters"]
        same = [
            np.array_equal(array, flatten(before["parameters"])[path])
            for path, array in flatten(jax.device_get(after)).items()
        ]
        assert all(same) if is_skipped else not any(same)
