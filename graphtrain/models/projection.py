"""project: a matrix product with a parameter, and its bias."""

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from graphtrain.models.dot import dot

PROJECTION = "projection"


def project(module: nnx.Module, name: str, equation: str, x: jax.Array) -> jax.Array:
    """Multiply x by a parameter of the module; add the parameter name_bias where there is one.

    The product is marked, so that remat = "dots" can keep it.
    """
    weight = getattr(module, name)[...]
    y = checkpoint_name(dot(equation, x, weight), PROJECTION)
    bias = getattr(module, f"{name}_bias", None)
    return y if bias is None else y + bias[...].astype(y.dtype)
