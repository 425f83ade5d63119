"""A module's own forward pass, in which one scan replaces the loop over identical blocks.

While the module is called, the forward of each of its blocks is replaced. The first calls only
record the arguments of a block; the last call runs the scan. In between, the output of a block is a
placeholder that may only be passed to the next block: reading it raises BlocksDiffer, and the
blocks are then traced one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch.utils import _pytree as pytree

from graphtrain.models.projection import PROJECTION
from graphtrain.torch_frontend import private_torch
from graphtrain.torch_frontend.blocks import Stack, UnrolledBlocks
from graphtrain.torch_frontend.bridge import Tensor, TraceEnvironment
from graphtrain.torch_frontend.load_balancing import LoadBalancing, RouterStatistics
from lowering.tracing.constrain import constrain
from lowering.tracing.deferred_gradient import DeferredGradient, attach_reductions
from lowering.tracing.recording import record, scan_layers, without_recording

Arrays = Mapping[str, jax.Array]


class BlocksDiffer(Exception):
    """Blocks of a stack that compute different things, or that the module uses differently."""

    def __init__(self, stack: Stack, reason: str, read: int | None = None) -> None:
        super().__init__(reason)
        self.stack, self.reason = stack, reason
        self.read = read  # number of blocks whose output is read by other code than a block


class StopForward(Exception):
    """Signal that stops a module's forward pass once the wanted value is known."""

    def __init__(self, value: Any) -> None:
        super().__init__("the module's forward pass was stopped")
        self.value = value


@dataclass(frozen=True)
class ScanHooks:
    """Hooks on a module's blocks; by default a stack is one scan."""

    # Returns the hidden state after the last block of a stack.
    run_blocks: Callable[[Scan], jax.Array] = lambda scan: scan.run()
    # Context in which a block outside of all stacks runs, by the name of the block.
    around_block: Callable[[str], AbstractContextManager[Any]] = lambda name: nullcontext()
    balance: LoadBalancing | None = None  # load-balancing loss of routers; None: not recorded


class _Placeholder(Tensor):
    """Placeholder for the output of a block; only its shape and dtype are known."""

    def jax(self) -> jax.Array:
        """Raise BlocksDiffer: code other than the next block reads this output."""
        raise self._why  # pyright: ignore[reportAttributeAccessIssue]


def _placeholder(array: Any, environment: TraceEnvironment, why: BlocksDiffer) -> _Placeholder:
    placeholder = _Placeholder(jax.ShapeDtypeStruct(array.shape, array.dtype), environment)  # pyright: ignore
    placeholder._why = why  # pyright: ignore[reportAttributeAccessIssue]
    return placeholder


@contextmanager
def scanning_blocks(
    module: torch.nn.Module,
    environment: TraceEnvironment,
    lists: Sequence[Stack | UnrolledBlocks],
    arrays: Mapping[str, jax.Array],
    remat: str,
    verify: bool = False,
    through: ScanHooks | None = None,
) -> Iterator[None]:
    """Replace the blocks of a module, so that calling it inside runs a scan over every stack.

    Args:
        module: with its parameters set, except those of stacks.
        environment: of torchax, already entered.
        lists: the module's lists of blocks.
        arrays: the stacked parameters, by path.
        remat: activation checkpointing: "none", "attention", "dots" or "full".
        verify: whether to check that blocks of a stack compute the same.
        through: hooks that replace the scan over a stack.

    Raises:
        BlocksDiffer: while the module is called, if blocks of a stack differ.
    """
    patched_blocks, through = [], through or ScanHooks()
    try:
        for block_list in lists:
            members = list(module.get_submodule(block_list.name))  # pyright: ignore[reportArgumentType]
            blocks = [members[number] for number in block_list.numbers]
            if isinstance(block_list, Stack):
                rows = block_list.rows_by_name(arrays)
                scan = Scan(block_list, blocks, rows, environment, remat, verify, through)
                replacements = [
                    scan.replacement_forward(number) for number in range(block_list.count)
                ]
            else:
                replacements = [
                    _in_context(
                        partial(through.around_block, f"{block_list.name}.{number}"),
                        _checkpointed(block, environment, remat),
                    )
                    for number, block in zip(block_list.numbers, blocks, strict=True)
                ]
            for block, replacement in zip(blocks, replacements, strict=True):
                patched_blocks.append(block)
                block.forward = replacement
        yield
    finally:
        for block in patched_blocks:
            block.__dict__.pop("forward", None)


@dataclass
class _Call:
    """Arguments of one block other than the hidden state, and the structure of its output."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    structure: Any = None
    shapes: list[Any] = field(default_factory=list)  # of the output's leaves; None: not a tensor


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
    calls: list[_Call] = field(default_factory=list)  # one for each position of the period
    previous_output: _Placeholder | None = None  # placeholder output of the previous block
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
            self.calls.append(_Call(args[1:], kwargs))
            self.describe(position)
        elif not _same_arguments(
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
        self, block: torch.nn.Module, call: _Call, hidden: jax.Array, arrays: Arrays, key: jax.Array
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
                    block = _checkpoint(block, self.remat, prevent_cse=True)
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
            transform=partial(_checkpoint, remat=self.remat if period == 1 else "none"),
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

    def _hidden_leaf(self, call: _Call) -> int:
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

    def _return(self, call: _Call, hidden: jax.Array | None, count: int) -> Any:
        """Return the output of block `count`: the hidden state if known, else placeholders."""
        why = self._blocks_differ(
            "code other than the next block reads the output of a block", count
        )
        leaves: list[Any] = [
            None if shape is None else _placeholder(shape, self.environment, why)
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


def _in_context(
    context: Callable[[], AbstractContextManager[Any]], function: Callable[..., Any]
) -> Callable[..., Any]:
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with context():
            return function(*args, **kwargs)

    return wrapped


def _checkpointed(
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
        out = _checkpoint(run, remat)(environment.get_and_rotate_prng_key(), arrays)
        flat = [
            static_leaf if array is None else Tensor(array, environment)
            for array, static_leaf in zip(out, static_leaves, strict=True)
        ]
        return pytree.tree_unflatten(flat, structure)

    return replacement


def _checkpoint(
    function: Callable[..., Any], remat: str, *, prevent_cse: bool = False
) -> Callable[..., Any]:
    if remat in ("none", "attention"):  # attention recomputes its scores by itself
        return function
    policies = jax.checkpoint_policies
    policy = {
        "dots": policies.save_only_these_names(PROJECTION),
        "full": policies.nothing_saveable,
    }[remat]
    return jax.checkpoint(function, policy=policy, prevent_cse=prevent_cse)


def _same_arguments(call: Any, other_call: Any) -> bool:
    """Return true if two calls get the identical tensors and equal other values."""
    leaves, structure = pytree.tree_flatten(call)
    other_leaves, other_structure = pytree.tree_flatten(other_call)
    return structure == other_structure and all(
        a is b or (not isinstance(a, torch.Tensor) and type(a) is type(b) and a == b)
        for a, b in zip(leaves, other_leaves, strict=True)
    )
