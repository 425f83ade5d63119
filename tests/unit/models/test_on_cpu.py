"""What is written otherwise for a CPU computes what is computed elsewhere, gradients too."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from graphtrain.config.schema import Model
from graphtrain.graphs.optimizer import _clip
from graphtrain.models.activations import ACTIVATIONS, apply_activation
from graphtrain.models.attention import blockwise, kernel_support
from graphtrain.models.attention.blockwise import blockwise_attention
from graphtrain.models.attention.dot_product import dot_product_attention
from graphtrain.models.attention.score_mods import ScoreTransform
from graphtrain.models.attention.segment_mask import isolate_documents
from graphtrain.models.loss import cross_entropy
from graphtrain.models.norms import Norm
from lowering.machine.target import Target
from lowering.tracing.cpu_hints import KEEP_OPTIMIZATION_BARRIERS, cast_round_to_even, materialize
from lowering.tracing.current_target import trace_for_target

LENGTH = 19  # no multiple of a block


def normal(seed, *shape, dtype="float32"):
    return jax.random.normal(jax.random.key(seed), shape).astype(dtype)


def with_gradients(function, arrays, gradient):
    def both(arrays, gradient):
        results, back = jax.vjp(function, *arrays)
        return results, *back(gradient)

    quickly = {"xla_backend_optimization_level": 0}
    compiled = jax.jit(both).lower(arrays, gradient).compile(compiler_options=quickly)
    return [np.asarray(x, np.float64) for x in compiled(arrays, gradient)]


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 3e-2)])
@pytest.mark.parametrize(
    ("scoring", "window", "documents"),
    [
        (ScoreTransform(0.5), None, False),
        (ScoreTransform(0.5, cap=2.0), 3, True),
        (ScoreTransform(0.5, slopes=(0.5, 0.2, 0.1, 0.3)), None, False),
    ],
    ids=["plain", "capped in a window of documents", "alibi"],
)
def test_attention_in_blocks_is_attention(
    scoring, window, documents, dtype, tolerance, monkeypatch
):
    monkeypatch.setattr(kernel_support, "_CPU_BLOCK", 4)
    heads = (4, 2, 2)
    arrays = [normal(seed, 2, LENGTH, n, 8, dtype=dtype) for seed, n in enumerate(heads)]
    gradient = normal(3, 2, LENGTH, 4, 8, dtype=dtype)
    numbers = jnp.cumsum(normal(4, 2, LENGTH) > 1, 1).astype(jnp.int32) if documents else None
    window = None if window is None else jnp.int32(window)
    with isolate_documents(numbers):
        want, got = (
            with_gradients(lambda *three, f=f: f(*three, scoring, window), arrays, gradient)
            for f in (dot_product_attention, blockwise_attention)
        )
    assert len(list(blockwise._blocks(LENGTH))) > 1
    for a, b in zip(want, got, strict=True):
        np.testing.assert_allclose(b, a, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("products", [1, 2], ids=["plain", "gated"])
def test_activations_in_float32_are_activations(products):
    wide = [normal(seed, 2, 3, 8, dtype="bfloat16") for seed in range(products)]
    gradient = normal(3, 2, 3, 8, dtype="bfloat16")

    activate = ACTIVATIONS["swiglu" if products == 2 else "gelu"]

    def run(target):
        with trace_for_target(Target.parse(target)):
            return with_gradients(lambda *x: apply_activation(activate, list(x)), wide, gradient)

    for want, got in zip(run("v5e:1x1"), run("cpu:1"), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-2, atol=1e-2)


def test_cross_entropy_looks_its_targets_up():
    logits, weights = 9 * normal(0, 2, 5, 32), normal(1, 2, 5)
    targets = jax.random.randint(jax.random.key(2), (2, 5), 0, 32).at[0, 0].set(32)

    def run(target):
        def value(logits):
            loss, squares = cross_entropy(logits, targets, weights)
            return loss + 0.1 * squares

        with trace_for_target(Target.parse(target)):
            return with_gradients(value, [logits], jnp.float32(2.0))

    for want, got in zip(run("v5e:1x1"), run("cpu:1"), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [0.1, 10.0], ids=["short", "long"])
def test_gradients_longer_than_the_limit_are_shortened_to_it(size):
    gradients = {"a": jnp.full(9, size), "b": jnp.full(7, -size)}
    got, _ = _clip(1.0).update(gradients, _clip(1.0).init(gradients))
    # 16 equal numbers are 4 times as long as one.
    np.testing.assert_allclose(got["a"], np.full(9, min(size, 0.25)), rtol=1e-6)
    np.testing.assert_allclose(got["b"], np.full(7, -min(size, 0.25)), rtol=1e-6)


def test_a_compiler_for_cpus_heeds_barriers():
    with trace_for_target(Target.parse("cpu:1")):
        program = jax.jit(lambda x: materialize(jnp.cos(x)) * 2).lower(jnp.ones(8))
    assert "opt-barrier" in program.compile(compiler_options=KEEP_OPTIMIZATION_BARRIERS).as_text()


def test_casts_round_as_xla_rounds_by_itself():
    few = [0x7F800000, 0xFF800000, 0x7F7FFFFF, 0x80000000, 1, 0x3F808000, 0x3F818000]
    drawn = np.random.default_rng(0).integers(0, 2**32, 1 << 16, dtype=np.uint32)
    bits = np.concatenate([np.uint32(few), drawn]).view(np.float32)
    x = jnp.asarray(bits[~np.isnan(bits)])
    with trace_for_target(Target.parse("cpu:1")):
        got, back = jax.vjp(lambda x: cast_round_to_even(x, "bfloat16"), x)
        (of_x,) = back(jnp.ones_like(got))
        (of_y,) = jax.vjp(lambda y: cast_round_to_even(y, "float32"), got)[1](x)
        not_numbers = cast_round_to_even(jnp.float32([np.nan, -np.nan]), "bfloat16")
    np.testing.assert_array_equal(got.view(np.uint16), x.astype("bfloat16").view(np.uint16))
    np.testing.assert_array_equal(of_y.view(np.uint16), got.view(np.uint16))
    assert of_x.dtype == jnp.float32 and (of_x == 1).all()
    assert jnp.isnan(not_numbers).all()


@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_one_sequence_is_normalized_as_beside_another(norm):
    """A CPU gets a single sequence without its first dimension, in which sums are slow."""
    layer = Norm(Model(layers=1, embed=16, heads=2, mlp=8, vocab=8, norm=norm))
    random = np.random.default_rng(0)
    x, of_y = (jnp.asarray(random.standard_normal((2, 5, 16)), jnp.float32) for _ in range(2))
    structure, weights = nnx.split(layer)

    def gradients(x, of_y):
        with trace_for_target(Target.parse("cpu:1")):
            y, back = jax.vjp(lambda w, x: nnx.merge(structure, w)(x), weights, x)
            return y, back(of_y)[1]

    both, alone = gradients(x, of_y), gradients(x[:1], of_y[:1])
    for whole, one in zip(both, alone, strict=True):
        np.testing.assert_allclose(one, whole[:1], rtol=1e-6, atol=1e-6)
    text = str(jax.make_jaxpr(gradients)(x[:1], of_y[:1]))
    assert "reduce_sum[axes=(1,)" in text and "reduce_sum[axes=(2,)" not in text
