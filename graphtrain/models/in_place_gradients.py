"""Programs that add the gradients of their layers in place; imports no JAX."""

from __future__ import annotations

from graphtrain.config.resolve import ResolvedProgram
from graphtrain.config.schema import is_imported


def adds_in_place(program: ResolvedProgram) -> bool:
    """Return whether layers add their gradients to the sums of earlier microbatches in place.

    Imported models stack their layers while they are traced, and the factors of LoRA are small.
    """
    is_native = not is_imported(program.model) and not program.stands_for_imported
    return is_native and program.adapter is None
