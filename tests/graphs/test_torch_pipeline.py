"""Models of transformers in stages give the numbers of one device, by every schedule."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs import alone, program, stored
from test_parallel import assert_close, loss_and_gradients
from torch_families import imported

import lowering
from graphtrain.checkpoint import Checkpoints, arrangement_of, restore_parameters
from graphtrain.config.schema import Batch, Mesh, Pipeline
from graphtrain.errors import TrainingError
from graphtrain.requests import stages_of
from graphtrain.torch_models.model import open_model
from graphtrain.torch_models.parity import real_module, stacked
from graphtrain.torch_models.weights import ModuleWeights, export
from lowering.target import Target
from lowering.trees import flatten, unflatten

GPIPE, ONE_ONE = Pipeline(schedule="gpipe"), Pipeline(schedule="1f1b")
CUBE = Mesh(data=2, stage=2, tensor=2)
BATCH = Batch(sequences=16, length=8, microbatches=4)
CASES = {
    "llama, gpipe, uneven": ("llama", Pipeline(schedule="gpipe", layers=(1, 3)), CUBE),
    "llama, circular": ("llama", Pipeline(rounds=2), CUBE),
    "llama, 1f1b": ("llama", ONE_ONE, Mesh(fsdp=2, stage=2, tensor=2)),
    "gpt2, gpipe": ("gpt2", GPIPE, Mesh(stage=4, data=2)),
    "gpt2, circular, uneven": ("gpt2", Pipeline(layers=(3, 1)), Mesh(data=2, fsdp=2, stage=2)),
    "gpt2, 1f1b": ("gpt2", ONE_ONE, CUBE),
}
DEEP = {"llama": {"num_hidden_layers": 4}, "gpt2": {"n_layer": 4}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


def in_stages(folder, kind, pipeline, mesh, **settings):
    model = imported(folder, kind, overrides=DEEP[kind], **settings)
    return program(target="cpu:8", mesh=mesh, pipeline=pipeline, batch=BATCH, model=model)


def one_device(of):
    """Without a pipeline's settings, so that all cases share it."""
    return alone(dataclasses.replace(of, pipeline=Pipeline()))


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_equal_those_of_one_device(case, folder):
    of = in_stages(folder, *CASES[case])
    want = unflatten(loss_and_gradients(one_device(of)))
    assert_close(loss_and_gradients(of), flatten(stored(of, want)))


@pytest.mark.parametrize(
    ("kind", "rules", "mesh"),
    [
        ("llama", ("zero2", "fsdp", "tensor"), Mesh(data=2, fsdp=2, tensor=2)),
        ("gpt2", ("data",), Mesh(data=8)),
    ],
)
def test_gradients_reduced_last_are_those_of_one_device(kind, rules, mesh, folder):
    last = dataclasses.replace(BATCH, sequences=32, reduce="last")
    of = dataclasses.replace(in_stages(folder, kind, Pipeline(), mesh), rules=rules, batch=last)
    alone_each = dataclasses.replace(one_device(of), batch=dataclasses.replace(last, reduce="each"))
    assert_close(loss_and_gradients(of), loss_and_gradients(alone_each))


def described(tree):
    return jax.tree.map(
        lambda one: jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=one.sharding), tree
    )


def assert_same(got, want):
    for path, array in flatten(want).items():
        np.testing.assert_array_equal(flatten(got)[path], array, err_msg=path)


def test_a_checkpoint_goes_into_other_stages_and_to_a_folder_and_back(folder, tmp_path):
    uneven = in_stages(folder, *CASES["gpt2, circular, uneven"])
    rounds = dataclasses.replace(uneven, pipeline=Pipeline(rounds=2))
    module = real_module(uneven.model)
    weights = {name: one.detach().numpy() for name, one in module.named_parameters()}
    whole = unflatten(stacked(open_model(uneven.model), weights))
    kept = {
        of: jax.tree.map(jnp.asarray, stored(of, whole))
        for of in (uneven, rounds, one_device(uneven))
    }
    saving = Checkpoints(tmp_path, 1, arrangement_of(uneven))
    saving.save(1, {"parameters": kept[uneven]}, {})
    saving.close()

    for of, want in kept.items():
        restored = restore_parameters(tmp_path, 1, described(want), arrangement_of(of))
        assert_same(restored, want)
    turned = dataclasses.replace(uneven, pipeline=Pipeline(layers=(1, 3)))
    with pytest.raises(TrainingError, match="in another order"):
        restore_parameters(tmp_path, 1, described(kept[uneven]), arrangement_of(turned))

    (tmp_path / "run/checkpoints").mkdir(parents=True)
    tmp_path.joinpath("1").rename(tmp_path / "run/checkpoints/1")
    export(uneven, tmp_path / "run", 1, tmp_path / "back", lambda done, count: None)
    for of, want in kept.items():
        fill = lowering.backend(Target.parse("cpu:8")).fill
        read = ModuleWeights(tmp_path / "back").parameters(described(want), fill, stages_of(of))
        assert_same(read, want)
