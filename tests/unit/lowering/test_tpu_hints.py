import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lowering.machine.target import Target
from lowering.tracing.current_target import trace_for_target
from lowering.tracing.tpu_hints import cast_where_used, merge_heads

TPU = Target.parse("v5e:2x4")


def test_weights_of_tpus_are_cast_where_used_to_the_same_values():
    bits = np.random.default_rng(0).integers(0, 2**32, 4096, dtype=np.uint32)
    halfway = np.arange(256, dtype=np.uint32) << 16 | 0x3F808000
    x = jnp.asarray(np.concatenate([bits, halfway]).view(np.float32))
    with trace_for_target(TPU):
        got = cast_where_used(x, jnp.bfloat16)
    np.testing.assert_array_equal(
        np.asarray(got, np.float32), np.asarray(x.astype(jnp.bfloat16), np.float32)
    )


@pytest.mark.parametrize(
    ("target", "dtype", "wanted", "is_marked"),
    [
        (TPU, "float32", "bfloat16", True),
        (TPU, "bfloat16", "bfloat16", False),
        (TPU, "float32", "float32", False),
        (Target.parse("h100:8"), "float32", "bfloat16", False),
    ],
    ids=str,
)
def test_only_float32_that_tpus_multiply_in_bfloat16_is_marked(target, dtype, wanted, is_marked):
    with trace_for_target(target):
        traced = jax.make_jaxpr(lambda x: cast_where_used(x, wanted))(jnp.zeros(8, dtype))
    assert ("reduce_precision" in str(traced)) == is_marked


def test_heads_that_tpus_would_pad_are_merged():
    narrow, wide = jnp.zeros((2, 8, 4, 64)), jnp.zeros((2, 8, 4, 128))
    with trace_for_target(TPU):
        assert merge_heads(narrow).shape == (2, 8, 256)
        assert merge_heads(wide).shape == wide.shape
    with trace_for_target(Target.parse("h100:8")):
        assert merge_heads(narrow).shape == narrow.shape
