"""Attention implementation that models of transformers call (attn_implementation).

transformers calls the implementation for the mask and for attention. For a causal mask, with or
without a sliding window, this one returns a marker instead of an array, so that no mask is
materialised.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torchax.tensor import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import (
    and_masks,
    causal_mask_function,
    packed_sequence_mask_function,
    remap_positions_for_packed_sequence,
    sdpa_mask,
    sliding_window_causal_mask_function,
)

from graphtrain.errors import ImportedModelError
from graphtrain.torch_frontend import private_torch

IMPLEMENTATION = "graphtrain"
# Of models whose attention is not that of the interface: sparse attention, as of DeepSeek-V3.2,
# changes the values of the mask; Inkling adds a bias to the scores.
_OWN_ATTENTION = "attention_mask.dtype", "position_bias=position_bias"


@dataclass(frozen=True)
class CausalMask:
    """Marker in place of a causal mask."""

    window: int | None = None  # sliding window in tokens; None: unlimited


def register() -> None:
    """Register the implementation with transformers under the name in IMPLEMENTATION."""
    AttentionInterface.register(IMPLEMENTATION, _attention)
    AttentionMaskInterface.register(IMPLEMENTATION, _mask)


def uses_attention_interface(kind: Any, config: Any) -> bool:
    """Return true if a model class calls the implementation for all of its attention."""
    source = inspect.getsource(sys.modules[kind.__module__])
    if any(text in source for text in _OWN_ATTENTION):
        return False
    capped = getattr(config, "attn_logit_softcapping", None) is not None
    return private_torch.accepts_attention(kind) and (private_torch.supports_sdpa(kind) or capped)


def _mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Callable = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    **kwargs: Any,
) -> CausalMask | torch.Tensor | None:
    causal = causal_mask_function
    if local_size is not None:
        causal = sliding_window_causal_mask_function(local_size)
    # transformers takes position_ids that do not count up for packed sequences, and adds a mask. It
    # is not needed: such position_ids come from graphtrain, whose attention knows the segments.
    same_sequence = packed_sequence_mask_function(_ANYTHING)
    in_sequence = remap_positions_for_packed_sequence(causal, _ANYTHING)
    packed_causal = and_masks(in_sequence, same_sequence)
    if attention_mask is None and (
        _same_function(mask_function, causal) or _same_function(mask_function, packed_causal)
    ):
        return CausalMask(local_size)
    return sdpa_mask(
        *(batch_size, q_length, kv_length),
        mask_function=mask_function,
        attention_mask=attention_mask,
        local_size=local_size,
        **kwargs,
    )


_ANYTHING: Any = ...  # matches any value in _same_function


def _same_function(function: Any, expected: Any) -> bool:
    """Return true if two functions have the same code and equal closure values."""
    if expected is _ANYTHING:
        return True
    if isinstance(expected, tuple):
        return len(function) == len(expected) and all(map(_same_function, function, expected))
    if not hasattr(expected, "__code__"):
        return function == expected
    return getattr(function, "__code__", None) is expected.__code__ and all(
        _same_function(cell.cell_contents, expected_cell.cell_contents)
        for cell, expected_cell in zip(
            function.__closure__ or (), expected.__closure__ or (), strict=True
        )
    )


def _attention(
    module: torch.nn.Module,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: CausalMask | Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    for name in ("s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise ImportedModelError(
                f"{type(module).__name__} passes {name} to attention, which is not supported"
            )
    has_causal_marker = isinstance(attention_mask, CausalMask)
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    if not isinstance(query, Tensor):
        attn_out = _torch_attention(
            query, key, value, attention_mask, causal, dropout, scaling, softcap
        )
        return attn_out.transpose(1, 2), None
    environment: Any = private_torch.environment_of(query)
    attn_out = environment.attend(
        *(query, key, value, scaling),
        causal=has_causal_marker or (attention_mask is None and causal and query.shape[2] > 1),
        mask=None if has_causal_marker else attention_mask,
        window=attention_mask.window if has_causal_marker else None,
        cap=softcap,
        dropout=dropout,
    )
    return attn_out.transpose(1, 2), None


def _torch_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: CausalMask | torch.Tensor | None,
    causal: bool,
    dropout: float,
    scale: float | None,
    cap: float | None,
) -> torch.Tensor:
    """Compute the same attention by PyTorch operations, for the strict front end."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    visible = mask if isinstance(mask, torch.Tensor) else None
    if isinstance(mask, CausalMask) or (mask is None and causal):
        positions = torch.arange(query.shape[2], device=query.device)
        distance = positions[:, None] - positions
        visible = distance >= 0
        if isinstance(mask, CausalMask) and mask.window is not None:
            visible = visible & (distance < mask.window)
    if visible is not None and visible.dtype != torch.bool:
        scores = scores + visible
        visible = scores > -torch.inf
    if visible is not None:
        scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
    attn_weights = torch.softmax(scores, -1, dtype=torch.float32)
    if visible is not None:  # zeros for a query that attends to no key
        attn_weights = attn_weights.masked_fill(~visible, 0)
    return torch.nn.functional.dropout(attn_weights.to(value.dtype), dropout) @ value
