"""One scan in place of the loop over identical blocks, during one call of a module.

The first calls of blocks only record their arguments; the last call runs the scan. In between, the
output of a block is a placeholder that may only be passed to the next block: reading it raises
BlocksDiffer, and the blocks are then traced one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch.utils import _pytree as pytree

from graphtrain.torch_frontend import private_torch
from graphtrain.torch_frontend.activation_checkpointing import checkpoint
from graphtrain.torch_frontend.block_calls import (
    BlockCall,
    BlocksDiffer,
    Placeholder,
    make_placeholder,
    same_arguments,
)
from graphtrain.torch_frontend.blocks import Stack
from graphtrain.torch_frontend.bridge import Tensor, TraceEnvironment
from graphtrain.torch_frontend.load_balancing import LoadBalancing, RouterStatistics
from lowering.tracing.constrain import constrain
from lowering.tracing.deferred_gradient import DeferredGradient, attach_reductions
from lowering.tracing.recording import record, scan_layers, without_recording

Arrays = Mapping[str, jax.Array]


@dataclass(frozen=True)
class ScanHooks:
    """Hooks on a module's blocks; by default a stack is one scan."""

    # Returns the hidden state after the last block of a stack.
    run_blocks: Callable[[Scan], jax.Array] = lambda scan: scan.run()
    # Context in which a block outside of all stacks runs, by the name of the block.
    around_block: Callable[[str], AbstractContextManager[Any]] = lambda name: nullcontext()
    balance: LoadBalancing | None = None  # load-balancing loss of routers; None: not recorded


@dataclass
class Scan:
    """One stack of blocks during one call of the module."""

    stack: Stack
    blocks: list[torch.nn.Module]
    rows: list[dict[str, jax.Array]]  # stacked parameters, per position of the period, by name
    environment: TraceEnvironment
    remat: str
    verify: bool
    through: ScanHooks
    hidden: jax.Array | None = None  # input of the first block
    calls: list[BlockCall] = field(default_factory=list)  # one for each position of the period
    previous_output: Placeholder | None = None  # placeholder output of the previous block
    programs: list[str] = field(default_factory=list)  # jaxprs of the first period, to compare
    router_statistics: list[RouterStatistics] = field(
        default_factory=list
    )  # one per router of a period, rows stacked

    def replacement_forward(self, number: int) -> Callable[..., Any]:
        """Return the function that replaces the forward of one block."""
        return lambda *args, **kwargs: self._call_block(number, args, kwargs)

    def _blocks_differ(self, reason: str, read: int | None = None) -> BlocksDiffer:
        return BlocksDiffer(self.stack, reason, read)

    def _call_block(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not args or not isinstance(args[0], torch.Tensor):
            raise self._blocks_differ("the hidden state is not the first argument of its blocks")
        position = number % self.stack.period
        if number == 0:
            self.hidden, self.calls = args[0].jax(), []  # pyright: ignore[reportAttributeAccessIssue]
        elif args[0] is not self.previous_output:
            first = self.stack.start
            raise self._blocks_differ(
                f"the input of block {first + number} is not the output of block "
                f"{first + number - 1}"
            )
        if number < self.stack.period:
            self.calls.append(BlockCall(args[1:], kwargs))
            self.describe(position)
        elif not same_arguments(
            (args[1:], kwargs), (self.calls[position].args, self.calls[position].kwargs)
        ):
            first = self.stack.start
            raise self._blocks_differ(
                f"block {first + number} and block {first + position} get different arguments"
            )
        if self.verify and number in {*range(2 * self.stack.period), *self._last()}:
            self._compare(number, position)
        last = number == self.stack.count - 1
        hidden = self.through.run_blocks(self) if last else None
        return self._return(self.calls[position], hidden, number + 1)

    def _last(self) -> range:
        return range(self.stack.count - self.stack.period, self.stack.count)

    def describe(self, position: int) -> None:
        """Trace a block, to record the structure and shapes of its output."""
        call, block = self.calls[position], self.blocks[position]

        def run(hidden: jax.Array, arrays: Arrays, key: jax.Array) -> Any:
            out = self._block(block, call, hidden, arrays, key)
            leaves, call.structure = pytree.tree_flatten(out)
            return [leaf.jax() if private_torch.is_traced(leaf) else None for leaf in leaves]

        # Only shapes are needed; 1F1B calls the head on fewer positions than a kernel supports.
        with self.environment.without_kernels(), without_recording():
            call.shapes = jax.eval_shape(run, *self._shapes(position))

    def _compare(self, number: int, position: int) -> None:
        """Raise BlocksDiffer if a block computes something else, for example by its layer index."""
        call, block = self.calls[position], self.blocks[number]

        def run(hidden: jax.Array, arrays: Arrays, key: jax.Array) -> Any:
            out = self._block(block, call, hidden, arrays, key)
            return [leaf.jax() for leaf in pytree.tree_leaves(out) if private_torch.is_traced(leaf)]

        with without_recording():
            program = str(jax.make_jaxpr(run)(*self._shapes(position)))
        if number < self.stack.period:
            self.programs.append(program)
        elif program != self.programs[position]:
            first = self.stack.start
            raise self._blocks_differ(
                f"block {first + number} computes something else than block {first + position}"
            )

    def _shapes(self, position: int) -> tuple[Any, Any, Any]:
        """Return shapes of the hidden state, of one block's parameters and of its dropout key."""
        assert self.hidden is not None
        hidden = jax.ShapeDtypeStruct(self.hidden.shape, self.hidden.dtype)
        return hidden, self._row_shapes(position), self._key_shape()

    def _row_shapes(self, position: int) -> Any:
        return {
            name: jax.tree.map(self._row_shape, array, is_leaf=_is_deferred)
            for name, array in self.rows[position].items()
        }

    def _row_shape(self, array: Any) -> jax.ShapeDtypeStruct:
        if isinstance(array, DeferredGradient):
            return jax.ShapeDtypeStruct(array.weights.shape[1:], self.environment.computes_in)
        return jax.ShapeDtypeStruct(array.shape[1:], array.dtype)

    def _attach_reduction(self, array: Any) -> jax.Array:
        """Return a parameter inside the loop; there a deferred gradient is reduced."""
        if isinstance(array, DeferredGradient):
            return attach_reductions(array).astype(self.environment.computes_in)
        return array

    def _key_shape(self) -> Any:
        key = jax.eval_shape(lambda: jax.random.split(self.environment.prng_key)[0])
        # A new struct, without the mesh axes along which the key varies.
        return jax.ShapeDtypeStruct(key.shape, key.dtype)

    def _block(
        self,
        block: torch.nn.Module,
        call: BlockCall,
        hidden: jax.Array,
        arrays: Arrays,
        key: jax.Array,
    ) -> Any:
        """Call the block's own forward with these parameters."""
        state = self.environment.wrap(dict(arrays))
        with (
            self.environment.override_property(prng=key),
            private_torch.reparametrize(block, state),
        ):
            hidden_tensor = Tensor(hidden, self.environment)
            return type(block).forward(block, hidden_tensor, *call.args, **call.kwargs)

    def run(self) -> jax.Array:
        """Return the hidden state after all blocks."""
        assert self.hidden is not None
        return self.scan_rows(self.hidden, self.rows, self.keys())

    def keys(self) -> jax.Array:
        """Draw dropout keys of every block, (rows, period)."""
        key = self.environment.get_and_rotate_prng_key()
        return jax.random.split(key, (self.stack.rows, self.stack.period))

    def block_arguments(self) -> list[jax.Array]:
        """Return the arrays that blocks get in addition to the hidden state."""
        leaves = pytree.tree_leaves([(call.args, call.kwargs) for call in self.calls])
        return [leaf.jax() for leaf in leaves if private_torch.is_traced(leaf)]

    def scan_rows(
        self, hidden: jax.Array, rows: Any, keys: jax.Array, real: jax.Array | None = None
    ) -> jax.Array:
        """Scan over rows of blocks and return the hidden state after them.

        Args:
            hidden: the hidden state before them.
            rows: stacked parameters, for each position of the period, by name inside a block.
            keys: dropout keys, (rows, period).
            real: bool per row, false for padding rows, which pass the hidden state through.
        """
        period = self.stack.period

        def body(hidden: jax.Array, row: Any) -> tuple[jax.Array, list[RouterStatistics]]:
            (arrays, keys, real), block_input = row, hidden
            router_statistics: list[RouterStatistics] = []
            for position in range(period):
                block = partial(self._scanned_block, position)
                if period > 1:  # blocks of a row are recomputed one at a time
                    block = checkpoint(block, self.remat, prevent_cse=True)
                hidden, sums = block(hidden, arrays[position], keys[position])
                router_statistics += sums
            hidden = hidden if real is None else jnp.where(real, hidden, block_input)
            hidden = constrain_residual(hidden)
            if hidden.ndim == 3 and period == 1:
                hidden = record("output", hidden, "batch", "residual", "embed")
            return hidden, router_statistics

        hidden, self.router_statistics = scan_layers(
            body,
            hidden,
            (rows, keys, real),
            name=self.stack.loop,
            transform=partial(checkpoint, remat=self.remat if period == 1 else "none"),
        )
        return hidden

    def _scanned_block(
        self, position: int, hidden: jax.Array, arrays: Any, key: jax.Array
    ) -> tuple[jax.Array, list[RouterStatistics]]:
        """Return the hidden state after one block of a row, and the sums of its routers."""
        arrays = jax.tree.map(self._attach_reduction, arrays, is_leaf=_is_deferred)
        with self._record_routers(self.blocks[position]) as sums:
            hidden = self.run_block(position, hidden, arrays, key)
        return hidden, sums

    def run_block(
        self, position: int, hidden: jax.Array, arrays: Arrays, key: jax.Array
    ) -> jax.Array:
        """Return the hidden state after one block, at a position of the period."""
        call = self.calls[position]
        out = self._block(self.blocks[position], call, constrain_residual(hidden), arrays, key)
        return pytree.tree_leaves(out)[self._hidden_leaf(call)].jax()

    def _record_routers(
        self, block: torch.nn.Module
    ) -> AbstractContextManager[list[RouterStatistics]]:
        balance = self.through.balance
        return nullcontext([]) if balance is None else balance.recording(block)

    def _hidden_leaf(self, call: BlockCall) -> int:
        """Return the index of the hidden state in the leaves that a block returns."""
        assert self.hidden is not None
        for number, shape in enumerate(call.shapes):
            if shape is not None:
                if (shape.shape, shape.dtype) == (self.hidden.shape, self.hidden.dtype):
                    return number
                break
        raise self._blocks_differ(
            "the output of its blocks has another shape or dtype than the hidden state"
        )

    def _return(self, call: BlockCall, hidden: jax.Array | None, count: int) -> Any:
        """Return the output of block `count`: the hidden state if known, else placeholders."""
        why = self._blocks_differ(
            "code other than the next block reads the output of a block", count
        )
        leaves: list[Any] = [
            None if shape is None else make_placeholder(shape, self.environment, why)
            for shape in call.shapes
        ]
        hidden_index = self._hidden_leaf(call)
        if hidden is not None:
            leaves[hidden_index] = Tensor(hidden, self.environment)
        else:
            self.previous_output = leaves[hidden_index]
        return pytree.tree_unflatten(leaves, call.structure)


def _is_deferred(leaf: Any) -> bool:
    return isinstance(leaf, DeferredGradient)


def constrain_residual(hidden: jax.Array) -> jax.Array:
    """Constrain the hidden state between blocks to the sharding of the residual stream."""
    return constrain(hidden, "batch", "residual", "embed") if hidden.ndim == 3 else hidden
