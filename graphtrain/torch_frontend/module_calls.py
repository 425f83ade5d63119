"""Calls of an imported module: what it is given, and the logits in what it returns."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import jax
import torch

from graphtrain.errors import ImportedModelError
from graphtrain.models.attention.ring_order import positions
from graphtrain.torch_frontend.attention import feature_needing_native_attention
from graphtrain.torch_frontend.axes import NamedAxes


def module_logits(
    module: torch.nn.Module, tokens: Any, arguments: Mapping[str, Any], *, is_hf: bool
) -> torch.Tensor:
    """Return a module's logits of tokens.

    Args:
        module: The module.
        tokens: Token ids, (batch, seq).
        arguments: Further arguments, such as position_ids.
        is_hf: Whether it is a model of transformers, whose forward has arguments of known names.

    Raises:
        ImportedModelError: the output contains no logits.
    """
    if is_hf:
        return extract_logits(module(**{"input_ids": tokens, "use_cache": False, **arguments}))
    return extract_logits(module(tokens, **arguments))


def extract_logits(returned: Any) -> torch.Tensor:
    """Return the logits in a module's output: the tensor, .logits, or the first of a tuple.

    Raises:
        ImportedModelError: the output contains none.
    """
    if isinstance(returned, torch.Tensor):
        return returned
    logits = getattr(returned, "logits", None)
    if logits is None and isinstance(returned, tuple | list) and returned:
        logits = returned[0]
    if not isinstance(logits, torch.Tensor):
        raise ImportedModelError(
            f"the module returns {type(returned).__name__}; it should return logits (batch, seq, "
            "vocab), a tuple that begins with them, or an object with .logits"
        )
    return logits


def check_logits(logits: torch.Tensor, tokens: tuple[int, ...], vocab: int | None) -> None:
    """Refuse logits that are not (batch, seq, vocab).

    Args:
        logits: What the module returned.
        tokens: Shape of the tokens, (batch, seq).
        vocab: Size of the vocabulary.

    Raises:
        ImportedModelError: they have another shape.
    """
    expected = (*tokens, vocab)
    if tuple(logits.shape) != expected:
        raise ImportedModelError(
            f"the module returns logits of shape {tuple(logits.shape)} for tokens of shape "
            f"{tuple(tokens)}; with program.model.vocab = {expected[-1]} they should be "
            f"{expected}"
        )


def check_length(
    parameters: Mapping[str, torch.Tensor], axes: Mapping[str, NamedAxes], length: int
) -> None:
    """Refuse sequences longer than a table of positions, which JAX would read out of bounds.

    Args:
        parameters: Parameters of the module, by name.
        axes: Array axes of each.
        length: Number of tokens of a sequence.

    Raises:
        ImportedModelError: a table has fewer rows.
    """
    for name, parameter in parameters.items():
        if "positions" in axes[name].axes:
            rows = parameter.shape[axes[name].axes.index("positions")]
            if length > rows:
                raise ImportedModelError(
                    f"sequences of {length} tokens are longer than {name}, which has {rows} "
                    "rows; lower program.batch.seq_len (program.serve.context_length)"
                )


def position_arguments(module: torch.nn.Module, length: int) -> dict[str, jax.Array]:
    """Return position_ids if tokens are not at positions 0, 1, 2, ...; else nothing.

    Raises:
        ImportedModelError: the module does not accept position_ids.
    """
    feature = feature_needing_native_attention()
    if feature is None:
        return {}
    if "position_ids" not in inspect.signature(module.forward).parameters:
        name = type(module).__name__
        if getattr(module, "_is_stateful", False):  # as transformers marks Mamba
            raise ImportedModelError(
                f"{feature} is implemented for attention alone, but {name} carries a state "
                "from token to token (a state space model or another recurrence)"
            )
        raise ImportedModelError(
            f"{feature} requires a module whose forward accepts position_ids, but that of "
            f"{name} does not"
        )
    position_ids = positions(length)
    return {"position_ids": position_ids if position_ids.ndim == 2 else position_ids[None]}
