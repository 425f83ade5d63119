"""The strict front end: PyTorch's own forward and backward graph of a module, run by JAX.

Nodes that do not depend on the gradient of the logits are the forward pass of a custom_vjp, the
others are its backward pass. Loss functions, loss masks and optimizers are those of every model.
"""

from __future__ import annotations

import operator
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch.fx import Node
from torch.fx.node import map_arg

from graphtrain.errors import ImportedModelError
from graphtrain.models.matmul import dot
from graphtrain.torch_frontend import private_torch
from graphtrain.torch_frontend.bridge import Tensor, TraceEnvironment
from graphtrain.torch_frontend.joint import JointGraph
from graphtrain.torch_frontend.traced_calls import ignore_int64_warnings
from lowering.tracing.constrain import constrain

_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
_IGNORED = (torch.ops.aten._assert_tensor_metadata.default,)
Values = dict[Node, Any]


class StrictEnvironment(TraceEnvironment):
    """Environment for the ATen operations that PyTorch's graphs consist of."""

    def __init__(self, dtype: str, vocab: int | None) -> None:
        """Register the operations; the arguments are those of Environment."""
        super().__init__(dtype, vocab)
        aten = torch.ops.aten
        for operation, implementation in (
            (aten.mm, self._mm),
            (aten.bmm, self._bmm),
            (aten.addmm, self._addmm_plain),
            (aten.embedding, self._rows),
            (aten.embedding_dense_backward, self._gradient_of_rows),
        ):
            self.override_op_definition(operation, implementation)

    def _mm(self, left: Tensor, right: Tensor) -> Tensor:
        return Tensor(dot("ab,bc->ac", left.jax(), right.jax(), left.jax().dtype), self)

    def _bmm(self, left: Tensor, right: Tensor) -> Tensor:
        return Tensor(dot("zab,zbc->zac", left.jax(), right.jax(), left.jax().dtype), self)

    def _addmm_plain(
        self, added: Tensor, left: Tensor, right: Tensor, *, beta: float = 1, alpha: float = 1
    ) -> Tensor:
        product = dot("ab,bc->ac", left.jax(), right.jax(), jnp.float32)
        summed = beta * added.jax().astype(jnp.float32) + alpha * product
        return Tensor(summed.astype(added.jax().dtype), self)

    def _rows(self, table: Tensor, index: Tensor, *_: Any) -> Tensor:
        return self._embedding(index, table)

    def _gradient_of_rows(
        self, gradient: Tensor, index: Tensor, rows: int, padding: int, _: bool
    ) -> Tensor:
        """Compute the gradient of an embedding, summed in float32 for every dtype of the table."""
        row_gradients, row_indices = gradient.jax(), index.jax()
        if padding >= 0:
            row_gradients = jnp.where((row_indices == padding)[..., None], 0, row_gradients)
        zeros = jnp.zeros((rows, row_gradients.shape[-1]), jnp.float32)
        summed = zeros.at[row_indices].add(row_gradients.astype(jnp.float32))
        return Tensor(summed.astype(row_gradients.dtype), self)


@dataclass
class StrictGraph:
    """A traced module as a function of JAX arrays."""

    joint: JointGraph
    constants: Mapping[str, torch.Tensor]  # buffers by name
    environment: StrictEnvironment
    embed: int  # width of the residual stream; 0 if unknown
    remat: str  # activation checkpointing
    _batch: tuple[int, ...] = field(init=False)  # (batch, seq)

    def __post_init__(self) -> None:
        self._batch = tuple(self._tokens.meta["val"].shape)

    def logits(
        self, arrays: Mapping[str, jax.Array], tokens: jax.Array, key: jax.Array
    ) -> jax.Array:
        """Compute logits (batch, seq, vocab), whose gradient is PyTorch's backward pass.

        Args:
            arrays: parameters by name.
            tokens: token ids, (batch, seq).
            key: for random operations such as dropout.

        Raises:
            ImportedModelError: JAX has no equivalent of an operation.
        """

        def forward(weights: list[jax.Array], tokens: jax.Array, key: jax.Array) -> Any:
            values = self._input_values(weights, tokens)
            self._evaluate(self._forward, values, key)
            (logits, *_) = self.joint.outputs
            assert logits is not None
            saved_arrays = [values[node].jax() for node in self._saved]
            return values[logits].jax(), (weights, tokens, key, saved_arrays)

        def backward(saved: Any, gradient: jax.Array) -> Any:
            weights, tokens, key, saved_arrays = saved
            values = self._input_values(weights, tokens)
            for node, array in zip(self._saved, saved_arrays, strict=True):
                values[node] = Tensor(array, self.environment)
            values[self.joint.inputs[-1]] = Tensor(gradient, self.environment)
            self._evaluate_backward(values, gradient, key)
            gradients = [
                jnp.zeros_like(weight) if node is None else values[node].jax().astype(weight.dtype)
                for node, weight in zip(self.joint.outputs[1:], weights, strict=True)
            ]
            return gradients, None, None

        function = jax.custom_vjp(lambda *args: forward(*args)[0])
        function.defvjp(forward, backward)
        return function([arrays[name] for name in self.joint.parameters], tokens, key)

    @property
    def _tokens(self) -> Node:
        return self.joint.inputs[-2]

    def _input_values(self, weights: list[jax.Array], tokens: jax.Array) -> Values:
        buffers = [self.environment.constant(self.constants[name]) for name in self.joint.buffers]
        arrays = [Tensor(array, self.environment) for array in (*weights, tokens)]
        first = arrays[: len(weights)]
        return dict(zip(self.joint.inputs[:-1], [*first, *buffers, arrays[-1]], strict=True))

    @cached_property
    def _backward_only(self) -> set[Node]:
        """Nodes that depend on the gradient of the logits."""
        dependent_nodes = {self.joint.inputs[-1]}
        for node in self.joint.module.graph.nodes:
            if dependent_nodes.intersection(node.all_input_nodes):
                dependent_nodes.add(node)
        return dependent_nodes

    @cached_property
    def _forward(self) -> list[Node]:
        """Nodes that compute the logits and the saved values."""
        (logits, *_) = self.joint.outputs
        assert logits is not None
        return self._needed([logits, *self._saved])

    @cached_property
    def _backward(self) -> list[Node]:
        """Nodes of the backward pass."""
        ends = [node for node in self.joint.outputs[1:] if node is not None]
        return [node for node in self._needed(ends) if node in self._backward_only]

    @cached_property
    def _residuals(self) -> list[Node]:
        """Nodes of the forward pass whose results the backward pass uses."""
        ends = [node for node in self.joint.outputs[1:] if node is not None]
        backward_inputs = [node for user in self._backward for node in user.all_input_nodes]
        forward_nodes = {
            node: None for node in (*backward_inputs, *ends) if node not in self._backward_only
        }
        return [node for node in forward_nodes if node.op == "call_function"]

    @cached_property
    def _saved(self) -> list[Node]:
        """Nodes whose values are saved for the backward pass, instead of recomputed."""
        if self.remat == "none":
            return self._residuals
        saved_nodes: dict[Node, None] = {}
        visited: set[Node] = set()
        pending = list(self._residuals)
        while pending:  # walk back to nodes that are saved by the policy
            node = pending.pop()
            if node in visited or node.op != "call_function":
                continue
            visited.add(node)
            if self._is_saved(node):
                saved_nodes[node] = None
            else:
                pending += node.all_input_nodes
        return sorted(saved_nodes, key=self._order.__getitem__)

    @cached_property
    def _order(self) -> dict[Node, int]:
        return {node: index for index, node in enumerate(self.joint.module.graph.nodes)}

    def _is_saved(self, node: Node) -> bool:
        """Return true if the remat policy saves the value of this node."""
        source = node.args[0] if node.target is operator.getitem else node
        if _is_random(source):  # drawn again, the dropout mask would differ
            return isinstance(node.meta["val"], torch.Tensor)
        if self.remat == "dots":
            return node.target in _PRODUCTS
        return self._is_residual(node)

    def _needed(self, ends: Iterable[Node], available: Container[Node] = ()) -> list[Node]:
        """Return the nodes needed to compute `ends`, in order, except those in `available`."""
        pending, needed = list(ends), set()
        while pending:
            node = pending.pop()
            if node not in needed and node not in available and node.op != "placeholder":
                needed.add(node)
                pending += node.all_input_nodes
        return sorted(needed, key=self._order.__getitem__)

    def _evaluate_backward(self, values: Values, gradient: jax.Array, key: jax.Array) -> None:
        """Compute the values of the backward pass, and recompute forward values just before use.

        An optimization barrier makes the saved values depend on the gradient of the residual
        stream. Without it the compiler would merge the recomputation with the forward pass, or run
        all of it at once.
        """
        with_barrier: set[Node] = set()
        for node in self._backward:
            recomputed = self._needed(node.all_input_nodes, values)
            for input_node in [
                input_node for user in recomputed for input_node in user.all_input_nodes
            ]:
                if input_node not in with_barrier and isinstance(values.get(input_node), Tensor):
                    array, _ = jax.lax.optimization_barrier((values[input_node].jax(), gradient))
                    values[input_node] = Tensor(array, self.environment)
                    with_barrier.add(input_node)
            self._evaluate([*recomputed, node], values, key)
            if self._is_residual(node):
                gradient, with_barrier = values[node].jax(), set()

    def _evaluate(self, nodes: Iterable[Node], values: Values, key: jax.Array) -> None:
        """Compute the values of nodes, given in topological order."""
        environment = self.environment
        with (
            environment.override_property(prng=key),
            ignore_int64_warnings(),
            environment,
            torch.device("jax"),
        ):
            for node in nodes:
                if node.op == "get_attr":
                    constant = getattr(self.joint.module, str(node.target))
                    values[node] = environment.constant(constant)
                elif node.target not in _IGNORED:
                    values[node] = self._constrained(node, self._call(node, values))

    def _call(self, node: Node, values: Values) -> Any:
        args = map_arg(node.args, values.__getitem__)
        kwargs: Any = map_arg(node.kwargs, values.__getitem__)
        kwargs = {name: value for name, value in kwargs.items() if name not in _MEMORY_ARGUMENTS}
        if kwargs.get("device") is not None:
            kwargs["device"] = torch.device("jax")
        assert callable(node.target)
        try:
            return node.target(*args, **kwargs)
        except NotImplementedError as error:
            raise ImportedModelError(
                f"torchax has no JAX equivalent of {node.target}: {error}"
            ) from error

    def _constrained(self, node: Node, value: Any) -> Any:
        """Constrain the sharding of the residual stream and of its gradient."""
        if not self._is_residual(node):
            return value
        array = constrain(value.jax(), "batch", "residual", "embed")
        return Tensor(array, self.environment)

    def _is_residual(self, node: Node) -> bool:
        """Return true for an addition to the residual stream, as each block ends with."""
        if node.target is not torch.ops.aten.add.Tensor:
            return False
        shape = (*self._batch, self.embed)
        return all(
            isinstance(operand, Node)
            and tuple(getattr(operand.meta.get("val"), "shape", ())) == shape
            for operand in (*node.args[:2], node)
        )


# Arguments that describe memory, which has no meaning for JAX.
_MEMORY_ARGUMENTS = ("pin_memory", "memory_format", "layout", "non_blocking")


def _is_random(node: Any) -> bool:
    target = getattr(node, "target", None)
    tags: Any = getattr(target, "tags", ()) if private_torch.is_operator(target) else ()
    return torch.Tag.nondeterministic_seeded in tags
