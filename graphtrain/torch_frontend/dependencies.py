"""Inputs on which the results of a function of weights, tokens and a random key depend."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
from jax.interpreters.partial_eval import dce_jaxpr


@dataclass(frozen=True)
class Dependencies:
    """Inputs that the results of a function depend on."""

    weights: frozenset[str]
    tokens: bool
    key: bool
    results: list[Any]  # shapes and dtypes of the results


def find_dependencies(
    function: Callable[..., Any], arrays: Mapping[str, Any], tokens: Any, key: Any
) -> Dependencies:
    """Trace a function of weights by path, tokens and a key, and find what its results depend on.

    An operation is taken to depend on all of its inputs, except that a loop depends only on those
    that its results need.
    """
    program, results = jax.make_jaxpr(function, return_shape=True)(dict(arrays), tokens, key)
    _, used = dce_jaxpr(program.jaxpr, [True] * len(program.jaxpr.outvars))
    *weights, uses_tokens, uses_key = used
    names = [name for name, is_used in zip(sorted(arrays), weights, strict=True) if is_used]
    return Dependencies(frozenset(names), uses_tokens, uses_key, jax.tree.leaves(results))
