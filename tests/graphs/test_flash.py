"""Attention by a kernel, in training steps for machines that are not here, and on a mesh."""

import dataclasses
import importlib.util
import re
from functools import partial

import jax
import numpy as np
import pytest
from programs import LLAMA, batch, loaded, program, state_of
from torch_families import imported

from graphtrain.compile import worker
from graphtrain.config.resolve import resolve
from graphtrain.config.schema import Batch, Mesh, Model, Program
from graphtrain.cost_model.time import mfu
from graphtrain.models.attention import flash, module
from graphtrain.models.flops import attention_flops_per_token, step_flops_per_token
from lowering.hlo.collectives import read
from lowering.machine.target import Target
from lowering.xla import backend as xla

NARROW = Model(layers=2, embed=192, heads=4, kv_heads=2, head_dim=64, mlp=384, vocab=320)
CUBE = Mesh(data=2, fsdp=2, tensor=2)
TARGETS = {  # compiler, and what it calls a kernel of ours
    "h100:8": ("jax_plugins.xla_cuda13", "__gpu$xla.gpu.triton"),
    "v5e:2x4": ("libtpu", "tpu_custom_call"),
}


def installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


@pytest.mark.parametrize("target", TARGETS)
def test_a_step_has_the_kernels_once_and_no_scores(target):
    compiler, kernel = TARGETS[target]
    if not installed(compiler):
        pytest.skip(f"needs {compiler}")
    of = Program(
        target=target, mesh=CUBE, model=NARROW, batch=Batch(global_batch_size=16, seq_len=512)
    )
    text = _compiled(of)
    # One forward, although the backward pass computes other things again, and two backward.
    assert text.count(f'custom_call_target="{kernel}"') == 3
    assert not re.search(r"\[(?:\d+,)*512,(?:\d+,)?512\]", text)

    # Scores are computed three times, and with them what a gradient needs: nine products, not six.
    counted = read(text, resolve(of).mesh).flops
    further = attention_flops_per_token(of.model, 512) / 2
    assert counted == pytest.approx(
        (step_flops_per_token(of) + further) * of.batch.tokens / 8, rel=0.02
    )


def test_stages_of_an_imported_model_have_kernels_though_its_head_takes_parts_of_a_sequence(
    tmp_path,
):
    if not installed(TARGETS["h100:8"][0]):
        pytest.skip("needs jax_plugins.xla_cuda13")
    sizes = {"hidden_size": 64, "max_position_embeddings": 128}
    model = imported(tmp_path, "llama", overrides=sizes, dtype="bfloat16", attention="flash")
    of = Program(
        target="h100:8",
        mesh=Mesh(fsdp=2, stage=2, tensor=2),
        model=model,
        batch=Batch(global_batch_size=16, seq_len=128, microbatches=2),
    )
    assert TARGETS["h100:8"][1] in worker.lower(resolve(of), "train").text


def _compiled(of: Program) -> str:
    lowered = worker.lower(resolve(of), "train")
    return lowered.handle.compile(compiler_options=lowered.options).as_text()


def test_each_device_calls_the_kernel_for_its_own_heads_and_sequences(monkeypatch):
    model = dataclasses.replace(LLAMA, head_dim=16, remat="dots")
    sizes = Batch(global_batch_size=8, seq_len=128, cross_document_attention=False)
    of = program(target="cpu:8", mesh=CUBE, model=model, batch=sizes)
    want = _gradients(of)
    monkeypatch.setattr(flash, "gpu_kernel", partial(flash.gpu_kernel, interpret=True))
    monkeypatch.setattr(module, "traced_target", lambda: Target.parse("h100:8"))
    monkeypatch.setattr(module, "uses_flash_kernel", lambda *asked: True)
    got = _gradients(dataclasses.replace(of, model=dataclasses.replace(model, attention="flash")))
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def _gradients(of: Program):
    step = loaded(of, "gradients")
    given = {"state": state_of(of), "batch": batch(of)}
    placed = (xla.to_devices(given[name], step.inputs(name)) for name in given)
    return jax.device_get(step(*placed))


def test_utilisation_is_less_where_causal_attention_counts_in_half():
    of = Program(target="h100:8", model=NARROW, batch=Batch(global_batch_size=16, seq_len=512))
    whole, half = mfu(resolve(of), 1.0), mfu(resolve(of), 1.0, causal=True)
    attended = attention_flops_per_token(NARROW, 512) / step_flops_per_token(of)
    assert half == pytest.approx(whole * (1 - attended / 2))
