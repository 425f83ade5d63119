"""Native equivalent of an imported PyTorch model, for estimates that need its sizes."""

import re
from dataclasses import replace

from pydantic import ValidationError

from graphtrain.config.hf_config import layers_in_front
from graphtrain.config.schema import (
    Adapter,
    FlaxModel,
    Model,
    PipelineSettings,
    Program,
    TorchModel,
    is_imported,
)
from graphtrain.errors import PlanError

# What transformers calls them.
_NAMES_HEAD = re.compile(r"(lm_head|embed_out)\b")
_NAMES_EMBEDDING = re.compile(r"(embed_tokens|wte|embed_in|word_embeddings)\b")


def sizes_unknown(program: Program) -> bool:
    """Return whether the model's sizes are unknown without building its PyTorch module.

    Callers that must not build the module, such as a run, check this first. The config.json of a
    model of text and images leaves sizes to defaults that only its module has.
    """
    model = program.model
    if isinstance(model, TorchModel) and model.images:
        return True
    native = _native(program, build=False)
    return native is None or _replaced(program, native) is None


def with_native_model(program: Program) -> Program:
    """Return the program with a native model of the same sizes, which estimates can use.

    Raises:
        PlanError: the sizes are not known.
    """
    native = _native(program)
    if native is None and isinstance(program.model, TorchModel) and program.model.images:
        raise PlanError(
            "program.model.images: estimates know the vision towers of Llava and Qwen2.5-VL, and "
            "not that of this model; use graphtrain compile, or inspect single arrays with --array"
        )
    if native is None:
        raise PlanError(
            "this estimate needs the sizes of a language model, and its configuration and its "
            "token embedding do not show them, or not which experts process a token; use "
            "graphtrain compile, or inspect single arrays with --array"
        )
    replaced = _replaced(program, native)
    if replaced is None:
        raise PlanError(
            "this estimate needs a native model of the same sizes, and that one does not support "
            "the settings of this program, such as latent attention with products in 8 bits; use "
            "graphtrain compile, or inspect single arrays with --array"
        )
    return replaced


def _replaced(program: Program, native: Model) -> Program | None:
    """Return the program with a native model; None if that one does not support its settings."""
    if native is program.model:
        return program
    loss = replace(program.loss, chunk="none")  # a PyTorch module computes its own logits
    native, pipeline = _with_layers_outside(program, native)
    adapter = _native_adapter(program, native)
    try:
        return replace(program, model=native, pipeline=pipeline, loss=loss, adapter=adapter)
    except ValidationError:
        return None


def _with_layers_outside(program: Program, native: Model) -> tuple[Model, PipelineSettings]:
    """Return a native model and its pipeline, if layers of the model are outside of the stages.

    Dense layers before a mixture are in front of the stages in both. Others are counted as layers
    of the stages, which are then divided evenly; `with_padding_layers` adds the memory of their
    copies.
    """
    pipeline = program.pipeline
    outside = native.depth - _layers_in_stages(program, native)
    if program.mesh.stage == 1 or outside <= native.dense_layers:
        return native, pipeline
    return native, replace(pipeline, layers_per_stage=None)


def _layers_in_stages(program: Program, native: Model) -> int:
    """Return the number of layers that the pipeline stages of an imported model divide."""
    model, given = program.model, program.pipeline.layers_per_stage
    if given is not None:
        return sum(given)
    if not isinstance(model, TorchModel) or model.hf is None:
        return native.layers
    return native.depth - layers_in_front(model.hf, model.overrides)


def _native_adapter(program: Program, native: Model) -> Adapter | None:
    """Return the adapter of an imported model, as one of all matrices of the native model.

    The names of its patterns are those of a module; of what is trained in full, the embedding and
    the LM head matter.
    """
    if program.adapter is None:
        return None
    saved = set()
    for pattern in program.adapter.modules_to_save:
        if _NAMES_HEAD.search(pattern) and not native.tie_word_embeddings:
            saved.add("head")
        elif _NAMES_HEAD.search(pattern) or _NAMES_EMBEDDING.search(pattern):
            saved.add("embedding/tokens")
    names = tuple(sorted(saved))
    return replace(program.adapter, target_modules=("*",), modules_to_save=names)


def _native(program: Program, *, build: bool = True) -> Model | None:
    """Return the native model of the same sizes; None if they are unknown, or need `build`."""
    model = program.model
    if not is_imported(model):
        return model
    if isinstance(model, FlaxModel):
        return None
    from graphtrain.torch_frontend.native_equivalent import native_equivalent

    return native_equivalent(model, build=build)
