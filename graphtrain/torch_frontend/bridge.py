"""The torchax environment in which modules are traced.

Operations that torchax would silently compute wrongly are corrected or refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.ad_checkpoint import checkpoint_name
from torch.utils import _pytree as pytree
from torchax.tensor import Environment as TorchaxEnvironment
from torchax.tensor import Tensor

from graphtrain.config.schema import AttentionImplementation
from graphtrain.errors import ImportedModelError
from graphtrain.models.attention.kv_cache import cache_rows
from graphtrain.models.attention.score_mods import ScoreTransform
from graphtrain.models.decoder import embedding_lookup
from graphtrain.models.matmul import dot
from graphtrain.models.projection import PROJECTION
from graphtrain.torch_frontend import private_torch
from graphtrain.torch_frontend.adapted_parameter import AdaptedTensor, is_adapted
from graphtrain.torch_frontend.attention import (
    causal_attention,
    dense_attention,
    feature_needing_native_attention,
)
from graphtrain.torch_frontend.quantized_modules import ModuleNames
from graphtrain.torch_frontend.random_operations import override_random_operations
from lowering.tracing.constrain import constrain, in_shard_map

# Operations of several tensors, some of which may be scalars (0-dimensional).
_PROMOTING = (
    *("add", "sub", "rsub", "mul", "div", "truediv", "true_divide", "pow", "maximum", "minimum"),
    *("where", "masked_fill"),
)


def _name(func: Any) -> str:
    """Return the operation's name: "mul" of torch.mul, "rsub" of Tensor.__rsub__."""
    return getattr(func, "__name__", "").partition(".")[0].strip("_")


class TraceEnvironment(TorchaxEnvironment):
    """torchax's environment, with PyTorch's no_grad and dtype promotion and own attention."""

    def __init__(
        self,
        dtype: str = "float32",
        vocab: int | None = None,
        remat: str = "none",
        unroll: int = 1,
        how: AttentionImplementation = "auto",
    ) -> None:
        """Register the operations.

        Args:
            dtype: of the computation; the token embedding may still be float32.
            vocab: rows of the token embedding.
            remat: activation checkpointing of the model.
            unroll: number of blocks per iteration of the scan over blocks.
            how: attention implementation: "auto", "flash" or "dense".
        """
        super().__init__()
        self.computes_in, self._vocab = dtype, vocab
        self._remat, self._unroll = remat, unroll
        self._attention: AttentionImplementation = how
        self.module_names = ModuleNames()
        self.native_attention_calls = 0  # number of calls of the native attention
        self._zero_placeholders: list[jax.Array] = []
        self.override_op_definition(torch.nn.functional.embedding, self._embedding)
        for operation in (
            torch.nn.functional.scaled_dot_product_attention,
            torch.ops.aten.scaled_dot_product_attention,
        ):
            self.override_op_definition(operation, self._attend)
        self.override_op_definition(torch.nn.functional.linear, self._linear)
        self.override_op_definition(torch.addmm, self._addmm)
        self.override_op_definition(torch.ops.aten.erfinv_, _erfinv_in_place)
        override_random_operations(self)

    def dispatch(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Run one operation; stop gradients under no_grad, which torchax ignores."""
        try:
            result = super().dispatch(func, types, args, kwargs)
        except TypeError as error:
            if "incompatible shapes" not in str(error):
                raise
            # PyTorch would replace a TypeError of an operator by one without the shapes.
            raise ValueError(str(error)) from error
        if _name(func) in _PROMOTING:
            result = self._with_torch_promotion(args, result)
        if torch.is_grad_enabled():
            return result
        argument_ids = {id(leaf) for leaf in pytree.tree_leaves((args, kwargs))}

        def without_gradient(tensor: Tensor) -> Tensor:
            array = tensor.jax()
            # An operation may return its input, as .float() of a float32 tensor does.
            if id(tensor) in argument_ids or not jnp.issubdtype(array.dtype, jnp.floating):
                return tensor
            return Tensor(jax.lax.stop_gradient(array), self)

        result = pytree.tree_map(private_torch.stop_slice_gradient, result)
        return pytree.tree_map_only(Tensor, without_gradient, result)

    def _with_torch_promotion(self, args: Any, result: Any) -> Any:
        """Cast a result to the dtype of the operands that have dimensions, as PyTorch does.

        JAX promotes bfloat16 times a 0-dimensional float32 to float32, and all results after it.
        """
        operands = [arg.jax() for arg in args if private_torch.is_traced(arg)]
        floats = [array.dtype for array in operands if jnp.issubdtype(array.dtype, jnp.floating)]
        wide = [array.dtype for array in operands if array.ndim and array.dtype in floats]
        if not wide or not isinstance(result, Tensor) or len({*floats}) == 1:
            return result
        array, dtype = result.jax(), jnp.result_type(*wide)
        floating = jnp.issubdtype(array.dtype, jnp.floating)
        return Tensor(array.astype(dtype), self) if floating else result

    @contextmanager
    def without_kernels(self) -> Iterator[None]:
        """Disable attention kernels inside, where a trace needs only shapes."""
        previous, self._attention = self._attention, "dense"
        try:
            yield
        finally:
            self._attention = previous

    def wrap(self, tree: Any) -> Any:
        """Wrap a tree of JAX arrays, or adapted parameters, as torch tensors."""

        def tensor(leaf: Any) -> Tensor:
            if is_adapted(leaf):
                return AdaptedTensor(leaf, self, self.computes_in)
            return Tensor(leaf, self)

        return jax.tree.map(tensor, tree, is_leaf=is_adapted)

    def array_or_zeros(self, array: jax.Array | jax.ShapeDtypeStruct) -> jax.Array:
        """Return the array, or zeros if only its shape is given."""
        if isinstance(array, jax.ShapeDtypeStruct):
            array = jnp.zeros(array.shape, array.dtype)
            self._zero_placeholders.append(array)
        return array

    def constant(self, tensor: torch.Tensor) -> Tensor:
        """Return the values of a PyTorch tensor as a constant of the traced program."""
        return Tensor(jnp.asarray(to_numpy(tensor)), self)

    def _embedding(
        self,
        input: Tensor,
        weight: Tensor,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        **_: Any,
    ) -> Tensor:
        """Look up rows of an embedding; the row of padding_idx gets no gradient."""
        if max_norm is not None:
            raise ImportedModelError(
                "torch.nn.Embedding with max_norm changes its weights in the forward pass, which "
                "cannot be traced; remove max_norm"
            )
        table = weight.jax()
        if any(table is placeholder for placeholder in self._zero_placeholders):
            # XLA's partitioner crashes on a lookup inside a shard_map, even unused (jax 0.11.2).
            return Tensor(jnp.zeros((*input.shape, table.shape[1]), self.computes_in), self)
        if padding_idx is not None:
            row = jnp.arange(table.shape[0])[:, None] == padding_idx % table.shape[0]
            table = jnp.where(row, jax.lax.stop_gradient(table), table)
        tokens = input.jax()
        if table.shape[0] != self._vocab or tokens.ndim != 2:  # for example positions
            # While decoding, positions of prompt padding may be past the end of the table.
            mode = None if cache_rows() is None else "clip"
            return Tensor(jnp.take(table, tokens, axis=0, mode=mode), self)
        rows = jnp.asarray(embedding_lookup(table, tokens, self.computes_in, in_shard_map()))
        return Tensor(constrain(rows, "batch", "seq", "embed"), self)

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return self._project(input, weight, bias, "oi")

    def _addmm(
        self, input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1
    ) -> Tensor:
        product = self._project(mat1, mat2, None, "io").jax()
        return Tensor(beta * input.jax() + alpha * product, self)

    def _project(self, x: Tensor, weight: Tensor, bias: Tensor | None, order: str) -> Tensor:
        """Multiply by a weight matrix; the name lets remat = "dots" save the product."""
        leading = "abcdefgh"[: x.ndim - 1]
        equation = f"{leading}i,{order}->{leading}o"
        is_head = weight.shape[order.index("o")] == self._vocab

        def multiply(x: jax.Array, array: jax.Array) -> jax.Array:
            product = self.module_names.quantized(equation, x, array, is_head=is_head)
            return dot(equation, x, array) if product is None else product

        if isinstance(weight, AdaptedTensor):
            product = weight.multiplied(x.jax(), order, multiply)
        else:
            product = multiply(x.jax(), weight.jax())
        product = checkpoint_name(product, PROJECTION)
        return Tensor(product if bias is None else product + bias.jax(), self)

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if query.ndim != 4:
            raise ImportedModelError(
                "scaled_dot_product_attention supports (batch, heads, seq, head_dim), not "
                f"{tuple(query.shape)}"
            )
        if key.shape[1] not in (query.shape[1], 1) and not enable_gqa:
            raise ImportedModelError(
                f"scaled_dot_product_attention got {query.shape[1]} query heads and {key.shape[1]} "
                "key heads; set enable_gqa = True for grouped-query attention"
            )
        return self.attend(
            *(query, key, value, scale), causal=is_causal, mask=attn_mask, dropout=dropout_p
        )

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float | None,
        *,
        causal: bool,
        mask: Tensor | None = None,
        window: int | None = None,
        cap: float | None = None,
        dropout: float = 0.0,
    ) -> Tensor:
        """Compute plain causal attention as the native decoder does, any other with dense scores.

        Args:
            query: (batch, heads, queries, head_dim).
            key: (batch, kv_heads, keys, head_dim).
            value: (batch, kv_heads, keys, value_dim).
            scale: of the products; None: 1 / sqrt(head_dim).
            causal: whether to apply a causal mask.
            mask: bool or additive, broadcastable to (batch, heads, queries, keys).
            window: sliding window in tokens; None: unlimited.
            cap: soft cap of attention scores.
            dropout: probability of dropping an attention weight.

        Raises:
            ImportedModelError: the attention is not plain causal, and the program requires it.
        """
        arrays = query.jax(), key.jax(), value.jax()
        scale = float(query.shape[-1] ** -0.5) if scale is None else scale
        if causal and mask is None and not dropout and query.shape[2] == key.shape[2]:
            self.native_attention_calls += 1
            scoring = ScoreTransform(scale, cap)
            attn_out = causal_attention(
                *arrays, scoring, window, self._remat, self._unroll, how=self._attention
            )
            return Tensor(attn_out, self)
        if feature := feature_needing_native_attention():
            unsupported = "dropout" if dropout else "a mask, a bias, or is_causal = False"
            raise ImportedModelError(
                f"{feature} requires plain causal attention; the attention of this module has "
                f"{unsupported}"
            )
        mask_array = None if mask is None else mask.jax()
        if window is not None:
            distance = jnp.arange(query.shape[2])[:, None] - jnp.arange(key.shape[2])
            mask_array = distance < window
        dropout_key = self.get_and_rotate_prng_key() if dropout else None
        return Tensor(
            dense_attention(*arrays, mask_array, dropout, causal, scale, dropout_key, cap), self
        )


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """Return the values of a tensor as a NumPy array; bfloat16 stays bfloat16 (ml_dtypes)."""
    if tensor.dtype == torch.bfloat16:
        return np.asarray(tensor.detach().float().numpy(), jnp.bfloat16)
    return tensor.detach().numpy()


def _erfinv_in_place(tensor: Tensor) -> Tensor:
    """Replace values by their inverse error function; torchax lacks it, initial values use it."""
    return tensor.apply_jax_(jax.scipy.special.erfinv)
