"""Functions of JAX as graphs for MindSpore."""

from collections.abc import Callable

import jax

from lowering.ascend.translate import Translated, translate
from lowering.one_device.normalise import normalise
from lowering.partitioned import partition


def translated(function: Callable, *arguments, native: bool = False) -> Translated:
    """The graph of a function of JAX, for one rank."""
    lowered = jax.jit(function, keep_unused=True).lower(*arguments)
    normalised = normalise(partition(lowered).hlo, name="test", ranks=1)
    return translate(normalised, name="test", ranks=1, native=native, in_place={})
