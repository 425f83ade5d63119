"""A module's own forward pass, in which one scan replaces the loop over identical blocks.

While the module is called, the forward of each of its blocks is replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import jax
import torch

from graphtrain.torch_frontend.activation_checkpointing import checkpointed_forward
from graphtrain.torch_frontend.blocks import Stack, UnrolledBlocks
from graphtrain.torch_frontend.bridge import TraceEnvironment
from graphtrain.torch_frontend.scan import Scan, ScanHooks


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
                        checkpointed_forward(block, environment, remat),
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


def _in_context(
    context: Callable[[], AbstractContextManager[Any]], function: Callable[..., Any]
) -> Callable[..., Any]:
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with context():
            return function(*args, **kwargs)

    return wrapped
