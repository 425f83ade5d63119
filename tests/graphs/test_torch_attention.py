"""Models of transformers attend as the native decoder does: by documents, and split by position."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs import alone, batch, loaded, placed_inputs, program
from test_parallel import assert_close
from test_torch_models import state_of
from torch_families import imported
from unoptimized import OPTIONS

from graphtrain.config.resolve import resolve
from graphtrain.config.schema import Batch, Mesh, Serve
from graphtrain.config.serving_program import serving_program
from graphtrain.errors import ImportedModelError
from graphtrain.graphs.open_model import open_language_model
from graphtrain.graphs.served_model import kv_cache_specs
from graphtrain.models.attention.cache_layout import DOT_LAYOUT, CacheSize
from graphtrain.models.attention.kv_cache import CacheRows, layer_cache_specs
from graphtrain.models.attention.segment_mask import isolate_documents
from graphtrain.torch_frontend.bridge import to_numpy
from graphtrain.torch_frontend.open_module import open_model
from graphtrain.torch_frontend.parity import module_with_weights, stack_weights
from lowering.trees import flatten, unflatten

RING, ULYSSES = ("data", "fsdp", "context", "tensor"), ("data", "fsdp", "ulysses", "tensor")
APART = Batch(global_batch_size=8, seq_len=16, cross_document_attention=False)


CUBE = Mesh(data=2, context=2, tensor=2)


@pytest.mark.parametrize(
    ("kind", "rules"), [("gemma2", RING), ("gpt2", (*ULYSSES, "sequence"))], ids=["ring", "ulysses"]
)
def test_split_by_position_loss_and_gradients_are_those_of_one_device(tmp_path, kind, rules):
    """gemma2 has windows and a cap, gpt2 a table of positions."""
    model = imported(tmp_path, kind)
    again = replace(model, remat="attention")
    split = program(model=again, target="cpu:8", mesh=CUBE, rules=rules)
    state, inputs = state_of(split, module_with_weights(model)), batch(split)
    found = []
    for of in (split, alone(replace(split, model=model))):
        step = loaded(of, "gradients")
        placed = placed_inputs(step, "state", state), placed_inputs(step, "batch", inputs)
        found.append(flatten(jax.device_get(step(*placed))))
    assert_close(*found)


def test_no_mask_is_made_and_scores_may_be_computed_again(tmp_path):
    tokens = jnp.zeros((2, 16), jnp.int32)

    def traced(remat):
        opened = open_model(imported(tmp_path, "mistral", remat=remat))
        arrays = {path: jnp.zeros(spec.shape, spec.dtype) for path, spec in opened.specs().items()}
        return jax.make_jaxpr(lambda p: opened.forward(unflatten(p), tokens, None)[0])(arrays)

    plain, again = traced("none"), traced("attention")
    shapes = [out.aval.shape for equation in plain.jaxpr.eqns for out in equation.outvars]
    assert (2, 16, 64) in shapes and not [one for one in shapes if one[-2:] == (16, 16)]
    assert "prevent_cse" not in str(plain) and "prevent_cse" in str(again)


SIZES = [5, 1, 7, 3]
TOKENS = np.random.default_rng(1).integers(0, 64, sum(SIZES)).astype(np.int32)


@pytest.mark.parametrize("kind", ["gpt2", "gemma2"])
def test_documents_in_one_row_have_the_logits_of_each_alone(tmp_path, kind):
    model = imported(tmp_path, kind)
    opened = open_model(model)
    weights = {name: to_numpy(one) for name, one in module_with_weights(model).named_parameters()}
    parameters = unflatten(stack_weights(opened, weights))

    def packed(parameters):
        with isolate_documents(jnp.repeat(jnp.arange(4), np.array(SIZES))[None]):
            return opened.forward(parameters, jnp.asarray(TOKENS[None]), None)[0][0]

    def separate(parameters):
        begins = np.cumsum([0, *SIZES])[:-1]
        rows = np.stack([np.roll(TOKENS, -begin) for begin in begins])
        each = opened.forward(parameters, jnp.asarray(rows), None)[0]
        return jnp.concatenate([row[:size] for row, size in zip(each, SIZES, strict=True)])

    both = jax.jit(lambda p: [packed(p), separate(p)])
    got, want = both.lower(parameters).compile(OPTIONS)(parameters)
    np.testing.assert_allclose(got, want, atol=2e-5)
    assert np.abs(want).max() > 0.05


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (
            "bloom",
            "cross_document_attention = false.* a module whose forward accepts position_ids, "
            ".* BloomForCausalLM does",
        ),
        (
            "falcon",
            "cross_document_attention = false.* requires plain causal attention; .* has a mask",
        ),
        (
            "gpt_neo",
            "cross_document_attention = false, .* requires graphtrain.s attention, but "
            "GPTNeoForCausalLM computes its",
        ),
    ],
)
def test_attention_of_its_own_keeps_no_documents_apart_and_says_so(tmp_path, kind, words):
    of = program(model=imported(tmp_path, kind), batch=APART)
    with pytest.raises(ImportedModelError, match=words):
        loaded(of, "evaluate")


def test_a_sequence_that_is_continued_has_the_logits_of_the_whole(tmp_path):
    """Of blocks scanned in pairs, some with a window that the tokens leave behind."""
    settings = imported(tmp_path, "gemma2")
    model, opened = open_language_model(settings), open_model(settings)
    module = module_with_weights(settings)
    weights = {name: to_numpy(one) for name, one in module.named_parameters()}
    parameters, tokens = unflatten(stack_weights(opened, weights)), jnp.asarray(TOKENS[None])
    size = CacheSize(16, 0, 8, DOT_LAYOUT)
    kept = {
        f"{path}/{name}": jnp.zeros(spec.shape, spec.dtype)
        for path, layer in model.cached_layers().items()
        for name, spec in layer_cache_specs(layer, 1, size, "float32").items()
    }
    kept = unflatten(kept)

    def continued(parameters, kept):
        rows = CacheRows(jnp.zeros(1, jnp.int32), 16)
        first, kept = model.decode_step(parameters, kept, tokens[:, :8], rows)

        def one(kept, place):
            token = jax.lax.dynamic_slice_in_dim(tokens, place, 1, 1)
            scores, kept = model.decode_step(parameters, kept, token, CacheRows(place[None], 16))
            return kept, scores[:, 0]

        _, others = jax.lax.scan(one, kept, jnp.arange(8, 16))
        return jnp.concatenate([first[0], others[:, 0]])

    run = jax.jit(lambda p, k: (continued(p, k), opened.forward(p, tokens, None)[0][0]))
    got, want = run.lower(parameters, kept).compile(OPTIONS)(parameters, kept)
    np.testing.assert_allclose(got, want, atol=2e-5)


def test_what_is_kept_is_of_the_dtype_of_the_computation(tmp_path):
    settings = imported(tmp_path, "llama", dtype="bfloat16")
    of = program(model=settings, serve=Serve(slots=3, prefill=(8,), dtype="bfloat16"))
    (spec, *_) = flatten(kv_cache_specs(serving_program(resolve(of)), 3)).values()
    assert spec.shape == (3, 2, 8, 256) and spec.dtype == "bfloat16"  # keys, to a whole block
    assert spec.axes == ("batch", "kv_heads", "head_dim", None)


def test_what_cannot_be_continued_says_so(tmp_path):
    with pytest.raises(ImportedModelError, match=r"one attention .* transformer\.h\.0 has 0"):
        open_language_model(imported(tmp_path, "bloom")).cached_layers()
