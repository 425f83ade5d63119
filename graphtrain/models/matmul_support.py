"""Dtype in which products of served models are computed, by processor; imports no JAX."""

from lowering.machine import host

# Measured on two cores of a Xeon without AMX, a product with 2048 x 768 weights of bfloat16, and
# with converted ones: 8 rows 0.6 and 1.2 ms, 32 rows both 1.9 ms, 64 rows 2.6 and 2.3 ms, 128 rows
# 5.2 and 3.4 ms, 320 rows 12.6 and 7.3 ms.
_FEWEST_ROWS = 96


def converts_weights(rows: int) -> bool:
    """Return whether this CPU converts bfloat16 weights to float32 to multiply so many rows."""
    return rows >= _FEWEST_ROWS and not host.has_fast_bfloat16()
