"""The kernels of TPUs and cards, interpreted on a CPU, against attention in float64."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from graphtrain.config.schema import Model
from graphtrain.models.attention import flash
from graphtrain.models.attention.flash import gpu_kernel, tpu_kernel
from graphtrain.models.attention.kernel_support import (
    AttentionSpec,
    uses_flash_kernel,
    why_no_kernel,
)
from graphtrain.models.attention.score_mods import ScoreTransform
from lowering.errors import LoweringError
from lowering.machine.target import Target
from lowering.tracing.current_target import trace_for_target

LENGTH, HEADS, KV_HEADS, HEAD_DIM = 256, 2, 1, 64
DOCUMENTS = np.repeat([[0, 1, 2], [0, 0, 1]], [100, 56, 100], axis=1).astype(np.int32)
LLAMA = Model(layers=2, embed=256, heads=4, mlp=512, vocab=256)
ASKED = AttentionSpec.of(LLAMA, 1024)
CASES = {
    "tpu": (tpu_kernel, ScoreTransform(0.2, cap=2.0), 70),
    "gpu": (gpu_kernel, ScoreTransform(0.2), None),
}
TARGETS = {"tpu": Target.parse("v5e:2x4"), "gpu": Target.parse("h100:8")}


def arrays() -> list[np.ndarray]:
    random = np.random.default_rng(0)
    sizes = HEADS, KV_HEADS, KV_HEADS
    return [random.normal(size=(2, LENGTH, size, HEAD_DIM)) for size in sizes]


def exact(
    query: jax.Array, key: jax.Array, value: jax.Array, scoring: ScoreTransform, window: int | None
) -> jax.Array:
    """Every score at once, in the arrays' dtype."""
    key, value = (jnp.repeat(x, HEADS // KV_HEADS, 2) for x in (key, value))
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) * scoring.scale
    if scoring.cap:
        scores = scoring.cap * jnp.tanh(scores / scoring.cap)
    distance = np.arange(LENGTH)[:, None] - np.arange(LENGTH)
    seen = (distance >= 0) & (distance < (window or LENGTH))
    seen = seen & (DOCUMENTS[:, None, :, None] == DOCUMENTS[:, None, None, :])
    shares = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
    return jnp.einsum("bhqk,bkhd->bqhd", shares, value)


@pytest.mark.parametrize("case", CASES)
def test_a_kernel_computes_attention_and_its_gradients(case, monkeypatch):
    monkeypatch.setattr(flash, "_LARGEST_BLOCK", LENGTH // 2)  # more than one
    make, scoring, window = CASES[case]
    kernel = make(scoring, window, interpret=True)
    given = [jnp.asarray(x, jnp.float32) for x in arrays()]
    with trace_for_target(TARGETS[case]):
        got, back = jax.vjp(lambda q, k, v: kernel(q, k, v, DOCUMENTS), *given)
        incoming = np.cos(np.arange(got.size).reshape(got.shape))
        gradients = back(jnp.asarray(incoming, jnp.float32))

    with jax.enable_x64(True):
        wide = [jnp.asarray(x, jnp.float64) for x in arrays()]
        want, back = jax.vjp(lambda q, k, v: exact(q, k, v, scoring, window), *wide)
        for one, other in zip((got, *gradients), (want, *back(jnp.asarray(incoming))), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=2e-5)


def test_the_tpu_kernel_saves_its_output_without_padded_heads():
    kernel = tpu_kernel(ScoreTransform(0.2), None, interpret=True)
    shapes = [jax.ShapeDtypeStruct(x.shape, jnp.bfloat16) for x in arrays()]
    with trace_for_target(TARGETS["tpu"]):
        traced = str(jax.make_jaxpr(lambda *three: jax.vjp(kernel, *three)[0])(*shapes))
    saved = re.findall(r":(\w+\[[\d,]+\]) = name\[name=projection\]", traced)
    output, log_sum = f"bf16[2,{LENGTH},{HEADS * HEAD_DIM}]", f"f32[2,{HEADS},{LENGTH}]"
    assert sorted(saved) == sorted([output, log_sum])


@pytest.mark.parametrize(
    ("target", "model", "length", "how", "reason"),
    [
        ("cpu:8", {}, 1024, {}, "cpu:8 has no flash attention kernel"),
        ("h100:8", {"dtype": "float32"}, 1024, {}, "compute is float32"),
        ("h100:8", {"sliding_window": 100}, 1024, {}, "h100:8 does not support a sliding window"),
        ("h100:8", {"attn_logit_softcap": 30.0}, 1024, {}, "h100:8 does not support a soft cap"),
        (
            "v5e:2x4",
            {"sliding_window": 100, "global_attention_every": 2},
            1024,
            {},
            "global_attention_every",
        ),
        ("v5e:2x4", {"positions": "alibi"}, 1024, {}, "ALiBi"),
        ("v5e:2x4", {"head_dim": 80}, 1024, {}, "a multiple of 64 up to 256, and it is 80"),
        ("h100:8", {"head_dim": 256}, 1024, {}, "a multiple of 16 up to 128, and it is 256"),
        ("h100:8", {}, 1000, {}, "length that is a multiple of 128, not 1000"),
        ("v5p:2x2x1", {}, 1024, {"sharded_positions": True}, "ring"),
        ("v5p:2x2x1", {}, 1024, {"per_replica": True}, 'gradient_reduction = "per_step"'),
    ],
)
def test_what_no_kernel_computes_has_a_reason_and_is_computed_by_scores(
    target, model, length, how, reason
):
    there = Target.parse(target)
    asked = AttentionSpec.of(replace(LLAMA, **model), length, **how)
    assert reason in why_no_kernel(asked, there)
    assert not uses_flash_kernel("auto", asked, there)
    with pytest.raises(LoweringError, match=r'attention = "flash": .* set it to "auto"'):
        uses_flash_kernel("flash", asked, there)


@pytest.mark.parametrize("target", ["h100:8", "a100:8", "v5e:2x4", "v5p:2x2x1"])
def test_a_plain_decoder_has_a_kernel_unless_it_asks_for_scores(target):
    there = Target.parse(target)
    assert uses_flash_kernel("auto", ASKED, there)
    assert uses_flash_kernel("flash", ASKED, there)
    assert not uses_flash_kernel("dense", ASKED, there)
