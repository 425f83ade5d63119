"""Every split gives the numbers of one device."""

import jax
import numpy as np
import pytest
from programs import CUBE, GPT2, LLAMA, batch, loaded, placed_inputs, program, state_of

from graphtrain.config.schema import Batch, Mesh
from lowering.trees import flatten

MESHES = {
    "data": {"target": "cpu:8", "mesh": Mesh(data=8), "rules": ("data",)},
    "fsdp": {"target": "cpu:8", "mesh": Mesh(fsdp=8), "rules": ("fsdp",)},
    "tensor": {"target": "cpu:2", "mesh": Mesh(tensor=2), "rules": ("tensor",)},
    "sequence": {"target": "cpu:2", "mesh": Mesh(tensor=2), "rules": ("tensor", "sequence")},
    "cube": CUBE,
}


def loss_and_gradients(of, inputs=None):
    """On the host, from the weights of seed 0."""
    executable = loaded(of, "gradients")
    state = placed_inputs(executable, "state", state_of(of))
    inputs = batch(of) if inputs is None else inputs
    return flatten(jax.device_get(executable(state, placed_inputs(executable, "batch", inputs))))


def assert_close(got, want):
    assert got.keys() == want.keys()
    for path in want:
        np.testing.assert_allclose(got[path], want[path], rtol=1e-5, atol=1e-5, err_msg=path)


@pytest.mark.parametrize("model", [LLAMA, GPT2], ids=["llama", "gpt2"])
@pytest.mark.parametrize("mesh", MESHES)
def test_loss_and_gradients_equal_those_of_one_device(mesh, model):
    assert_close(
        loss_and_gradients(program(model=model, **MESHES[mesh])),
        loss_and_gradients(program(model=model)),
    )


def test_accumulated_gradients_equal_those_of_the_whole_batch():
    whole, parts = program(), program(batch=Batch(global_batch_size=8, seq_len=16, microbatches=4))
    given = batch(parts)
    joined = {name: array.reshape(1, 8, 16) for name, array in given.items()}
    assert_close(loss_and_gradients(parts, given), loss_and_gradients(whole, joined))


def test_weights_do_not_depend_on_the_mesh():
    states = [
        jax.device_get(loaded(of, "init", optimized=True)(np.uint32(7)))
        for of in (program(), program(**CUBE))
    ]
    for path, array in flatten(states[0]).items():
        np.testing.assert_array_equal(flatten(states[1])[path], array, err_msg=path)


def test_a_step_keeps_every_array_where_the_plan_puts_it():
    of = program(**CUBE)
    train = loaded(of, "train")
    state = loaded(of, "init")(np.uint32(0))["state"]
    before = flatten(state)
    outputs = train(state, placed_inputs(train, "batch", batch(of)), np.float32(0.1))
    wanted = flatten(train.inputs("state"))
    for path, array in flatten(outputs["state"]).items():
        assert array.sharding.shard_shape(array.shape) == wanted[path].sharding.shard_shape(
            array.shape
        )
    assert before["parameters/layers/attention/query"].is_deleted()  # donated
