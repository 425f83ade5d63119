"""Calls of a module with JAX arrays as its parameters, in which nothing is silently wrong."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import jax
import torch
import torch.utils.checkpoint

from graphtrain.errors import ImportedModelError, StrictFrontEndRequired
from graphtrain.torch_frontend import private_torch
from graphtrain.torch_frontend.bridge import TraceEnvironment
from graphtrain.torch_frontend.functions import apply_function
from graphtrain.torch_frontend.joint import buffer_changed_error
from graphtrain.torch_frontend.silent_failures import (
    current_user_line,
    innermost_user_line,
    user_code_error,
)


def call_module(
    module: torch.nn.Module,
    environment: TraceEnvironment,
    arrays: Mapping[str, jax.Array],
    buffers: Mapping[str, torch.Tensor],
    key: jax.Array | None,
    function: Callable[[], Any],
) -> Any:
    """Run a function that calls the module, with these arrays as the module's parameters.

    Args:
        module: whose parameters and buffers are replaced meanwhile.
        environment: in which its operations run.
        arrays: parameters by name.
        buffers: real values of its buffers, by name.
        key: for dropout; None if the module is in eval mode.
        function: calls the module.

    Raises:
        ImportedModelError: the module cannot be traced, or a trace would be silently wrong.
    """
    constants = {name: environment.constant(buffer) for name, buffer in buffers.items()}
    initial_arrays = {name: constant.jax() for name, constant in constants.items()}
    state = {**environment.wrap(dict(arrays)), **constants}
    prng = jax.random.key(0) if key is None else key
    with ExitStack() as stack:
        stack.enter_context(environment.override_property(prng=prng))
        stack.enter_context(_patch_torch(environment))
        stack.enter_context(ignore_int64_warnings())
        stack.enter_context(environment)
        stack.enter_context(torch.device("jax"))
        stack.enter_context(private_torch.reparametrize(module, state))
        with explain_errors(module):
            result = function()
    changed = [name for name in initial_arrays if constants[name].jax() is not initial_arrays[name]]
    if changed and module.training:
        raise buffer_changed_error(module, changed[0])
    return result


@contextmanager
def ignore_int64_warnings() -> Iterator[None]:
    """Silence JAX's warnings that PyTorch's int64 becomes int32."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Explicitly requested dtype")
        yield


@contextmanager
def _patch_torch(environment: TraceEnvironment) -> Iterator[None]:
    """Patch what torchax would silently ignore: autograd.Function, checkpoint and autocast."""

    def function(cls: Any, *args: Any) -> Any:
        if cls is torch.utils.checkpoint.CheckpointFunction:
            checkpoint()
        return apply_function(cls, args, environment)

    def checkpoint(*args: Any, **kwargs: Any) -> Any:
        raise StrictFrontEndRequired(
            f"torch.utils.checkpoint at {current_user_line()} is ignored by a trace",
            "turn it off (gradient_checkpointing) and set program.model.remat",
        )

    original_enter = torch.autocast.__enter__

    def autocast(self: torch.autocast) -> Any:
        if getattr(self, "_enabled", False):
            raise StrictFrontEndRequired(
                f"torch.autocast at {current_user_line()} is ignored by a trace",
                "remove it and set program.precision.compute",
            )
        return original_enter(self)

    with ExitStack() as stack:
        for owner, name, replacement in (
            (torch.autograd.Function, "apply", classmethod(function)),
            (torch.autocast, "__enter__", autocast),
            # Not torch.utils.checkpoint.checkpoint, of which modules hold references by import.
            (torch.utils.checkpoint, "_checkpoint_without_reentrant_generator", checkpoint),
            # Checks of values, which a trace does not know.
            (torch.distributions.Distribution, "_validate_args", False),
        ):
            stack.enter_context(mock.patch.object(owner, name, replacement))
        yield


@contextmanager
def explain_errors(module: torch.nn.Module) -> Iterator[None]:
    """Turn errors of JAX and torchax into ones that name the line of the module."""
    name = type(module).__name__
    try:
        yield
    except jax.errors.ConcretizationTypeError as error:
        raise ImportedModelError(
            f"{name} cannot be traced: it depends on the values of a tensor (.item(), an if, or "
            f"indexing by a mask) at {_location(error)}"
        ) from error
    except jax.errors.NonConcreteBooleanIndexError as error:
        raise ImportedModelError(
            f"{name} cannot be traced: it indexes by a mask, so the shape of the result is unknown "
            f"at {_location(error)}"
        ) from error
    except Exception as error:
        if not isinstance(error, AssertionError) or "mixed math" not in str(error):
            raise user_code_error(f"{name} cannot be traced: it", error) from error
        raise ImportedModelError(
            f"{name} cannot be traced: at {_location(error)} it uses a tensor that is neither a "
            "parameter nor a buffer; register it with register_buffer"
        ) from error


def _location(error: BaseException) -> str:
    """Return the innermost line of the module's own code."""
    return innermost_user_line(traceback.extract_tb(error.__traceback__))
