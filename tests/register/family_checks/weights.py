"""Folders of save_pretrained, read and written again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file

from family_checks.states import Mismatch, values
from graphtrain.config.schema import TorchModel
from graphtrain.torch_frontend.module_factory import factory
from graphtrain.torch_frontend.open_module import open_model
from graphtrain.torch_frontend.parity import stack_weights, unstack_weights
from graphtrain.weights.imported_folder import HuggingFaceWeights
from graphtrain.weights.published import SavedTensors
from graphtrain.weights.torch_modules import stored_buffers
from lowering.trees import Tree, flatten, unflatten


def check_weights(model: TorchModel, folder: Path) -> str:
    """Read what transformers saved, write it again; all tensors are equal bit for bit."""
    opened, module = open_model(model), factory(model)()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    folder = folder / "saved"
    module.save_pretrained(folder)
    published = replace(model, hf=str(folder))
    if values(factory(published)()).keys() != values(module).keys():
        raise Mismatch("the saved config.json describes a model with other parameters")
    expected = stack_weights(opened, values(module))
    described = {path: SimpleNamespace(shape=array.shape) for path, array in expected.items()}
    found = flatten(HuggingFaceWeights(folder, published).parameters(unflatten(described), _fill))
    for path, array in expected.items():
        if not np.array_equal(found[path], array):
            raise Mismatch(f"{path} is not what the folder contains")
    saved = load_file(folder / "model.safetensors")
    arrays = unstack_weights(opened, found) | stored_buffers(opened.meta)
    tensors = SavedTensors(opened.meta.module, {name: one.shape for name, one in arrays.items()})
    written: dict[str, np.ndarray] = {}
    for name, array in arrays.items():
        written |= dict(tensors.add(name, array))
    _compare(written, saved)
    return f"{len(saved)} tensors"


def _fill(tree: Tree, read: Any) -> Tree:
    """Read complete arrays of the described shapes."""
    arrays = {}
    for path, described in flatten(tree).items():
        everything = (slice(None),) * len(described.shape)
        arrays[path] = read(path, described.shape, everything)
    return unflatten(arrays)


def _compare(written: Mapping[str, np.ndarray], saved: Mapping[str, np.ndarray]) -> None:
    if different := written.keys() ^ saved.keys():
        name = sorted(different)[0]
        where = "exported" if name in written else "saved by transformers"
        raise Mismatch(f"{name} and {len(different) - 1} others are only {where}")
    for name, array in saved.items():
        if not np.array_equal(written[name], array):
            raise Mismatch(f"{name} is exported with other values")
