"""Configuration of a Hugging Face folder that is given in place of one: its model as it is."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from graphtrain.config.hf_config import first_int, read_config_json
from graphtrain.config.render import toml_document
from graphtrain.errors import ConfigError
from sharding_rules.documents import DocumentError

_LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len")
_MOST_TOKENS = 2048  # of a sequence, unless program.serve.context_length is set


def hf_folder_config(path: Path) -> str | None:
    """Return a configuration, as TOML, for the model in a folder; None if there is none in it.

    The model is traced as it is, and what is computed with it is kept in `runs/NAME-DIGEST`.

    Raises:
        ConfigError: its config.json is damaged.
    """
    file = path / "config.json"
    if not file.is_file() or not any(path.glob("*.safetensors")):
        return None
    try:
        config = read_config_json(file)
    except (OSError, DocumentError) as error:
        raise ConfigError(f"{file} cannot be used: {error}") from None
    length = min(first_int(config, _LENGTHS) or _MOST_TOKENS, _MOST_TOKENS)
    dtype = config.get("dtype") or config.get("torch_dtype")
    folder = str(path.absolute())
    document: dict[str, Any] = {
        "program": {
            "model": {"hf": folder},
            "precision": {"compute": "float32" if dtype == "float32" else "bfloat16"},
            "batch": {"global_batch_size": 8, "seq_len": length},
        },
        "run": {
            "directory": f"runs/{_directory_name(folder)}",
            "steps": 1,
            "init_from": folder,
            "data": {"train": f"{folder}/no-data"},
        },
    }
    return toml_document(document)


def served_name(directory: str, init_from: str | None) -> str:
    """Return the name of a run's model: that of its directory, or of the folder in its place."""
    name = Path(directory).resolve().name
    if init_from is not None and name == _directory_name(init_from):
        return Path(init_from).name
    return name


def _directory_name(folder: str) -> str:
    """Return a name that no run may have, whose checkpoints would be read in place of `folder`."""
    return f"{Path(folder).name}-{hashlib.sha256(folder.encode()).hexdigest()[:8]}"
