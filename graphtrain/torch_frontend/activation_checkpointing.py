"""Activation checkpointing of the blocks of an imported module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import torch
from torch.utils import _pytree as pytree

from graphtrain.models.projection import PROJECTION
from graphtrain.torch_frontend import private_torch
from graphtrain.torch_frontend.bridge import Tensor, TraceEnvironment


def checkpoint(
    function: Callable[..., Any], remat: str, *, prevent_cse: bool = False
) -> Callable[..., Any]:
    """Return a function whose activations are saved as program.model.remat says."""
    if remat in ("none", "attention"):  # attention recomputes its scores by itself
        return function
    policies = jax.checkpoint_policies
    policy = {
        "dots": policies.save_only_these_names(PROJECTION),
        "full": policies.nothing_saveable,
    }[remat]
    return jax.checkpoint(function, policy=policy, prevent_cse=prevent_cse)


def checkpointed_forward(
    block: torch.nn.Module, environment: TraceEnvironment, remat: str
) -> Callable[..., Any]:
    """Return the forward of a block that is in no stack, under activation checkpointing."""
    forward = type(block).forward
    if remat in ("none", "attention"):
        return lambda *args, **kwargs: forward(block, *args, **kwargs)

    def replacement(*args: Any, **kwargs: Any) -> Any:
        structure: Any = None
        static_leaves: list[Any] = []

        def run(key: jax.Array, arrays: Any) -> list[jax.Array | None]:
            nonlocal structure, static_leaves
            arguments = pytree.tree_unflatten(
                [
                    leaf if array is None else Tensor(array, environment)
                    for leaf, array in zip(leaves, arrays, strict=True)
                ],
                spec,
            )
            with environment.override_property(prng=key):
                out = forward(block, *arguments[0], **arguments[1])
            flat, structure = pytree.tree_flatten(out)
            static_leaves = [None if private_torch.is_traced(leaf) else leaf for leaf in flat]
            return [leaf.jax() if private_torch.is_traced(leaf) else None for leaf in flat]

        leaves, spec = pytree.tree_flatten((args, kwargs))
        arrays = [leaf.jax() if private_torch.is_traced(leaf) else None for leaf in leaves]
        out = checkpoint(run, remat)(environment.get_and_rotate_prng_key(), arrays)
        flat = [
            static_leaf if array is None else Tensor(array, environment)
            for array, static_leaf in zip(out, static_leaves, strict=True)
        ]
        return pytree.tree_unflatten(flat, structure)

    return replacement
