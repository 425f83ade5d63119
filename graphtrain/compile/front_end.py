"""Checks of a PyTorch model before its first trace, and the front end that they select.

They are not part of the model protocol: tracing does not import them, and their sources are not in
cache keys, because they change no program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import lowering
from graphtrain.config.resolve import ResolvedProgram
from graphtrain.config.schema import TorchModel
from lowering.machine.extras import optional_import

if TYPE_CHECKING:
    from graphtrain.cache import Cache


def check_model(
    program: ResolvedProgram, cache: Cache, say: Callable[[str], None], *, generates: bool
) -> ResolvedProgram:
    """Return the program with the front end that reproduces PyTorch's results.

    A native program is returned as it is. The cache records the results of checks, so that a model
    is checked once.

    Args:
        program: the program.
        cache: the cache.
        say: called with each stage.
        generates: whether the graph to be traced uses a KV cache, which replaces attention alone.

    Raises:
        ImportedModelError: the model differs from PyTorch, or mixes positions outside of attention
            in a program where it must not.
    """
    if (model := _torch_model(program)) is None:
        return program
    say("comparing with PyTorch")
    from graphtrain.torch_frontend.versions import check_versions, installed

    check_versions(installed(), hf=model.hf is not None)
    from graphtrain.torch_frontend.document_isolation import ensure_documents_isolated
    from graphtrain.torch_frontend.parity import ensure_parity

    target = program.target
    lowering.backend(target).compile_devices(target)  # must precede other uses of JAX devices
    strict = ensure_parity(model, cache.root).strict
    model = replace(model, front_end="strict") if strict else model
    split = program.mesh.size(program.rules.activations.get("kv_seq", ())) > 1
    if not program.batch.cross_document_attention or split or generates:
        ensure_documents_isolated(model, cache.root)
    if strict:
        say(f"front end: strict, because {strict}")
    return program.with_settings(replace(program.settings, model=model))


def describe_model(program: ResolvedProgram, store: Path) -> Iterator[str]:
    """Yield lines on how a PyTorch model is traced and sharded; none for a native model.

    Args:
        program: the program.
        store: directory of the cache, which may have the results of the model's checks.
    """
    if (model := _torch_model(program)) is not None:
        with optional_import("program.model.torch"):
            from graphtrain.torch_frontend.describe import describe

        yield from describe(model, store, program.stages)


def _torch_model(program: ResolvedProgram) -> TorchModel | None:
    return program.model if isinstance(program.model, TorchModel) else None
