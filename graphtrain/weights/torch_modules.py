"""Modules of imported models without weights, to which the tensors of a folder belong."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lowering.machine.extras import optional_import

if TYPE_CHECKING:
    import numpy as np

    from graphtrain.config.schema import TorchModel
    from graphtrain.torch_frontend.meta_module import MetaModule
    from graphtrain.torch_frontend.model import OpenedModel


def unpadded_module(opened: OpenedModel) -> MetaModule:
    """Return a model's module without rows that pad the vocabulary, and without weights."""
    model = opened.settings
    return opened.meta if model.vocab_padding is None else meta_module_of(model.without_padding())


def meta_module_of(model: TorchModel) -> MetaModule:
    """Build the module without weights."""
    purpose = "run.init_from: a folder with tensors that are no parameters of the module"
    with optional_import(purpose, "torch"):
        from graphtrain.torch_frontend.meta_module import build_on_meta
        from graphtrain.torch_frontend.module_factory import factory
    return build_on_meta(factory(model))


def stored_buffers(module: MetaModule) -> dict[str, np.ndarray]:
    """Return the constants of a module that folders contain, such as the tables of hash routing."""
    stored = module.module.state_dict()
    return {name: one.numpy() for name, one in module.buffers.items() if name in stored}
