"""Weights enter the loop over layers as they lie: no stack of them is turned round for a gather."""

import importlib.util
import re

import jax
import numpy as np
import pytest
from programs import CUBE, batch, loaded, placed_inputs, program, state_of

from graphtrain.compile import worker
from graphtrain.config.resolve import resolve
from graphtrain.config.schema import Batch, Mesh, Model
from lowering.machine.target import Target
from lowering.tracing import weight_layout

MODEL = Model(layers=4, embed=256, heads=4, mlp=512, vocab=512)


@pytest.mark.parametrize("target", ["h100:8", "v5e:2x4"])
def test_a_step_computes_the_same(target, monkeypatch):
    of = program(**CUBE)
    want = gradients(of)
    monkeypatch.setattr(weight_layout, "traced_target", lambda: Target.parse(target))
    monkeypatch.setattr(weight_layout, "on_tpu", lambda: target == "v5e:2x4")
    got = gradients(of)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def gradients(of):
    step = loaded(of, "gradients")
    given = {"state": state_of(of), "batch": batch(of)}
    return jax.device_get(step(*(placed_inputs(step, name, given[name]) for name in given)))


def test_no_gpu_program_holds_a_second_copy_of_its_parameters():
    if not importlib.util.find_spec("jax_plugins"):
        pytest.skip("needs the extra gpu")
    sizes = Batch(global_batch_size=8, seq_len=128)
    of = program(target="h100:8", mesh=Mesh(fsdp=8), model=MODEL, batch=sizes)
    lowered = worker.lower(resolve(of), "train")
    text = lowered.handle.compile(compiler_options=lowered.options).as_text()
    turned = re.findall(r"transpose\S* = (f32\[[\d,]+\])\S* \w+\(%param", text)
    assert not [shape for shape in turned if re.search(rf"\b{MODEL.layers}\b", shape)]


def test_narrow_shards_keep_the_layout_in_which_a_tpu_stores_them():
    # Default layouts of libtpu 0.0.42.1, without the dimension of layers.
    for shard, order in {
        (11008, 64): (1, 0),
        (64, 11008): (0, 1),
        (64, 32, 128): (0, 1, 2),
        (32, 128, 64): (0, 2, 1),
    }.items():
        split = [("fsdp",) if size == 64 else () for size in shard]
        assert weight_layout._order_of_narrow(shard, split) == order
    assert weight_layout._order_of_narrow((128, 11008), [("fsdp",), ()]) is None
