"""Outputs of an imported model's modules as named activations, under the modules' own names.

A name is the module's path with slashes. That of a module with children ends in "/output", so that
no name is the beginning of another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import jax.numpy as jnp
import torch

from graphtrain.torch_frontend.blocks import Stack, UnrolledBlocks
from graphtrain.torch_frontend.bridge import Tensor, TraceEnvironment
from lowering.tracing.recording import is_recording, record

BLOCK = "output"  # name of a block's output, inside a loop over blocks


@contextmanager
def record_modules(
    module: torch.nn.Module,
    lists: Sequence[Stack | UnrolledBlocks],
    environment: TraceEnvironment,
    tokens: tuple[int, ...],
) -> Iterator[None]:
    """Record outputs of modules that are called inside the block, if anything is recorded.

    Of blocks in a scan, the modules of the first are hooked, because the scan calls that one. Of
    other blocks only the outputs are recorded, since their inside may be recomputed.

    Args:
        module: the model.
        lists: its lists of blocks.
        environment: of torchax.
        tokens: shape of the token ids, with which a recorded output begins.
    """
    if not is_recording():
        yield
        return
    with ExitStack() as stack:
        for name, submodule in _outer_modules(module, lists):
            _hook(stack, name, submodule, environment, tokens)
        for blocks in lists:
            if isinstance(blocks, Stack) and blocks.period == 1:
                first = module.get_submodule(f"{blocks.name}.{blocks.start}")
                for name, submodule in first.named_modules():
                    if name:
                        _hook(stack, name, submodule, environment, tokens)
        yield


def name_of_output(path: str, module: torch.nn.Module) -> str:
    """Return the name of a module's output; empty if a child of it has that name."""
    children = dict(module.named_children())
    if not children:
        return path.replace(".", "/")
    return "" if BLOCK in children else f"{path}.{BLOCK}".replace(".", "/")


def is_activation(shape: tuple[int, ...], is_floating: bool, tokens: tuple[int, ...]) -> bool:
    """Return whether an output has a value for each token."""
    return is_floating and len(shape) >= 2 and tuple(shape[:2]) == tuple(tokens)


def _outer_modules(
    module: torch.nn.Module, lists: Sequence[Stack | UnrolledBlocks]
) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield the modules outside of blocks, and blocks that no scan runs."""
    single_blocks = {
        f"{blocks.name}.{number}"
        for blocks in lists
        if isinstance(blocks, UnrolledBlocks)
        for number in blocks.numbers
    }
    for name, submodule in module.named_modules():
        is_inside = any(name.startswith(f"{blocks.name}.") for blocks in lists)
        if name and (not is_inside or name in single_blocks):
            yield name, submodule


def _hook(
    stack: ExitStack,
    path: str,
    module: torch.nn.Module,
    environment: TraceEnvironment,
    tokens: tuple[int, ...],
) -> None:
    name = name_of_output(path, module)

    def keep(_: Any, inputs: Any, output: Any) -> Any:
        first = output[0] if isinstance(output, tuple) and output else output
        if type(first) is not Tensor:  # none, or a placeholder of a block
            return None
        array = first.jax()
        if not is_activation(array.shape, jnp.issubdtype(array.dtype, jnp.floating), tokens):
            return None
        array = record(name, array, "batch", "seq", *[None] * (array.ndim - 2))
        new = Tensor(array, environment)
        return (new, *output[1:]) if isinstance(output, tuple) else new

    if name:
        stack.callback(module.register_forward_hook(keep).remove)
