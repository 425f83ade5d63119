"""Replicas of a mesh, and which of them is wrong."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from graphtrain.api.checks.report import problems
from graphtrain.compile.tasks import run_tasks
from graphtrain.config import load_config
from graphtrain.config.resolve import resolve
from graphtrain.graphs.checksums import array_checksum, checksum_graph
from graphtrain.run.verification import odd_ones, replica_groups
from sharding_rules.arrays import ArraySpec
from sharding_rules.mesh import MeshShape
from sharding_rules.rules import Rules

CONFIG = """
[program]
target = "cpu:1"
model = { layers = 2, embed = 64, heads = 4, mlp = 96, vocab = 256 }
batch = { global_batch_size = 8, seq_len = 32 }

[run]
directory = "run"
steps = 10
data = { train = "data/train" }
"""


def test_replicas_have_the_same_place_along_the_axes_that_split_an_array():
    devices = np.array([SimpleNamespace(id=index) for index in range(8)]).reshape(2, 2, 2)
    axes = ("data", "fsdp", "tensor")
    assert replica_groups(devices, axes, "replicated") == [list(range(8))]
    assert replica_groups(devices, axes, "fsdp") == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert replica_groups(devices, axes, "fsdp+tensor") == [[0, 4], [1, 5], [2, 6], [3, 7]]


@pytest.mark.parametrize(
    ("checksums", "expected"),
    [
        ({0: 5, 1: 5, 2: 5}, ([], True)),
        ({0: 5, 1: 6, 2: 5}, ([1], True)),
        ({0: 5, 1: 6}, ([0, 1], False)),
        ({7: 5}, ([], True)),
    ],
)
def test_the_minority_is_wrong_and_without_a_majority_nobody_knows(checksums, expected):
    assert odd_ones(checksums) == expected


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "int8"])
def test_every_bit_of_every_element_changes_the_checksum(dtype):
    values = np.arange(6).reshape(2, 3)
    whole = np.asarray(jnp.asarray(values, dtype))
    words = whole.view(f"uint{8 * whole.itemsize}")
    checksum = jax.jit(array_checksum)
    unchanged = int(checksum(whole))
    for element in np.ndindex(words.shape):
        for bit in range(8 * whole.itemsize):
            changed = words.copy()
            changed[element] ^= words.dtype.type(1) << words.dtype.type(bit)
            assert int(checksum(changed.view(whole.dtype))) != unchanged


def test_there_is_a_checksum_for_each_way_in_which_arrays_are_split():
    specs = {
        "step": ArraySpec((), (), "int32", "optimizer"),
        "weights": ArraySpec((8, 4), ("embed", "mlp"), "float32", "parameter"),
    }
    rules, mesh = Rules.load(["fsdp", "tensor"]), MeshShape({"data": 2, "fsdp": 2, "tensor": 2})
    graph = checksum_graph(specs, rules, mesh)
    assert list(graph.outputs["checksums"]) == ["fsdp+tensor", "replicated"]


def test_other_programs_stay_as_they_are():
    plain = load_config(CONFIG, [])
    verified = load_config(CONFIG, ["run.verify_every=5"])
    tasks = [run_tasks({"a": resolve(one.program)}, {"a": one.run}) for one in (plain, verified)]
    keys = [{one.graph: one.request.digest for one in of} for of in tasks]
    assert set(keys[1]) - set(keys[0]) == {"copy_state", "checksums"}
    assert keys[0].items() <= keys[1].items()


def test_programs_that_do_not_repeat_bit_for_bit_are_refused(monkeypatch):
    words = ["run.verify_every=5", "program.target=h100:8"]
    found = [one.message for one in problems(load_config(CONFIG, words))]
    assert any("set XLA_FLAGS=--xla_gpu_deterministic_ops=true" in one for one in found)
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_deterministic_ops=true")
    found = [one.message for one in problems(load_config(CONFIG, words))]
    assert not any("verify_every" in one for one in found)
    words[1] = "program.target=ascend910b:1"
    found = [one.message for one in problems(load_config(CONFIG, words))]
    assert any("run.verify_every is not supported on ascend910b:1" in one for one in found)
