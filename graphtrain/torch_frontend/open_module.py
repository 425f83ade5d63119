"""Opening of imported models: the module is built, its blocks stacked, and it is traced once."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from graphtrain.errors import ImportedModelError, StrictFrontEndRequired
from graphtrain.models.batch_images import with_images
from graphtrain.torch_frontend.axes import name_axes
from graphtrain.torch_frontend.block_calls import BlocksDiffer
from graphtrain.torch_frontend.blocks import (
    UnrolledBlocks,
    cut_after,
    find_stacks,
    list_lengths,
    unroll,
)
from graphtrain.torch_frontend.image_text import ImageInputs
from graphtrain.torch_frontend.joint import find_writes_through_views
from graphtrain.torch_frontend.load_balancing import LoadBalancing
from graphtrain.torch_frontend.meta_module import MetaModule, build_on_meta
from graphtrain.torch_frontend.model import OpenedModel
from graphtrain.torch_frontend.module_factory import factory

if TYPE_CHECKING:
    from graphtrain.config.schema import TorchModel

_TOKENS = (2, 4)  # (batch, seq) of the trace that checks which blocks are identical

_opened: dict[str, OpenedModel] = {}


def open_model(model: TorchModel) -> OpenedModel:
    """Return the opened model of these settings; each is built once per process.

    Raises:
        ImportedModelError: the module cannot be built or traced.
    """
    key = json.dumps(asdict(model), sort_keys=True)
    if key not in _opened:
        _opened[key] = open_uncached(model)
    return _opened[key]


def open_uncached(model: TorchModel) -> OpenedModel:
    """Build and open the model without the cache of open_model, so that the caller may change it.

    Raises:
        ImportedModelError: the module cannot be built or traced.
    """
    meta = build_on_meta(factory(model))
    _check_parameters(meta, allow_frozen=model.hf is not None)
    assert model.vocab is not None
    axes = name_axes(meta.module, model.vocab, model.axes)
    balance = LoadBalancing.from_module(meta.module)
    inputs = ImageInputs.of(model, meta.module)
    opened = OpenedModel(model, meta, (), axes, balance, inputs=inputs)
    if model.front_end == "strict":
        return _open_strict(opened, 'program.model.front_end = "strict"')
    if (
        model.front_end == "auto"
        and not model.images
        and (writes := find_writes_through_views(meta, _TOKENS, opened.call))
    ):
        return _open_strict(opened, writes[0])
    try:
        return _open_traced(opened)
    except StrictFrontEndRequired as error:
        if model.front_end == "trace" or model.images:
            raise
        return _open_strict(opened, error.reason)


def _check_parameters(meta: MetaModule, *, allow_frozen: bool) -> None:
    if not any(parameter.requires_grad for parameter in meta.parameters().values()):
        raise ImportedModelError(f"{type(meta.module).__name__} has no parameters to train")
    for name, parameter in meta.parameters().items():
        frozen = not parameter.requires_grad and not allow_frozen
        if frozen or not parameter.is_floating_point():
            raise ImportedModelError(
                f"parameter {name} does not require a gradient or is not floating point, but all "
                "parameters of an imported model are trained: register it as a buffer, or set "
                "requires_grad = True"
            )


def _open_strict(opened: OpenedModel, reason: str) -> OpenedModel:
    """Return the model for the strict front end, which traces the module as one graph."""
    if opened.balance is not None:
        raise ImportedModelError(
            "output_router_logits adds a load-balancing loss, which the strict front end (used "
            f"because {reason}) does not support; set it to false in program.model.overrides"
        )
    block_lists = tuple(
        UnrolledBlocks(name, count, "the strict front end traces a module as one graph")
        for name, count in list_lengths(find_stacks(opened.meta.module)).items()
    )
    opened = replace(opened, block_lists=block_lists, strict=reason)
    return replace(opened, untrained=_untrained_paths(opened))


def _open_traced(opened: OpenedModel) -> OpenedModel:
    """Return the model for the trace front end; stacks whose blocks differ are unrolled."""
    block_lists = find_stacks(opened.meta.module)
    while True:
        opened = replace(opened, block_lists=tuple(block_lists))
        try:
            return _without_idle_blocks(replace(opened, untrained=_untrained_paths(opened)))
        except BlocksDiffer as error:
            parts = [unroll(error.stack, error.reason)]
            if opened.inputs is not None and error.read is not None:
                parts = cut_after(error.stack, error.read, error.reason)
            block_lists = [
                part
                for block_list in block_lists
                for part in (parts if block_list is error.stack else [block_list])
            ]


def _without_idle_blocks(opened: OpenedModel) -> OpenedModel:
    """Leave out lists of blocks whose parameters get no gradient, as those of a vision tower.

    Their parameters are constants, each by its own name; stages and caches need not know of them.
    """
    names = opened.parameter_names_by_path()
    untrained = {name for path in opened.untrained for name in names[path]}
    trained = opened.meta.parameters().keys() - untrained
    used = tuple(
        blocks
        for blocks in opened.block_lists
        if any(name.startswith(f"{blocks.name}.") for name in trained)
    )
    opened = replace(opened, block_lists=used)
    paths = opened.parameter_names_by_path()
    constant = (path for path, inside in paths.items() if untrained.issuperset(inside))
    return replace(opened, untrained=frozenset(constant))


def _untrained_paths(opened: OpenedModel) -> frozenset[str]:
    """Trace the module once, to check that it can be traced and that stacked blocks agree.

    Returns:
        Paths of the arrays that get no gradient, such as an indexer of sparse attention.

    Raises:
        BlocksDiffer: blocks of a stack differ.
        ImportedModelError: the module cannot be traced.
    """
    arrays = {
        path: jax.ShapeDtypeStruct(spec.shape, spec.dtype) for path, spec in opened.specs().items()
    }
    tokens, images = jax.ShapeDtypeStruct(_TOKENS, jnp.int32), _image_shape(opened, _TOKENS[0])
    key = jax.eval_shape(lambda: jax.random.key(0))

    def total(
        arrays: dict[str, Any], tokens: jax.Array, images: jax.Array | None, key: jax.Array
    ) -> jax.Array:
        with with_images(images):
            return opened.logits(opened.cast_parameters(arrays), tokens, key, verify=True).sum()

    traced = jax.make_jaxpr(jax.grad(total))(arrays, tokens, images, key).jaxpr
    zeros = {
        out
        for equation in traced.eqns
        if equation.primitive.name == "broadcast_in_dim"
        for out in equation.outvars
        if isinstance(equation.invars[0], Literal) and equation.invars[0].val == 0
    }
    paths = sorted(arrays)  # the order of a dict's leaves
    return frozenset(path for path, out in zip(paths, traced.outvars, strict=True) if out in zeros)


def _image_shape(opened: OpenedModel, rows: int) -> jax.ShapeDtypeStruct | None:
    """Return shape and dtype of the images of so many rows; None if the model takes none."""
    if opened.inputs is None:
        return None
    layout = opened.inputs.layout
    shape = (rows, layout.images, layout.height, layout.width, 3)
    return jax.ShapeDtypeStruct(shape, jnp.uint8)
