"""Regions: parts of a graph for which some targets have a fused operator.

A region is traced as ordinary operations between two marks, one for its inputs and one for its
outputs. Every compiler can compile it; a backend with a fused operator finds the marks and replaces
the region. Marks are optimization barriers with attributes, which XLA's partitioner preserves
(jaxlib 0.10, 0.11).
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

from lowering.tracing.context import set_context_variable
from lowering.tracing.region_marks import ENTRY, EXIT, SETTINGS

_wanted: ContextVar[frozenset[str]] = ContextVar("regions", default=frozenset())


def enable_regions(*names: str) -> AbstractContextManager[Any]:
    """Enable the marks of these regions in code traced inside the block."""
    return set_context_variable(_wanted, frozenset(names))


def is_region_enabled(name: str) -> bool:
    """Return whether marks of this region are enabled for the target being traced for."""
    return name in _wanted.get()


def mark_region(
    name: str,
    function: Callable[..., Sequence[jax.Array]],
    *arrays: jax.Array,
    settings: dict[str, Any],
) -> tuple[jax.Array, ...]:
    """Call a function as a marked region and return its results.

    Args:
        name: name of the region.
        function: function of `arrays`; it must not capture other arrays.
        arrays: inputs of the region.
        settings: further attributes of the operator; JSON values.
    """
    settings_json = json.dumps(settings, sort_keys=True)

    def marked(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        with set_xla_metadata(**{ENTRY: name}):
            arrays = jax.lax.optimization_barrier(arrays)
        results = tuple(function(*arrays))
        with set_xla_metadata(**{EXIT: name, SETTINGS: settings_json}):
            return jax.lax.optimization_barrier(results)

    # JAX hoists values that do not depend on the layer, such as a mask, out of a scan over layers;
    # custom_vmap prevents this for the region.
    closed = custom_vmap(marked)

    @closed.def_vmap
    def _(size: int, batched: Sequence[bool], *arrays: jax.Array) -> tuple[Any, Any]:
        del size
        results = jax.vmap(marked, [0 if is_batched else None for is_batched in batched])(*arrays)
        return results, tuple(True for _ in results)

    return closed(*arrays)
