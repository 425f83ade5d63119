"""Native equivalent of an imported PyTorch model, for estimates that need its sizes."""

import re
from dataclasses import replace

from graphtrain.config.schema import Adapter, FlaxModel, Model, Program, TorchModel, is_imported
from graphtrain.errors import PlanError

# What transformers calls them.
_NAMES_HEAD = re.compile(r"(lm_head|embed_out)\b")
_NAMES_EMBEDDING = re.compile(r"(embed_tokens|wte|embed_in|word_embeddings)\b")


def sizes_unknown(program: Program) -> bool:
    """Return whether the model's sizes are unknown without building its PyTorch module.

    Callers that must not build the module, such as a run, check this first.
    """
    return _native(program, build=False) is None


def with_native_model(program: Program) -> Program:
    """Return the program with a native model of the same sizes, which estimates can use.

    Raises:
        PlanError: the sizes are not known.
    """
    native = _native(program)
    if native is None and isinstance(program.model, TorchModel) and program.model.images:
        raise PlanError(
            "program.model.images: estimates do not count a vision tower; use graphtrain compile, "
            "or inspect single arrays with --array"
        )
    if native is None:
        raise PlanError(
            "this estimate needs the sizes of a language model, and neither its configuration nor "
            "a token embedding shows them (a vision tower is not estimated); use graphtrain "
            "compile, or inspect single arrays with --array"
        )
    if native is program.model:
        return program
    loss = replace(program.loss, chunk="none")  # a PyTorch module computes its own logits
    return replace(program, model=native, loss=loss, adapter=_native_adapter(program, native))


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

    return native_equivalent(model) if build or model.hf is not None else None
