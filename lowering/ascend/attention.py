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
        self, region: Region, given: Sequence[ArrayValue]
    ) -> tuple[ArrayValue, ...] | None:
        """Return the results of a region, or None if the operators do not support it."""
        backward = region.name == "attention_gradient"
        before, arrays = (given[:4], given[4:]) if backward else ((), given)
        hidden = dict(zip(region.settings["hiding"], arrays[3:], strict=True))
        reason = _unsupported_reason(arrays[:3], before, hidden.get("window"))
        if reason:
            self.refusals.append(reason)
            return None
        query, key, value = arrays[:3]
        mask, settings = self._hiding(query.shape, hidden)
        settings = [query.shape[2], 1.0, region.settings["scale"], *settings]
        if backward:
            return self._backward(query, key, value, before, mask, settings)
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
        unused, mixed = TensorInfo((1,), query.dtype), TensorInfo(query.shape, query.dtype)
        inputs = [query, key, value, None, None, None, mask, None, None, None, *settings]
        results = self._emit.apply_multi(
            "FlashAttentionScore", inputs, [statistic, statistic, unused, mixed]
        )
        return results[3], results[0], results[1]

    def _backward(
        self,
        query: ArrayValue,
        key: ArrayValue,
        value: ArrayValue,
        before: Sequence[ArrayValue],
        mask: ArrayValue,
        settings: Sequence[Any],
    ) -> tuple[ArrayValue, ...]:
        """Return the gradients of query, key and value.

        `before` contains the gradient of the attention output, and the results of the forward pass.
        """
        gradient, mixed, highest, total = before
        unused = constant_value(np.zeros((1,), np.float32), "f32")
        shares = self._emit.cast(unused, query.dtype)  # of the softmax, which is not stored
        inputs = [
            query,
            key,
            value,
            gradient,
            None,
            None,
            None,
            mask,
            highest,
            total,
            shares,
            mixed,
        ]
        tensors = [TensorInfo(one.shape, one.dtype) for one in (query, key, value)]
        results = self._emit.apply_multi(
            "FlashAttentionScoreGrad",
            [*inputs, None, None, None, *settings],
            [*tensors, TensorInfo((0,), query.dtype)],
        )
        return results[:3]

    def _hiding(self, shape: Shape, hidden: dict[str, ArrayValue]) -> tuple[ArrayValue, list[int]]:
        """Return the mask and pre_tokens, next_tokens, inner_precise, input_layout, sparse_mode."""
        length, window = shape[1], hidden.get("window")
        before = _UNLIMITED_TOKENS
        if window is not None and window.data is not None and int(window.data) < length:
            before = int(window.data) - 1
        if "documents" in hidden:
            mode, mask = _GIVEN, self._by_document(hidden["documents"])
        else:
            mode, mask = (
                _CAUSAL if before == _UNLIMITED_TOKENS else _BAND,
                self._triangle(_TRIANGLE),
            )
        return mask, [before, 0, 0, _BSND, mode]

    def _triangle(self, length: int) -> ArrayValue:
        """Return the causal mask, true where a key is after the query: (query, key)."""
        if length not in self.masks:
            places = np.arange(length, dtype=np.int32)
            keys, queries = (
                constant_value(places[None], "s32"),
                constant_value(places[:, None], "s32"),
            )
            self.masks[length] = self._emit.compare("Greater", keys, queries)
        return self.masks[length]

    def _by_document(self, numbers: ArrayValue) -> ArrayValue:
        """Return the causal mask within documents, true where a key is hidden from the query.

        `numbers` are segment ids, (batch, seq); the mask is (batch, 1, query, key).
        """
        emit, name = self._emit, self._emit.node(numbers)
        if name not in self.masks:
            batch, length = numbers.shape
            other = emit.compare(
                "NotEqual",
                emit.reshape(numbers, (batch, 1, length, 1)),
                emit.reshape(numbers, (batch, 1, 1, length)),
            )
            ahead = emit.reshape(self._triangle(length), (1, 1, length, length))
            self.masks[name] = emit.logical_or(other, ahead)
        return self.masks[name]


def _unsupported_reason(
    arrays: Sequence[ArrayValue], before: Sequence[ArrayValue], window: ArrayValue | None
) -> str | None:
    """Return why the operators do not support the arrays; None if they do."""
    query, key, value = arrays
    if {one.dtype for one in arrays} != {"bf16"}:
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
    if before and [one.shape for one in before] != shapes:
        return "a gradient that is sharded differently from the attention output"
    return None


def _statistic(shape: Shape) -> Shape:
    batch, length, heads, _ = shape
    return batch, heads, length, _STATISTIC_COPIES
