"""What rests or waits in the host's memory, and what the backward pass computes again."""

import dataclasses

import numpy as np
import pytest
from programs import LLAMA, batch, loaded, placed_inputs, program
from test_parallel import assert_close, loss_and_gradients

import lowering
from graphtrain.compile import worker
from graphtrain.config.resolve import resolve
from graphtrain.config.schema import Batch, Mesh, Model, Optimizer
from graphtrain.cost_model.host_transfers import offloaded_activations
from lowering.errors import LoweringError
from lowering.trees import flatten


@pytest.mark.parametrize("remat", ["attention", "dots", "full", "offload"])
def test_what_is_computed_again_does_not_change_the_gradients(remat):
    model = dataclasses.replace(LLAMA, remat=remat)
    assert_close(loss_and_gradients(program(model=model)), loss_and_gradients(program()))


def test_moments_in_the_hosts_memory_train_alike():
    results = []
    for offload in (False, True):
        of = program(
            target="cpu:8", mesh=Mesh(fsdp=8), optimizer=Optimizer(offload_to_host=offload)
        )
        train = loaded(of, "train")
        state = loaded(of, "init")(np.uint32(0))["state"]
        for _ in range(2):
            state = train(state, placed_inputs(train, "batch", batch(of)), np.float32(0.1))["state"]
        results.append(flatten(state))
    plain, offloaded = results
    kinds = {path: array.sharding.memory_kind for path, array in offloaded.items()}
    assert kinds["optimizer/adam/mu/layers/mlp/up"] == "pinned_host"
    assert kinds["parameters/layers/mlp/up"] == "device"
    for path, array in plain.items():
        np.testing.assert_allclose(offloaded[path], array, rtol=1e-6, atol=1e-7, err_msg=path)


def test_a_card_that_is_not_here_cannot_keep_moments_on_its_host():
    pytest.importorskip("jax_plugins.xla_cuda13", reason="needs the extra gpu")
    of = program(target="h100:8", mesh=Mesh(fsdp=8), optimizer=Optimizer(offload_to_host=True))
    with pytest.raises(
        LoweringError, match=r"h100:8: arrays in host memory cannot be compiled for a GPU"
    ):
        loaded(of, "train")


def test_plans_count_the_activations_that_a_compiled_step_keeps_on_the_host():
    pytest.importorskip("jax_plugins.xla_cuda13", reason="needs the extra gpu")
    model = Model(
        layers=2,
        embed=128,
        heads=2,
        head_dim=64,
        mlp=256,
        vocab=256,
        remat="offload",
        attention="flash",
    )
    batch = Batch(global_batch_size=4, seq_len=512)
    of = resolve(program(target="h100:1", mesh=Mesh(), model=model, batch=batch))
    lowered = worker.lower(of, "train")
    record = lowering.backend(lowered.target).compile(lowered).record
    assert record["memory"]["host"] == offloaded_activations(of)


def test_moments_can_be_half_as_wide():
    of = program(optimizer=Optimizer(moment_dtype="bfloat16"))
    train = loaded(of, "train")
    moments = flatten(train.inputs("state")["optimizer"])
    assert moments["adam/mu/layers/mlp/up"].dtype == "bfloat16"
    assert moments["adam/nu/layers/mlp/up"].dtype == "float32"
