"""Reader of the config.json of a Hugging Face model; imports neither transformers nor PyTorch."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from graphtrain.errors import ImportedModelError


def config_path(hf: str) -> Path:
    """The config.json of a folder, or the file itself."""
    path = Path(hf)
    return path / "config.json" if path.is_dir() else path


def read_config(hf: str, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """A model's configuration, with the settings that replace some of it.

    Raises:
        ImportedModelError: there is none, or it is not one of a model.
    """
    path = config_path(hf)
    try:
        config = json.loads(path.read_text())
    except OSError as error:
        raise ImportedModelError(
            f'hf = "{hf}": {path} cannot be read ({error.strerror}); name a folder with a '
            "config.json, or such a file; nothing is downloaded"
        ) from None
    except ValueError as error:
        raise ImportedModelError(f"{path} is no JSON: {error}") from None
    if not isinstance(config, dict) or "model_type" not in config:
        raise ImportedModelError(f"{path} has no model_type, so it is no model of transformers")
    return config | dict(overrides)


def vocabulary(hf: str, overrides: Mapping[str, Any]) -> int | None:
    """Rows of the embedding as the configuration has them."""
    config = read_config(hf, overrides)
    found = config.get("vocab_size")
    return found if isinstance(found, int) else None


# Size of the native model: names that the model families of transformers give it.
SIZE_NAMES = {
    "layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "embed": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head", "num_heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads"),
    "mlp": ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "moe_intermediate_size"),
    "experts": ("num_local_experts", "num_experts"),
}


def layer_count(hf: str, overrides: Mapping[str, Any]) -> int | None:
    """Return the number of layers that the configuration states; None if it states none."""
    return first_int(read_config(hf, overrides), SIZE_NAMES["layers"])


def first_int(config: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    """Return the first of several settings that is an integer; None if none is."""
    return next((config[name] for name in names if isinstance(config.get(name), int)), None)
