"""Check the shapes that the models' annotations promise, in every test that calls them."""

import builtins
from collections.abc import Callable
from typing import Any, get_args

import jax
import jaxtyping
import numpy as np
from beartype import beartype

# The models import these names for type checkers only, and jaxtyping takes an annotation that it
# cannot resolve for Any. Tests also pass arrays of NumPy.
NAMES = {
    "Array": jax.Array | np.ndarray,
    "Float": jaxtyping.Float,
    "Int": jaxtyping.Int,
    "UInt8": jaxtyping.UInt8,
}


def install() -> None:
    """Check calls of functions in graphtrain.models; call this before anything imports them."""
    vars(builtins).update(NAMES)
    jaxtyping.install_import_hook("graphtrain.models", "shapes.checked")


def checked(function: Callable) -> Callable:
    """Check arrays against annotated shapes, and leave all other types to pyright."""
    annotations = function.__annotations__
    function.__annotations__ = {
        name: annotation if _has_shape(annotation) else Any
        for name, annotation in annotations.items()
    }
    return beartype(function)


def _has_shape(annotation: Any) -> bool:
    if isinstance(annotation, type) and issubclass(annotation, jaxtyping.AbstractArray):
        return True
    return any(map(_has_shape, get_args(annotation)))
