"""Matrix product with a parameter of a module, and its bias."""

from collections.abc import Callable, Sequence

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from graphtrain.models.lora.layers import multiply, multiply_many
from graphtrain.models.quantized_matmul import quantization_of
from lowering.tracing import source_lines
from lowering.tracing.tpu_hints import merge_heads

source_lines.report_callers(__file__)

PROJECTION = "projection"

MultiplyMany = Callable[[str, jax.Array, list[jax.Array]], list[jax.Array]]


def project(module: nnx.Module, name: str, equation: str, x: jax.Array) -> jax.Array:
    """Multiply x by the module's parameter `name`; add the parameter `{name}_bias` if it exists.

    The product is named by checkpoint_name, so that remat = "dots" can save it.
    """
    with jax.named_scope(name):
        y = multiply(equation, x, getattr(module, name).get_value(), quantization_of(name))
    return _finish(module, name, equation, y)


def project_many(
    module: nnx.Module,
    names: Sequence[str],
    equation: str,
    x: jax.Array,
    multiply: MultiplyMany = multiply_many,
) -> list[jax.Array]:
    """Apply project for several parameters that multiply the same x.

    Args:
        module: Module of the parameters.
        names: Names of the parameters.
        equation: Einsum equation of x and a parameter.
        x: First operand.
        multiply: Computes the products, unless they are in 8 bits.
    """
    if any(quantization_of(name) for name in names):
        return [project(module, name, equation, x) for name in names]
    with jax.named_scope("+".join(names)):
        products = multiply(equation, x, [getattr(module, name).get_value() for name in names])
    return [_finish(module, name, equation, y) for name, y in zip(names, products, strict=True)]


def _finish(module: nnx.Module, name: str, equation: str, product: jax.Array) -> jax.Array:
    saved = merge_heads(product) if equation.endswith("hd") else product
    y = checkpoint_name(saved, PROJECTION).reshape(product.shape)
    bias = getattr(module, f"{name}_bias", None)
    return y if bias is None else y + bias[...].astype(y.dtype)
