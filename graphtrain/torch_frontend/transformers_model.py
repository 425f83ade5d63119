"""Construction of transformers' causal language models from a configuration."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any

import torch

from graphtrain.config.hf_quantization import QUANTIZATION_CONFIG, read_quantization
from graphtrain.errors import ImportedModelError
from graphtrain.torch_frontend import expert_loops, private_torch

_MODELS = os.path.join("transformers", "models", "")
_MISSPELT = 0.9  # similarity of a name to the one that was meant
_AUTO = os.path.join(_MODELS, "auto", "")


def from_config(config: dict[str, Any], *, with_images: bool = False) -> torch.nn.Module:
    """Build the model of a config.json with newly initialised float32 weights.

    Nothing is downloaded.

    Args:
        config: contents of config.json.
        with_images: whether to build the model of text and images, with its vision tower.

    Raises:
        ImportedModelError: transformers has no such model, or rejects the config.
        WeightsError: the folder's weights are quantized in a way that graphtrain does not read.
    """
    from transformers import CONFIG_MAPPING, AutoConfig, __version__
    from transformers.utils import logging

    from graphtrain.torch_frontend import hf_attention

    logging.set_verbosity_error()
    settings = with_special_floats(
        {name: value for name, value in config.items() if name != "model_type"}
    )
    model_type = config["model_type"]
    read_quantization(config)  # refuses weights that could not be read
    settings.pop(QUANTIZATION_CONFIG, None)
    if model_type not in CONFIG_MAPPING:
        raise ImportedModelError(
            f"transformers {__version__} has no model_type {model_type!r}; for a model whose code "
            'is in its folder, set program.model.torch = "module:factory" instead of hf'
        )
    with _explain_config_errors(model_type):
        hf_config = AutoConfig.for_model(model_type, **settings)
    find_class = private_torch.image_text_class if with_images else private_torch.causal_model_class
    model_class = find_class(hf_config)
    if model_class is None:
        kind = "model of text and images" if with_images else "causal language model"
        raise ImportedModelError(f"transformers has no {kind} of model_type {model_type!r}")
    hf_config.use_cache = False
    options: dict[str, Any] = {"dtype": torch.float32}
    if private_torch.accepts_experts(model_class):
        from graphtrain.torch_frontend.experts import register

        options["experts_implementation"] = register()
    if hf_attention.uses_attention_interface(model_class, hf_config):
        hf_attention.register()
        options["attn_implementation"] = hf_attention.IMPLEMENTATION
    with _explain_config_errors(model_type):
        model = private_torch.build_causal_model(model_class, hf_config, options)
    if with_images:
        from graphtrain.torch_frontend.vision_tower import prepare_tower

        prepare_tower(model)
    expert_loops.replace_loops(model)
    store_buffers_as_parameters(model)
    list_tied_sources_first(model)
    return model


def check_overrides(config: dict[str, Any], overrides: Mapping[str, Any]) -> None:
    """Refuse misspelt overrides, which would do nothing.

    Other names that the class of the configuration does not have are accepted: some of them are
    read, such as rope_theta.

    Args:
        config: contents of config.json.
        overrides: settings that replace those of the file.

    Raises:
        ImportedModelError: an override has almost the name of a setting.
    """
    from transformers import CONFIG_MAPPING

    if config["model_type"] not in CONFIG_MAPPING:
        return  # from_config() refuses it
    config_class = CONFIG_MAPPING[config["model_type"]]
    try:
        settings = vars(config_class())
    except Exception:  # it has settings without a default
        return
    known = {name for name in (*settings, *config_class.attribute_map) if name[0] != "_"}
    known |= config.keys()
    for name in overrides:
        if not hasattr(config_class, name) and name not in known:
            for close in get_close_matches(name, known, n=1, cutoff=_MISSPELT):
                raise ImportedModelError(
                    f"program.model.overrides.{name}: {config['model_type']} has no such setting; "
                    f"did you mean {close}?"
                )


def with_special_floats(value: Any) -> Any:
    """Replace what config.json has in place of infinity and NaN, which JSON has not."""
    if isinstance(value, dict):
        if list(value) == ["__float__"]:
            return float(value["__float__"])
        return {name: with_special_floats(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [with_special_floats(inner) for inner in value]
    return value


def list_tied_sources_first(module: Any) -> None:
    """Let PyTorch list a tied weight by the name that it has in folders: that of its source.

    CamemBERT and its kin construct the head before the embeddings.
    """
    for tied, source in private_torch.tied_weights(module).items():
        head = tied.partition(".")[0]
        names = [name for name, _ in module.named_children()]
        if names.index(head) < names.index(source.partition(".")[0]):
            child = getattr(module, head)
            delattr(module, head)
            setattr(module, head, child)


def store_buffers_as_parameters(module: torch.nn.Module) -> None:
    """Replace persistent floating-point buffers by parameters without a gradient.

    Checkpoints contain their values, such as the bias by which DeepSeek-V3 selects experts. As
    parameters, they are read, stored and exported like weights. Other buffers are constants of the
    model.
    """
    stored = module.state_dict().keys()
    for name, buffer in list(module.named_buffers()):
        if name in stored and buffer.is_floating_point():
            owner, _, attribute = name.rpartition(".")
            inner = module.get_submodule(owner)
            delattr(inner, attribute)
            inner.register_parameter(attribute, torch.nn.Parameter(buffer, requires_grad=False))


@contextmanager
def _explain_config_errors(model_type: str) -> Iterator[None]:
    """Turn any error about a configuration into an ImportedModelError."""
    try:
        yield
    except Exception as error:
        message = " ".join(str(error).split())
        raise ImportedModelError(
            f"transformers rejects the configuration of a {model_type}: {type(error).__name__}"
            f"{_line_of_model(error)}: {message}"
        ) from error


def _line_of_model(error: Exception) -> str:
    """Return where an error came from in the modules of models, as " at FILE:LINE"; or nothing."""
    frames = traceback.extract_tb(error.__traceback__)
    frames = [one for one in frames if _MODELS in one.filename and _AUTO not in one.filename]
    return f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""


def use_transformers_implementations(module: Any) -> None:
    """Switch a model to transformers' own attention and experts, as the reference for parity."""
    expert_loops.restore_loops(module)
    module.set_attn_implementation(module.get_correct_attn_implementation(None))
    if private_torch.accepts_experts(type(module)):
        module.set_experts_implementation("eager")
