"""Factories of modules: transformers' models by their config.json, and functions of the user."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from graphtrain.config.hf_config import read_config, with_vocab_size
from graphtrain.config.user_code import add_to_path
from graphtrain.errors import ImportedModelError
from graphtrain.torch_frontend.silent_failures import user_code_error
from graphtrain.torch_frontend.source import find_module_file, split_name

if TYPE_CHECKING:
    from graphtrain.config.schema import TorchModel


def factory(model: TorchModel) -> Callable[[], torch.nn.Module]:
    """Return a function that builds the module, with real weights unless a device is set.

    Raises:
        ImportedModelError: the config or the factory cannot be read or imported.
    """
    if model.hf is not None:
        # It keeps the functions of torch.nn.init that it finds, so never those of a recorder.
        importlib.import_module("transformers.initialization")
        from graphtrain.torch_frontend.transformers_model import check_overrides, from_config

        config = read_config(model.hf, model.overrides)
        if model.overrides:
            check_overrides(read_config(model.hf, {}), model.overrides)
        if model.vocab_padding and model.vocab:
            config = with_vocab_size(config, model.vocab)
        return lambda: from_config(config, with_images=bool(model.images))
    assert model.torch is not None
    name, function = split_name(model.torch)
    error_prefix = f'torch = "{model.torch}": '
    try:
        build_module = getattr(_import_module(name), function, None)
    except (Exception, SystemExit) as error:
        raise user_code_error(f"{error_prefix}importing {name}", error) from error
    if not callable(build_module):
        raise ImportedModelError(f"{error_prefix}{name} has no function {function}")

    def call() -> torch.nn.Module:
        try:
            return build_module(**model.overrides)  # pyright: ignore[reportReturnType]  (build_on_meta checks it)
        except (Exception, SystemExit) as error:
            overrides_text = f" (overrides = {dict(model.overrides)})" if model.overrides else ""
            raise user_code_error(f"{error_prefix}{function}{overrides_text}", error) from error

    return call


def _import_module(name: str) -> Any:
    path = find_module_file(name)
    if not name.endswith(".py"):
        return importlib.import_module(name)
    stem = path.stem
    if (loaded := sys.modules.get(stem)) and getattr(loaded, "__file__", None) == str(path):
        return loaded
    add_to_path(Path.cwd())
    spec = importlib.util.spec_from_file_location(stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[stem] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[stem]  # as import does
        raise
    return module
