"""torchax's operations, with what it gets wrong in silence put right or refused."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch.utils.checkpoint
from jax.ad_checkpoint import checkpoint_name
from torch.nn.utils import stateless
from torch.utils import _pytree as pytree
from torchax.tensor import Environment as TorchaxEnvironment
from torchax.tensor import Tensor

from graphtrain.config.schema import AttentionImplementation
from graphtrain.errors import ImportedModelError, NeedsStrict
from graphtrain.models.attention.kv_cache import cache_offset
from graphtrain.models.attention.score_mods import ScoreTransform
from graphtrain.models.decoder import embedding_lookup
from graphtrain.models.matmul import dot
from graphtrain.models.projection import PROJECTION
from graphtrain.torch_frontend.attention import attend, attend_causally, only_native
from graphtrain.torch_frontend.causes import here, innermost, raised
from graphtrain.torch_frontend.functions import apply_function
from graphtrain.torch_frontend.joint import changes_buffer
from lowering.tracing.constrain import by_hand_now, constrain

# Operations of several tensors, each of which may have no dimensions.
_PROMOTING = (
    *("add", "sub", "rsub", "mul", "div", "truediv", "true_divide", "pow", "maximum", "minimum"),
    *("where", "masked_fill"),
)


def _name(func: Any) -> str:
    """Of torch.mul, Tensor.__rmul__ and aten.mul.Tensor the same."""
    return getattr(func, "__name__", "").partition(".")[0].strip("_")


class Environment(TorchaxEnvironment):
    """torchax's, in which a region without gradients has none, and attention is our own."""

    def __init__(
        self,
        dtype: str = "float32",
        vocab: int | None = None,
        remat: str = "none",
        unroll: int = 1,
        how: AttentionImplementation = "auto",
    ) -> None:
        """Args:
        dtype: of the computation; the table of tokens may be float32 all the same.
        vocab: rows of that table.
        remat: what the backward pass computes again.
        unroll: how many blocks are written out in a turn.
        how: whether attention is by a kernel of the target.
        """
        super().__init__()
        self.computes_in, self._vocab = dtype, vocab
        self._remat, self._unroll = remat, unroll
        self._how: AttentionImplementation = how
        self.attended = 0  # times that the native attention was called
        self._unread: list[jax.Array] = []
        self.override_op_definition(torch.nn.functional.embedding, self._embedding)
        for operation in (
            torch.nn.functional.scaled_dot_product_attention,
            torch.ops.aten.scaled_dot_product_attention,
        ):
            self.override_op_definition(operation, self._attend)
        self.override_op_definition(torch.nn.functional.linear, self._linear)
        self.override_op_definition(torch.addmm, self._addmm)
        self.override_op_definition(torch.Tensor.normal_, self._normal)  # torchax has none

    def dispatch(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """One operation. torchax does not look at PyTorch's grad mode."""
        result = super().dispatch(func, types, args, kwargs)
        if _name(func) in _PROMOTING:
            result = self._promoted(args, result)
        if torch.is_grad_enabled():
            return result
        given = {id(leaf) for leaf in pytree.tree_leaves((args, kwargs))}

        def without_gradient(tensor: Tensor) -> Tensor:
            array = tensor.jax()
            # What was given comes back as it was, as from PyTorch's .float() of a float32.
            if id(tensor) in given or not jnp.issubdtype(array.dtype, jnp.floating):
                return tensor
            return Tensor(jax.lax.stop_gradient(array), self)

        return pytree.tree_map_only(Tensor, without_gradient, result)

    def _promoted(self, args: Any, result: Any) -> Any:
        """In the dtype of what has dimensions, as PyTorch has it.

        JAX makes float32 of bfloat16 times a float32 without dimensions, and of all after it.
        """
        given = [one.jax() for one in args if isinstance(one, Tensor)]
        floats = [array.dtype for array in given if jnp.issubdtype(array.dtype, jnp.floating)]
        wide = [array.dtype for array in given if array.ndim and array.dtype in floats]
        if not wide or not isinstance(result, Tensor) or len({*floats}) == 1:
            return result
        array, dtype = result.jax(), jnp.result_type(*wide)
        floating = jnp.issubdtype(array.dtype, jnp.floating)
        return Tensor(array.astype(dtype), self) if floating else result

    @contextmanager
    def by_scores(self) -> Iterator[None]:
        """While inside, no kernel is asked for: of what is traced only shapes are wanted."""
        how, self._how = self._how, "scores"
        try:
            yield
        finally:
            self._how = how

    def wrap(self, tree: Any) -> Any:
        """JAX arrays as PyTorch's tensors."""
        return jax.tree.map(lambda array: Tensor(array, self), tree)

    def read(self, array: jax.Array | jax.ShapeDtypeStruct) -> jax.Array:
        """An array, or zeros in place of one that is only a shape."""
        if isinstance(array, jax.ShapeDtypeStruct):
            array = jnp.zeros(array.shape, array.dtype)
            self._unread.append(array)
        return array

    def real(self, tensor: torch.Tensor) -> Tensor:
        """The values of a tensor of PyTorch, as a constant of what is traced."""
        return Tensor(jnp.asarray(to_numpy(tensor)), self)

    def _normal(self, tensor: Tensor, mean: float = 0.0, std: float = 1.0, **_: Any) -> Tensor:
        key = self.get_and_rotate_prng_key()
        drawn = jax.random.normal(key, tensor.shape, tensor.jax().dtype)
        return tensor.apply_jax_(lambda _: mean + std * drawn)

    def _embedding(
        self,
        input: Tensor,
        weight: Tensor,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        **_: Any,
    ) -> Tensor:
        """Rows of a table; the one for padding gets no gradient, however the table is split."""
        if max_norm is not None:
            raise ImportedModelError("an Embedding with max_norm changes its weights when called")
        table = weight.jax()
        if any(table is one for one in self._unread):
            # XLA's partitioner dies of a lookup inside a shard_map, needed or not (jax 0.11.2).
            return Tensor(jnp.zeros((*input.shape, table.shape[1]), self.computes_in), self)
        if padding_idx is not None:
            row = jnp.arange(table.shape[0])[:, None] == padding_idx % table.shape[0]
            table = jnp.where(row, jax.lax.stop_gradient(table), table)
        tokens = input.jax()
        if table.shape[0] != self._vocab or tokens.ndim != 2:  # positions, say
            # Tokens that fill up a prompt may be past the end of a table.
            mode = None if cache_offset() is None else "clip"
            return Tensor(jnp.take(table, tokens, axis=0, mode=mode), self)
        rows = jnp.asarray(embedding_lookup(table, tokens, self.computes_in, by_hand_now()))
        return Tensor(constrain(rows, "batch", "seq", "embed"), self)

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return self._project(input, weight, bias, "oi")

    def _addmm(
        self, input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1
    ) -> Tensor:
        product = self._project(mat1, mat2, None, "io").jax()
        return Tensor(beta * input.jax() + alpha * product, self)

    def _project(self, x: Tensor, weight: Tensor, bias: Tensor | None, order: str) -> Tensor:
        """A product with a matrix, marked so that remat = "dots" can keep it."""
        leading = "abcdefgh"[: x.ndim - 1]
        product = dot(f"{leading}i,{order}->{leading}o", x.jax(), weight.jax())
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
                "scaled_dot_product_attention takes (batch, heads, seq, head_dim) here, not "
                f"{tuple(query.shape)}"
            )
        if key.shape[1] not in (query.shape[1], 1) and not enable_gqa:
            raise ImportedModelError(
                f"{query.shape[1]} query heads meet {key.shape[1]} key heads without enable_gqa"
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
        """The native attention where it is plainly causal, else one of whole scores.

        Raises:
            ImportedModelError: it is not, and what is asked of it takes the native one.
        """
        arrays = query.jax(), key.jax(), value.jax()
        scale = float(query.shape[-1] ** -0.5) if scale is None else scale
        if causal and mask is None and not dropout and query.shape[2] == key.shape[2]:
            self.attended += 1
            scoring = ScoreTransform(scale, cap)
            mixed = attend_causally(
                *arrays, scoring, window, self._remat, self._unroll, how=self._how
            )
            return Tensor(mixed, self)
        if what := only_native():
            how = "dropout" if dropout else "a mask, a bias or keys"
            raise ImportedModelError(
                f"{what} takes attention that is plainly causal; the module's has {how} of its own"
            )
        seen = None if mask is None else mask.jax()
        if window is not None:
            distance = jnp.arange(query.shape[2])[:, None] - jnp.arange(key.shape[2])
            seen = distance < window
        dropout_key = self.get_and_rotate_prng_key() if dropout else None
        return Tensor(attend(*arrays, seen, dropout, causal, scale, dropout_key, cap), self)


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """The values of a tensor on the host; NumPy has no bfloat16 of its own."""
    if tensor.dtype == torch.bfloat16:
        return np.asarray(tensor.detach().float().numpy(), jnp.bfloat16)
    return tensor.detach().numpy()


@contextmanager
def integers_of_32_bits() -> Iterator[None]:
    """While inside, JAX does not warn that PyTorch's int64 is its int32."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Explicitly requested dtype")
        yield


def call(
    module: torch.nn.Module,
    environment: Environment,
    arrays: Mapping[str, jax.Array],
    buffers: Mapping[str, torch.Tensor],
    key: jax.Array | None,
    function: Callable[[], Any],
) -> Any:
    """What a function returns that calls the module, with these arrays as its parameters.

    Args:
        key: for dropout; without it there is none of the random operations.

    Raises:
        ImportedModelError: it does what would be wrong in silence, or cannot be traced.
    """
    constants = {name: environment.real(buffer) for name, buffer in buffers.items()}
    before = {name: constant.jax() for name, constant in constants.items()}
    state = {**environment.wrap(dict(arrays)), **constants}
    prng = jax.random.key(0) if key is None else key
    with ExitStack() as stack:
        stack.enter_context(environment.override_property(prng=prng))
        stack.enter_context(_put_right(environment))
        stack.enter_context(integers_of_32_bits())
        stack.enter_context(environment)
        stack.enter_context(torch.device("jax"))
        stack.enter_context(
            stateless._reparametrize_module(module, state, tie_weights=True, strict=False)
        )
        with explained(module):
            result = function()
    changed = [name for name in before if constants[name].jax() is not before[name]]
    if changed and module.training:
        raise changes_buffer(module, changed[0])
    return result


@contextmanager
def _put_right(environment: Environment) -> Iterator[None]:
    """Do, or refuse, what torchax would leave out without a word."""

    def function(cls: Any, *args: Any) -> Any:
        if cls is torch.utils.checkpoint.CheckpointFunction:
            checkpoint()
        return apply_function(cls, args, environment)

    def checkpoint(*args: Any, **kwargs: Any) -> Any:
        raise NeedsStrict(
            f"torch.utils.checkpoint at {here()} is lost in a trace",
            "turn it off (gradient_checkpointing) and set program.model.remat",
        )

    entering = torch.autocast.__enter__

    def autocast(self: torch.autocast) -> Any:
        if getattr(self, "_enabled", False):
            raise NeedsStrict(
                f"torch.autocast at {here()} is lost in a trace",
                "remove it and set program.model.dtype",
            )
        return entering(self)

    with ExitStack() as stack:
        for owner, name, stand_in in (
            (torch.autograd.Function, "apply", classmethod(function)),
            (torch.autocast, "__enter__", autocast),
            # Not checkpoint itself, which modules import by name.
            (torch.utils.checkpoint, "_checkpoint_without_reentrant_generator", checkpoint),
        ):
            stack.enter_context(mock.patch.object(owner, name, stand_in))
        yield


@contextmanager
def explained(module: torch.nn.Module) -> Iterator[None]:
    """JAX's and torchax's complaints in the words of who wrote the module."""
    name = type(module).__name__
    try:
        yield
    except jax.errors.ConcretizationTypeError as error:
        raise ImportedModelError(
            f"{name} cannot be traced: what it does depends on the values of a tensor (.item(), an "
            f"if, or an index by a mask) at {_place(error)}"
        ) from error
    except jax.errors.NonConcreteBooleanIndexError as error:
        raise ImportedModelError(
            f"{name} cannot be traced: it selects by a mask, of which the values are not known, at "
            f"{_place(error)}"
        ) from error
    except Exception as error:
        if not isinstance(error, AssertionError) or "mixed math" not in str(error):
            raise raised(f"{name} cannot be traced: it", error) from error
        raise ImportedModelError(
            f"{name} cannot be traced: at {_place(error)} it uses a tensor that is neither a "
            "parameter nor a buffer; register it with register_buffer"
        ) from error


def _place(error: BaseException) -> str:
    """The innermost line of the module's author."""
    return innermost(traceback.extract_tb(error.__traceback__))


__all__ = ["Environment", "Tensor", "call", "explained", "to_numpy"]
