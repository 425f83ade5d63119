"""Share of a GPU's memory that a run's arrays can use: the pool of JAX's allocator.

One function says the share to the allocator of a run and to the plan that judges whether a step
fits. Without it JAX reserves 75 % of the memory, and a step that needs more fails.
"""

import os
from collections.abc import Mapping

from lowering.errors import LoweringError

# The rest is for what is allocated outside of the pool: the CUDA context with its libraries, and
# NCCL's communicators and buffers, which hold more the more mesh axes communicate. 90 % was JAX's
# default until 2023 (https://github.com/jax-ml/jax/pull/16724), and 0.9 to 0.95 are common where
# one process has the GPU. All of it cannot be used: https://github.com/jax-ml/jax/issues/17426
# Not measured here on a GPU.
POOL_FRACTION = 0.9
# https://docs.jax.dev/en/latest/201/gpu-memory.html; the second name is deprecated, and jaxlib
# (xla_client.generate_pjrt_gpu_plugin_options) refuses both together.
VARIABLE = "XLA_CLIENT_MEM_FRACTION"
_DEPRECATED = "XLA_PYTHON_CLIENT_MEM_FRACTION"


def pool_fraction(environment: Mapping[str, str] = os.environ) -> float:
    """Return the share of a GPU's memory in the pool: the user's, else POOL_FRACTION.

    Raises:
        LoweringError: the user's is not a positive number.
    """
    name = VARIABLE if environment.get(VARIABLE) else _DEPRECATED
    text = environment.get(name, "")
    if not text:
        return POOL_FRACTION
    try:
        fraction = float(text)
    except ValueError:
        fraction = 0.0
    if not fraction > 0:
        raise LoweringError(f"{name}={text}: the share of a GPU's memory is a number such as 0.9")
    return min(fraction, 1.0)  # more than 1 is host memory


def reserve_pool() -> None:
    """Let JAX's allocator reserve pool_fraction(); without effect once JAX found its GPU plugin."""
    if not os.environ.get(VARIABLE) and not os.environ.get(_DEPRECATED):
        os.environ[VARIABLE] = str(POOL_FRACTION)
