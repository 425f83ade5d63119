"""PyTorch's own forward and backward pass of a module, traced by PyTorch into one graph.

Its autograd is what decides here: regions under no_grad, backward passes of one's own, autocast,
writes through views and tied weights come out as PyTorch computes them. Tensors are fake, so
nothing is allocated, and sizes are those of the batch.
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
from torch._functorch.aot_autograd import aot_export_joint_simple
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import stateless

from graphtrain.errors import ImportedModelError
from graphtrain.torch_frontend.causes import Watch, innermost, raised
from graphtrain.torch_frontend.making import Made

Call = Callable[[torch.Tensor], torch.Tensor]
# Kept whole: JAX computes these better than the simpler operations they would be written in.
_WHOLE = ("aten::embedding_dense_backward", "aten::_softmax", "aten::_log_softmax")


@dataclass(frozen=True)
class Joint:
    """A graph of parameters, buffers, tokens and the gradient of logits."""

    module: torch.fx.GraphModule
    parameters: tuple[str, ...]  # in the order of the graph's inputs, and of its gradients
    buffers: tuple[str, ...]  # after the parameters; then the tokens, then the gradient

    @property
    def inputs(self) -> list[torch.fx.Node]:
        return self.module.graph.find_nodes(op="placeholder")

    @property
    def outputs(self) -> list[torch.fx.Node | None]:
        """Logits, then the gradient of every parameter; none for one that nothing depends on."""
        (last,) = self.module.graph.find_nodes(op="output")
        flat: Any = last.args[0]
        return list(flat[: 1 + len(self.parameters)])


def trace_joint(
    made: Made, dtype: str, tokens: tuple[int, ...], call: Call, *, training: bool
) -> Joint:
    """The graph of a module for tokens of one shape.

    Args:
        made: the module, without weights.
        dtype: of its parameters.
        tokens: shape (batch, seq).
        call: the module's logits of tokens.
        training: whether it drops, and may not change its buffers.

    Raises:
        ImportedModelError: it cannot be traced.
    """
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with fake:
        parameters, buffers, given = _fakes(made, dtype, tokens)
    names = [*parameters, *buffers]

    def function(*flat: torch.Tensor) -> tuple[torch.Tensor]:
        # Copies, since what is given may not be written to, nor returned.
        state = dict(zip(names, flat[:-1], strict=True))
        state |= {name: state[name].clone() for name in buffers}
        with stateless._reparametrize_module(made.module, state, tie_weights=True, strict=False):
            logits = call(flat[-1]).clone()
        changed = [name for name in buffers if state[name]._version]
        if training and changed:
            raise changes_buffer(made.module, changed[0])
        return (logits,)

    made.module.train(training)
    with fake, _traced(made.module):
        graph = aot_export_joint_simple(
            function,
            (*parameters.values(), *buffers.values(), given),
            trace_joint=True,
            decompositions=_decompositions(),
        )
    assert isinstance(graph, torch.fx.GraphModule)
    return Joint(graph, tuple(parameters), tuple(buffers))


def written_through_views(made: Made, tokens: tuple[int, ...], call: Call) -> list[str]:
    """Writes in place that a trace would lose, each with its line; of fake tensors.

    Where the module cannot be called so, none: a trace says why.
    """
    fake, watch = FakeTensorMode(allow_non_fake_inputs=True), Watch()
    with fake:
        parameters, buffers, given = _fakes(made, "float32", tokens)
        state = {**parameters, **{name: one.clone() for name, one in buffers.items()}}
        try:
            with (
                _on_host(),
                stateless._reparametrize_module(made.module, state, tie_weights=True, strict=False),
                watch,
            ):
                call(given)
        except Exception:  # what cannot be called at all is not for this to tell
            return []
    return watch.through_views


def _fakes(
    made: Made, dtype: str, tokens: tuple[int, ...]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], torch.Tensor]:
    """Parameters, buffers and tokens on the host that hold nothing."""
    parameters = {
        name: torch.empty(one.shape, dtype=getattr(torch, dtype)).requires_grad_()
        for name, one in made.parameters().items()
    }
    buffers = {name: torch.empty_like(one) for name, one in made.buffers.items()}
    return parameters, buffers, torch.empty(tokens, dtype=torch.long)


def changes_buffer(module: torch.nn.Module, name: str) -> ImportedModelError:
    """The refusal of a module that keeps state beside its parameters."""
    return ImportedModelError(
        f"{type(module).__name__} changes its buffer {name} when it is called, as BatchNorm does "
        "its running statistics; no state but parameters is kept from step to step, so such a "
        "layer has to be replaced or set to eval()"
    )


def _decompositions() -> dict[Any, Any]:
    """How rare operations are written in common ones."""
    table = torch.export.default_decompositions()
    return {
        operation: rule
        for operation, rule in table.items()
        if not operation.name().startswith(_WHOLE)
    }


@contextmanager
def _traced(module: torch.nn.Module) -> Iterator[None]:
    name = type(module).__name__
    try:
        with _on_host():
            yield
    except (DataDependentOutputException, GuardOnDataDependentSymNode) as error:
        raise ImportedModelError(
            f"{name} cannot be traced: what it does depends on the values of a tensor (.item(), an "
            f"if, or an index by a mask) at {_place(error)}"
        ) from error
    except RuntimeError as error:
        raise ImportedModelError(
            f"{name} cannot be traced: at {_place(error)} PyTorch says: {error}"
        ) from error
    except Exception as error:
        raise raised(f"{name} cannot be traced: it", error) from error


def _place(error: BaseException) -> str:
    return innermost(traceback.extract_tb(error.__traceback__))


@contextmanager
def _on_host() -> Iterator[None]:
    """Conditions under which a module's own backward pass can be traced without its weights."""
    with ExitStack() as stack:
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))  # of others there is no backward
        stack.enter_context(torch.enable_grad())
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(autocast_on_host())
        # transformers asks, before it looks at values.
        stack.enter_context(mock.patch.object(torch.compiler, "is_compiling", lambda: True))
        yield


@contextmanager
def autocast_on_host() -> Iterator[list[torch.dtype]]:
    """While inside, torch.autocast of any device is that of the host, where all tensors are here.

    Yields the dtypes it was asked for.
    """
    begin, asked = torch.autocast.__init__, []

    def begin_on_host(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        begin(self, "cpu", *args, **kwargs)
        if self._enabled:
            asked.append(self.fast_dtype)

    with mock.patch.object(torch.autocast, "__init__", begin_on_host):
        yield asked
