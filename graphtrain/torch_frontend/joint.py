"""Joint forward and backward graph of a module, traced by PyTorch (AOTAutograd).

PyTorch's autograd decides what is differentiated, so no_grad regions, custom backward passes,
autocast, writes through views and tied weights keep PyTorch's semantics. Tensors are fake: nothing
is allocated. Shapes are fixed to those of the batch.
"""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.nn.attention import SDPBackend, sdpa_kernel

from graphtrain.errors import ImportedModelError
from graphtrain.torch_frontend import private_torch
from graphtrain.torch_frontend.meta_module import MetaModule
from graphtrain.torch_frontend.private_torch import DataDependentOutputException, FakeTensorMode
from graphtrain.torch_frontend.silent_failures import (
    InPlaceWriteRecorder,
    innermost_user_line,
    user_code_error,
)

Call = Callable[[torch.Tensor], torch.Tensor]
# Not decomposed: JAX computes these better than their decompositions.
_NOT_DECOMPOSED = ("aten::embedding_dense_backward", "aten::_softmax", "aten::_log_softmax")


@dataclass(frozen=True)
class JointGraph:
    """Graph of parameters, buffers, tokens and the gradient of logits to logits and gradients."""

    module: torch.fx.GraphModule
    parameters: tuple[str, ...]  # in the order of the graph's inputs, and of its gradients
    buffers: tuple[str, ...]  # inputs after the parameters; then tokens, gradient of logits

    @property
    def inputs(self) -> list[torch.fx.Node]:
        """Placeholders of the graph, in order."""
        return self.module.graph.find_nodes(op="placeholder")

    @property
    def outputs(self) -> list[torch.fx.Node | None]:
        """Logits, then the gradient of every parameter; None if nothing depends on it."""
        (last,) = self.module.graph.find_nodes(op="output")
        flat: Any = last.args[0]
        return list(flat[: 1 + len(self.parameters)])


def trace_joint(
    module: MetaModule, dtype: str, tokens: tuple[int, ...], call: Call, *, training: bool
) -> JointGraph:
    """Trace the joint graph of a module for tokens of one shape.

    Args:
        module: the module, without weights.
        dtype: of its parameters.
        tokens: shape (batch, seq).
        call: returns the module's logits of tokens.
        training: whether dropout is active; the module must not change its buffers then.

    Raises:
        ImportedModelError: the module cannot be traced, or changes a buffer in training.
    """
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with fake:
        parameters, buffers, fake_tokens = _fake_inputs(module, dtype, tokens)
    names = [*parameters, *buffers]

    def function(*flat: torch.Tensor) -> tuple[torch.Tensor]:
        # Clones, because AOTAutograd's inputs may neither be written to nor returned.
        state = dict(zip(names, flat[:-1], strict=True))
        state |= {name: state[name].clone() for name in buffers}
        with private_torch.reparametrize(module.module, state):
            logits = call(flat[-1]).clone()
        changed = [name for name in buffers if private_torch.writes(state[name])]
        if training and changed:
            raise buffer_changed_error(module.module, changed[0])
        return (logits,)

    module.module.train(training)
    with fake, _explain_trace_errors(module.module):
        inputs = *parameters.values(), *buffers.values(), fake_tokens
        graph = private_torch.export_joint(function, inputs, _decompositions())
    assert isinstance(graph, torch.fx.GraphModule)
    return JointGraph(graph, tuple(parameters), tuple(buffers))


def find_writes_through_views(module: MetaModule, tokens: tuple[int, ...], call: Call) -> list[str]:
    """Return descriptions, with lines, of in-place writes through views that a trace would lose.

    The module is called on fake tensors. If that fails the list is empty, as the trace will report
    the error.

    Raises:
        ImportedModelError: the module writes into a parameter.
    """
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with fake:
        parameters, buffers, fake_tokens = _fake_inputs(module, "float32", tokens)
        recorder = InPlaceWriteRecorder(parameters)
        state = {**parameters, **{name: buffer.clone() for name, buffer in buffers.items()}}
        try:
            with (
                _on_host(),
                private_torch.reparametrize(module.module, state),
                recorder,
            ):
                call(fake_tokens)
        except Exception:  # the trace reports it
            return []
    if recorder.to_parameters:
        raise ImportedModelError(
            f"{type(module.module).__name__} cannot be traced: in its forward pass "
            f"{recorder.to_parameters[0]}, but only the optimizer changes parameters of a step; "
            "compute a new tensor from the parameter instead"
        )
    return recorder.through_views


def _fake_inputs(
    meta: MetaModule, dtype: str, tokens: tuple[int, ...]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], torch.Tensor]:
    """Return empty parameters, buffers and tokens, on the CPU, for a FakeTensorMode."""
    parameters = {
        name: torch.empty(
            parameter.shape, dtype=getattr(torch, dtype) if parameter.requires_grad else None
        ).requires_grad_()
        for name, parameter in meta.parameters().items()
    }
    buffers = {name: torch.empty_like(buffer) for name, buffer in meta.buffers.items()}
    return parameters, buffers, torch.empty(tokens, dtype=torch.long)


def buffer_changed_error(module: torch.nn.Module, name: str) -> ImportedModelError:
    """Return the error for a module that changes a buffer in its forward pass."""
    return ImportedModelError(
        f"{type(module).__name__} changes its buffer {name} in its forward pass, as BatchNorm does "
        "with running statistics, but a step updates only parameters; replace the layer or set it "
        "to eval()"
    )


def _decompositions() -> dict[Any, Any]:
    """Return the decompositions of uncommon operations into core ATen operations."""
    table = torch.export.default_decompositions()
    return {
        operation: rule
        for operation, rule in table.items()
        if not operation.name().startswith(_NOT_DECOMPOSED)
    }


@contextmanager
def _explain_trace_errors(module: torch.nn.Module) -> Iterator[None]:
    """Turn errors of a trace into ones that name the line of the module."""
    name = type(module).__name__
    try:
        with _on_host():
            yield
    except (DataDependentOutputException, GuardOnDataDependentSymNode) as error:
        raise ImportedModelError(
            f"{name} cannot be traced: it depends on the values of a tensor (.item(), an if, or "
            f"indexing by a mask) at {_location(error)}"
        ) from error
    except RuntimeError as error:
        raise ImportedModelError(
            f"{name} cannot be traced: at {_location(error)} PyTorch reports: {error}"
        ) from error
    except Exception as error:
        raise user_code_error(f"{name} cannot be traced: it", error) from error


def _location(error: BaseException) -> str:
    return innermost_user_line(traceback.extract_tb(error.__traceback__))


@contextmanager
def _on_host() -> Iterator[None]:
    """Set up PyTorch to trace a module's backward pass without weights, as if on the CPU."""
    with ExitStack() as stack:
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))  # others have no backward pass here
        stack.enter_context(torch.enable_grad())
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(autocast_on_cpu())
        # transformers skips checks of tensor values when it believes it is being compiled.
        stack.enter_context(mock.patch.object(torch.compiler, "is_compiling", lambda: True))
        yield


@contextmanager
def autocast_on_cpu() -> Iterator[list[torch.dtype]]:
    """Redirect torch.autocast of any device to the CPU; yield the dtypes it was enabled with."""
    original_init, dtypes = torch.autocast.__init__, []

    def init_on_cpu(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        original_init(self, "cpu", *args, **kwargs)
        if self._enabled:
            dtypes.append(self.fast_dtype)

    with mock.patch.object(torch.autocast, "__init__", init_on_cpu):
        yield dtypes
