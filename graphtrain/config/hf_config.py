"""Reader of the config.json of a Hugging Face model; imports neither transformers nor PyTorch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from typing_extensions import TypedDict  # pydantic refuses that of typing before Python 3.12

from graphtrain.errors import ImportedModelError
from graphtrain.files import validate
from sharding_rules.documents import DocumentError, read_object

HF_FILES = "hugging_face"  # folder of Hugging Face files other than weights

_Count = Annotated[int, Field(ge=0, le=2**31 - 1)]
_Layers = Annotated[int, Field(ge=0, le=10_000)]  # as program.model.layers


class _HFConfig(TypedDict, total=False):
    """Types of the entries of config.json that this project reads for many families."""

    model_type: str | None
    architectures: list[str] | None
    num_hidden_layers: _Layers | None
    n_layer: _Layers | None
    num_layers: _Layers | None
    hidden_size: _Count | None
    num_attention_heads: _Count | None
    intermediate_size: Any  # one for each layer in some families
    vocab_size: _Count | None
    max_position_embeddings: _Count | None
    num_local_experts: _Count | None
    num_experts: _Count | None
    n_routed_experts: _Count | None
    rope_parameters: dict[str, Any] | None
    rope_scaling: dict[str, Any] | None
    layer_types: list[str] | None


def config_path(hf: str) -> Path:
    """Return the path of config.json, given its folder or the file itself."""
    path = Path(hf)
    return path / "config.json" if path.is_dir() else path


def read_config(hf: str, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Read a model's config.json and apply the overrides to it.

    Those of a part (text_config, vision_config) replace only the entries that they name.

    Raises:
        ImportedModelError: it cannot be read, or is not the configuration of a model.
    """
    path = config_path(hf)
    try:
        config = read_config_json(path)
    except OSError as error:
        raise ImportedModelError(
            f'program.model.hf = "{hf}": {path} cannot be read ({error.strerror}); set it to a '
            "local folder that contains config.json, or to such a file; nothing is downloaded"
        ) from None
    except DocumentError as error:
        raise ImportedModelError(f"{path} cannot be used: {error}") from None
    if "model_type" not in config:
        raise ImportedModelError(
            f"{path} has no model_type, so it is not the configuration of a transformers model"
        )
    if "text_config" in overrides and not isinstance(config.get("text_config"), dict):
        raise ImportedModelError(
            f"program.model.overrides: {path} states the settings of the language model beside the "
            "others, without text_config; override them there"
        )
    return with_overrides(config, overrides)


def with_overrides(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration, or overrides, with further overrides.

    Those of a part (text_config, vision_config) replace only the entries that they name.
    """

    def merged(name: str, value: Any) -> Any:
        part = config.get(name) if name.endswith("_config") else None
        return part | value if isinstance(part, dict) and isinstance(value, dict) else value

    return {**config, **{name: merged(name, value) for name, value in overrides.items()}}


def read_config_json(path: Path) -> dict[str, Any]:
    """Read a config.json, and check the types of the entries that are common to many families.

    Raises:
        OSError: the file cannot be read.
        DocumentError: it is not JSON, or an entry has an impossible value.
    """
    config = read_object(path)
    validate(_HFConfig, config)
    return config


def vocab_size(hf: str, overrides: Mapping[str, Any]) -> int | None:
    """Return the vocabulary size in the configuration, or None."""
    return _size(read_config(hf, overrides), ("vocab_size",))


def with_vocab_size(config: Mapping[str, Any], rows: int) -> dict[str, Any]:
    """Return a configuration with another vocabulary size, in every part that states it.

    A negative pad_token_id, which counts from the end, names the same token as before.
    """
    changed = dict(config)
    if isinstance(size := config.get("vocab_size"), int):
        changed["vocab_size"] = rows
        padding = config.get("pad_token_id")
        if isinstance(padding, int) and padding < 0:
            changed["pad_token_id"] = size + padding
    text = config.get("text_config")
    if isinstance(text, dict) and isinstance(text.get("vocab_size"), int):
        changed["text_config"] = with_vocab_size(text, rows)
    return changed


# Size of the native model: names that the model families of transformers give it.
SIZE_NAMES = {
    "layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "embed": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head", "num_heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads"),
    "mlp": ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "moe_intermediate_size"),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
}


def layer_count(hf: str, overrides: Mapping[str, Any]) -> int | None:
    """Return the number of layers that the configuration states; None if it states none."""
    return _size(read_config(hf, overrides), SIZE_NAMES["layers"])


def layers_in_front(hf: str, overrides: Mapping[str, Any]) -> int:
    """Return the number of dense layers before those of a mixture, if the configuration states it.

    Pipeline stages divide the layers of the mixture; the dense ones are in front of them.
    """
    config = read_config(hf, overrides)
    layers = _size(config, SIZE_NAMES["layers"]) or 0
    in_front = _size(config, ("first_k_dense_replace",)) or 0
    return in_front if in_front < layers else 0


def _size(config: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    """Return a size of a language model; one of text and images may state it for its text alone."""
    text = config.get("text_config")
    parts = (config, text if isinstance(text, dict) else {})
    return next((size for part in parts if (size := first_int(part, names)) is not None), None)


def first_int(config: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    """Return the first of several settings that is an integer; None if none is."""
    return next((config[name] for name in names if isinstance(config.get(name), int)), None)
