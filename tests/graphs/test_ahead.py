"""Multi-token prediction on every kind of mesh has the loss and gradients of one device."""

import dataclasses

import jax
import numpy as np
import pytest
from programs import LLAMA, batch, loaded, lower, placed_inputs, program
from test_adapters import Base, gradients_of, new_state, same
from test_balanced_mixture import MODEL
from test_context import RING, ULYSSES
from test_pipeline import GPIPE, assert_equals_one_device
from test_preferences import merged

from graphtrain.config.schema import Adapter, Batch, Mesh, PipelineSettings
from graphtrain.models import decoder
from lowering.trees import flatten, unflatten

MIXTURE = dataclasses.replace(MODEL, mtp_loss_weight=0.3)
DENSE = dataclasses.replace(LLAMA, layers=4, mtp_loss_weight=0.3, init_std=0.3)
TIED = dataclasses.replace(DENSE, tie_word_embeddings=True)
PARTS = Batch(global_batch_size=8, seq_len=16, microbatches=2)
APART = dataclasses.replace(PARTS, cross_document_attention=False)
WAYS = {
    "ring": (DENSE, APART, {"mesh": Mesh(data=2, context=2), "rules": RING}),
    "ulysses": (DENSE, PARTS, {"mesh": Mesh(data=2, context=2), "rules": ULYSSES}),
    "gpipe, a mixture": (MIXTURE, PARTS, {"mesh": Mesh(stage=2, expert=2), "pipeline": GPIPE}),
    "circular, documents": (
        TIED,
        APART,
        {"mesh": Mesh(data=2, stage=2), "pipeline": PipelineSettings(virtual_stages=2)},
    ),
    "stages of parts of rings": (
        DENSE,
        PARTS,
        {"mesh": Mesh(stage=2, context=2), "pipeline": GPIPE},
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_loss_and_gradients_equal_those_of_one_device(way):
    model, sizes, settings = WAYS[way]
    assert_equals_one_device(program(target="cpu:4", model=model, batch=sizes, **settings))


def test_factors_have_the_gradients_of_the_weights_that_they_change():
    """Of the merged weights, by the chain rule: those are compared with transformers."""
    model = dataclasses.replace(DENSE, layers=2)
    adapter = Adapter(rank=4, alpha=8.0, target_modules=("attention/*", "mlp/up"))
    of = program(model=model, adapter=adapter, batch=PARTS)
    trained, base = flatten(new_state(of)["parameters"]), Base(model).arrays
    got = gradients_of(of)
    full = program(model=model, batch=PARTS)
    step, state = loaded(full, "gradients"), new_state(full)
    weights = {path: x.astype(np.float32) for path, x in merged(base, trained, adapter).items()}
    state["parameters"] = unflatten(base | weights)
    given = placed_inputs(step, "state", state), placed_inputs(step, "batch", batch(full))
    want = jax.device_get(step(*given))
    for name in ("loss", "mtp_loss"):
        np.testing.assert_allclose(got[name], want[name], rtol=1e-5)
    of_weights = flatten(want["gradients"])
    for path in weights:
        a, b = (trained[f"{path}/lora_{letter}"] for letter in "ab")
        rank, layers = adapter.rank, model.layers
        first, second = a.reshape(layers, -1, rank), b.reshape(layers, rank, -1)
        gradient = of_weights[path].reshape(layers, first.shape[1], -1) * adapter.scale
        chained = {
            f"{path}/lora_a": (gradient @ second.swapaxes(1, 2)).reshape(a.shape),
            f"{path}/lora_b": (first.swapaxes(1, 2) @ gradient).reshape(b.shape),
        }
        found = {name: flatten(got["gradients"])[name] for name in chained}
        same(unflatten(found), unflatten(chained), 1e-5)


@pytest.mark.parametrize("mesh", [Mesh(data=4), Mesh(data=2, stage=2)], ids=["data", "gpipe"])
def test_the_gradient_of_the_head_is_reduced_once_for_both_losses(mesh, monkeypatch):
    calls = []

    def reduce_head_first(hidden, head, axes):
        calls.append(axes)
        return hidden, head

    monkeypatch.setattr(decoder, "reduce_head_first", reduce_head_first)
    counts = []
    for weight in (None, 0.3):
        calls.clear()
        model = dataclasses.replace(DENSE, mtp_loss_weight=weight)
        of = program(target="cpu:4", model=model, batch=PARTS, mesh=mesh, pipeline=GPIPE)
        lower(of, "gradients")
        counts.append(len(calls))
    assert counts[1] == counts[0] > 0
