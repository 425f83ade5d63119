"""Regions: parts of a graph that some target has one operator for.

A region is traced as ordinary arithmetic, between two marks: what goes in and what comes out. Any
compiler understands it; one that has an operator for it finds the marks and writes that instead.
Marks are barriers with attributes, which XLA's partitioner keeps (jaxlib 0.10, 0.11).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

import jax
from jax.custom_batching import custom_vmap
from jax.experimental.xla_metadata import set_xla_metadata

from lowering.tracing.context import scoped
from lowering.tracing.region_marks import ENTRY, EXIT, SETTINGS

_wanted: ContextVar[frozenset[str]] = ContextVar("regions", default=frozenset())


def marked(*names: str) -> AbstractContextManager[Any]:
    """Mark these regions in what is traced inside."""
    return scoped(_wanted, frozenset(names))


def is_marked(name: str) -> bool:
    """Whether the target that is traced for looks for a region."""
    return name in _wanted.get()


def region(
    name: str,
    function: Callable[..., Sequence[jax.Array]],
    *arrays: jax.Array,
    settings: dict[str, Any],
) -> tuple[jax.Array, ...]:
    """What a function returns, as a region.

    Args:
        function: of these arrays and of no other.
        settings: what an operator has to know beside the arrays; plain values.
    """
    written = json.dumps(settings, sort_keys=True)

    def whole(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        with set_xla_metadata(**{ENTRY: name}):
            arrays = jax.lax.optimization_barrier(arrays)
        results = tuple(function(*arrays))
        with set_xla_metadata(**{EXIT: name, SETTINGS: written}):
            return jax.lax.optimization_barrier(results)

    # JAX takes what does not depend on a layer, such as a mask, out of a scan over layers; but not
    # out of this.
    closed = custom_vmap(whole)

    @closed.def_vmap
    def _(size: int, batched: Sequence[bool], *arrays: jax.Array) -> tuple[Any, Any]:
        del size
        results = jax.vmap(whole, [0 if each else None for each in batched])(*arrays)
        return results, tuple(True for _ in results)

    return closed(*arrays)
