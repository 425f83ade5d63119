"""Choice of a model's implementation: the native decoder, or one of PyTorch or Flax."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphtrain.config.schema import FlaxModel, Model, is_imported
from graphtrain.models.flax_module import FlaxLanguageModel
from graphtrain.models.native import NativeModel

if TYPE_CHECKING:
    from graphtrain.models.protocol import LanguageModel


def open_language_model(settings: Model) -> LanguageModel:
    """Return the language model of `settings`, a [program.model] of either kind.

    It costs nothing: JAX and PyTorch are imported, and a module is built, when a function needs it.
    """
    if not is_imported(settings):
        return NativeModel(settings)
    if isinstance(settings, FlaxModel):
        return FlaxLanguageModel(settings)
    from graphtrain.torch_frontend.language_model import TorchLanguageModel

    return TorchLanguageModel(settings)
