import jax
import numpy as np
import pytest

from graphtrain.models.attention.module import dot_product_attention
from graphtrain.models.attention.positions import alibi_slopes
from graphtrain.models.attention.score_mods import ScoreTransform

BATCH, LENGTH, HEADS, KV_HEADS, HEAD_DIM = 2, 9, 6, 2, 4


def reference(query, key, value, scoring, window):
    """One head, one query and float64 at a time."""
    mixed = np.zeros(query.shape)
    for b, q, h in np.ndindex(query.shape[:3]):
        shared = h // (HEADS // KV_HEADS)
        scores = key[b, : q + 1, shared] @ query[b, q, h] * scoring.scale
        if scoring.cap:
            scores = scoring.cap * np.tanh(scores / scoring.cap)
        if scoring.slopes:
            scores = scores - scoring.slopes[h] * np.arange(q, -1, -1)
        scores[: max(0, q + 1 - window)] = -np.inf
        shares = np.exp(scores - scores.max())
        mixed[b, q, h] = shares @ value[b, : q + 1, shared] / shares.sum()
    return mixed


def inputs(dtype: str) -> list[jax.Array]:
    shapes = [(BATCH, LENGTH, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    keys = jax.random.split(jax.random.key(0), 3)
    return [
        jax.random.normal(key, shape).astype(dtype) for key, shape in zip(keys, shapes, strict=True)
    ]


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-6), ("bfloat16", 1e-2)])
@pytest.mark.parametrize(
    ("scoring", "window"),
    [
        (ScoreTransform(0.5), LENGTH),
        (ScoreTransform(0.5, slopes=tuple(alibi_slopes(HEADS))), LENGTH),
        (ScoreTransform(0.3, cap=0.7), 3),
    ],
    ids=["plain", "alibi", "capped in a window"],
)
def test_attention_equals_one_query_at_a_time(scoring, window, dtype, tolerance):
    arrays = inputs(dtype)
    want = reference(*(np.asarray(x, np.float64) for x in arrays), scoring, window)
    got = dot_product_attention(
        *arrays, scoring, None if window == LENGTH else jax.numpy.int32(window)
    )
    assert got.dtype == dtype
    np.testing.assert_allclose(np.asarray(got, np.float64), want, atol=tolerance)


def test_no_position_sees_a_later_one():
    query, key, value = inputs("float32")
    before = dot_product_attention(query, key, value)
    after = dot_product_attention(query, key.at[:, 5:].set(7.0), value.at[:, 5:].set(-7.0))
    np.testing.assert_array_equal(before[:, :5], after[:, :5])
    assert not np.allclose(before[:, 5:], after[:, 5:])
