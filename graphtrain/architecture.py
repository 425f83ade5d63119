"""A program's model, native or of PyTorch, as pure functions: the one place that knows which.

PyTorch is imported only for a model that is one of its own.
"""

from __future__ import annotations

from typing import Any

import jax

from graphtrain.config.schema import Model, is_imported
from graphtrain.models import decoder
from lowering.trees import Tree, unflatten


def parameter_specs(model: Model) -> Tree:
    """The tree of parameters as ArraySpecs; allocates nothing."""
    if is_imported(model):
        return unflatten(_open(model).specs())
    return decoder.parameter_specs(model)


def initialise(model: Model, key: jax.Array) -> Tree:
    """New float32 parameters, in the tree of parameter_specs."""
    if is_imported(model):
        return _open(model).initialise(key)
    return decoder.initialise(model, key)


def drops(model: Model) -> bool:
    """Whether training may drop something, so that it takes a key."""
    return is_imported(model) or bool(model.dropout)


def forward(
    model: Model, parameters: Tree, tokens: jax.Array, *, dropout_key: jax.Array | None = None
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Scores of every next token, and what the layers add to the loss."""
    if is_imported(model):
        return _open(model).forward(parameters, tokens, dropout_key)
    return decoder.forward(model, parameters, tokens, dropout_key=dropout_key)


def logits(model: Model, parameters: Tree, tokens: jax.Array) -> jax.Array:
    """Scores of every next token, with nothing dropped."""
    return forward(model, parameters, tokens)[0]


def _open(model: Any) -> Any:
    from graphtrain.torch_models.versions import check_versions, installed

    check_versions(installed(), hf=model.hf is not None)  # before an import fails in other words
    from graphtrain.torch_models.model import open_model

    return open_model(model)
