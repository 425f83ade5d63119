"""Models of transformers in stages give the numbers of one device, by every schedule."""

import dataclasses

import pytest
from programs import alone, program, stored
from test_parallel import assert_close, loss_and_gradients
from torch_families import imported

from graphtrain.config.schema import Batch, Mesh, Pipeline
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
