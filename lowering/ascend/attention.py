"""Attention by MindSpore's fused operators, which do not store attention scores.

Source: mindspore 2.10.0, mindspore.ops.auto_generate.gen_ops_prim, FlashAttentionScore and
FlashAttentionScoreGrad: inputs, settings, limits and results. Their order and the ids of layouts
are those that mindspore.export writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from lowering.ascend.emitter import Emitter
from lowering.ascend.mindir import TensorInfo
from lowering.ascend.regions import Region
from lowering.ascend.values import ArrayValue, Shape, constant_value

_UNLIMITED_TOKENS = 2147483647  # tokens: no limit
_BSND = 3  # the layout (batch, seq, heads, head_dim)
_STATISTIC_COPIES = 8  # copies of each statistic of a softmax
_TRIANGLE = 2048  # side of the mask that represents a triangle or band of any size
_GIVEN, _CAUSAL, _BAND = 0, 2, 4  # sparse_mode
_HEADS, _HEAD_DIM = 256, 512  # maxima of the operators


class FusedAttention:
    """Writer of attention regions; caches the masks that they share."""

    def __init__(self, emit: Emitter) -> None:
        self._emit = emit
        self.masks: dict[Any, ArrayValue] = {}  # of the current graph
        self.refusals: list[str] = []  # why regions were not replaced by fused operators

    def write_region(
        self, region: Region, operands: Sequence[ArrayValue]
    ) -> tuple[ArrayValue, ...] | None:
        """Return the results of a region, or None if the operators do not support it."""
        backward = region.name == "attention_gradient"
        backward_inputs, arrays = (operands[:4], operands[4:]) if backward else ((), operands)
        hidden = dict(zip(region.settings["hiding"], arrays[3:], strict=True))
        reason = _unsupported_reason(arrays[:3], backward_inputs, hidden.get("window"))
        if reason:
            self.refusals.append(reason)
            return None
        query, key, value = arrays[:3]
        mask, settings = self._mask_settings(query.shape, hidden)
        settings = [query.shape[2], 1.0, region.settings["scale"], *settings]
        if backward:
            return self._backward(query, key, value, backward_inputs, mask, settings)
        return self._forward(query, key, value, mask, settings)

    def _forward(
        self,
        query: ArrayValue,
        key: ArrayValue,
        value: ArrayValue,
        mask: ArrayValue,
        settings: Sequence[Any],
    ) -> tuple[ArrayValue, ...]:
        """Return the attention output, and the maximum score and the sum of each softmax."""
        statistic = TensorInfo(_statistic(query.shape), "f32")
        unused, output = TensorInfo((1,), query.dtype), TensorInfo(query.shape, query.dtype)
        inputs = [query, key, value, None, None, None, mask, None, None, None, *settings]
        results = self._emit.apply_multi(
            "FlashAttentionScore", inputs, [statistic, statistic, unused, output]
        )
        return results[3], results[0], results[1]

    def _backward(
        self,
        query: ArrayValue,
        key: ArrayValue,
        value: ArrayValue,
        backward_inputs: Sequence[ArrayValue],
        mask: ArrayValue,
        settings: Sequence[Any],
    ) -> tuple[ArrayValue, ...]:
        """Return the gradients of query, key and value.

        `backward_inputs` are the gradient of the output and the results of the forward pass.
        """
        gradient, output, softmax_max, softmax_sum = backward_inputs
        unused = constant_value(np.zeros((1,), np.float32), "f32")
        softmax_output = self._emit.cast(unused, query.dtype)  # placeholder: it is not stored
        inputs = [
            query,
            key,
            value,
            gradient,
            None,
            None,
            None,
            mask,
            softmax_max,
            softmax_sum,
            softmax_output,
            output,
        ]
        tensors = [TensorInfo(x.shape, x.dtype) for x in (query, key, value)]
        results = self._emit.apply_multi(
            "FlashAttentionScoreGrad",
            [*inputs, None, None, None, *settings],
            [*tensors, TensorInfo((0,), query.dtype)],
        )
        return results[:3]

    def _mask_settings(
        self, shape: Shape, hidden: dict[str, ArrayValue]
    ) -> tuple[ArrayValue, list[int]]:
        """Return the mask and pre_tokens, next_tokens, inner_precise, input_layout, sparse_mode."""
        length, window = shape[1], hidden.get("window")
        pre_tokens = _UNLIMITED_TOKENS
        if window is not None and window.data is not None and int(window.data) < length:
            pre_tokens = int(window.data) - 1
        if "documents" in hidden:
            mode, mask = _GIVEN, self._by_document(hidden["documents"])
        else:
            mode, mask = (
                _CAUSAL if pre_tokens == _UNLIMITED_TOKENS else _BAND,
                self._triangle(_TRIANGLE),
            )
        return mask, [pre_tokens, 0, 0, _BSND, mode]

    def _triangle(self, length: int) -> ArrayValue:
        """Return the causal mask, true where a key is after the query: (query, key)."""
        if length not in self.masks:
            positions = np.arange(length, dtype=np.int32)
            keys, queries = (
                constant_value(positions[None], "s32"),
                constant_value(positions[:, None], "s32"),
            )
            self.masks[length] = self._emit.compare("Greater", keys, queries)
        return self.masks[length]

    def _by_document(self, segment_ids: ArrayValue) -> ArrayValue:
        """Return the causal mask within documents, true where a key is hidden from the query.

        `segment_ids` has shape (batch, seq); the mask is (batch, 1, query, key).
        """
        emit, name = self._emit, self._emit.node(segment_ids)
        if name not in self.masks:
            batch, length = segment_ids.shape
            different_segment = emit.compare(
                "NotEqual",
                emit.reshape(segment_ids, (batch, 1, length, 1)),
                emit.reshape(segment_ids, (batch, 1, 1, length)),
            )
            causal_mask = emit.reshape(self._triangle(length), (1, 1, length, length))
            self.masks[name] = emit.logical_or(different_segment, causal_mask)
        return self.masks[name]


def _unsupported_reason(
    arrays: Sequence[ArrayValue], backward_inputs: Sequence[ArrayValue], window: ArrayValue | None
) -> str | None:
    """Return why the operators do not support the arrays; None if they do."""
    query, key, value = arrays
    if {x.dtype for x in arrays} != {"bf16"}:
        return f"attention in {query.dtype}; the operator supports bf16 only"
    if len(query.shape) != 4 or key.shape != value.shape:
        return f"attention with unsupported shapes: query {query.shape}, key {key.shape}"
    batch, length, heads, head_dim = query.shape
    if key.shape[:2] != (batch, length) or key.shape[3] != head_dim or heads % key.shape[2]:
        return f"attention with unsupported shapes: query {query.shape}, key {key.shape}"
    if head_dim % 16 or head_dim > _HEAD_DIM or heads > _HEADS:
        return (
            f"attention with {heads} heads of size {head_dim}; the operator supports up to "
            f"{_HEADS} heads, with a size that is a multiple of 16 up to {_HEAD_DIM}"
        )
    if window is not None and window.data is None:
        return "a sliding window that is known only at run time"
    shapes = [query.shape] * 2 + [_statistic(query.shape)] * 2
    if backward_inputs and [x.shape for x in backward_inputs] != shapes:
        return "a gradient that is sharded differently from the attention output"
    return None


def _statistic(shape: Shape) -> Shape:
    batch, length, heads, _ = shape
    return batch, heads, length, _STATISTIC_COPIES
