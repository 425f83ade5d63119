"""Presets: published models by name, for [program.model] preset."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path
from typing import Any

from graphtrain.errors import ConfigError
from sharding_rules.documents import read_toml
from sharding_rules.paths import check_local_path

_FILE = Path(__file__).with_name("presets.toml")
_MERGED_TABLES = ("moe", "latent_attention")  # whose entries do not depend on each other's kind


def preset_settings(preset: str) -> dict[str, Any]:
    """Return the settings of a published model, or those of a .toml file with a [program.model].

    Raises:
        ConfigError: the model or the file does not exist.
    """
    if preset.endswith(".toml"):
        return _settings_in(Path(preset))
    presets = read_toml(_FILE)
    if preset not in presets:
        close_matches = get_close_matches(preset[:100], presets, n=3)
        hint = (
            f"did you mean {' or '.join(close_matches)}?"
            if close_matches
            else f"known: {', '.join(presets)}"
        )
        raise ConfigError(f'program.model.preset = "{preset[:100]}": no such model; {hint}')
    settings = dict(presets[preset])
    del settings["parameters"]
    if "like" in settings:
        settings = preset_settings(settings.pop("like")) | settings
    return settings


def _settings_in(path: Path) -> dict[str, Any]:
    try:
        return program_model_table(read_toml(Path(check_local_path(str(path)))))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f'program.model.preset = "{path}": the file has no [program.model] ({reason})'
        ) from error


def program_model_table(document: dict[str, Any]) -> dict[str, Any]:
    """Return the table [program.model] of a document.

    Raises:
        ValueError: it has none, or it is not a table.
    """
    program = document.get("program")
    model = program.get("model") if isinstance(program, dict) else None
    if not isinstance(model, dict):
        raise ValueError("the file has no table [program.model]")
    return model


def apply_preset(document: dict[str, Any]) -> None:
    """Replace `preset` in a document by its settings, which the document's own override.

    Tables of mixtures and of latent attention are overridden entry by entry, others as a whole.

    Raises:
        ConfigError: the preset does not exist.
    """
    program = document.get("program")
    model = program.get("model") if isinstance(program, dict) else None
    if (
        isinstance(program, dict)
        and isinstance(model, dict)
        and isinstance(model.get("preset"), str)
    ):
        overrides = {name: value for name, value in model.items() if name != "preset"}
        settings = preset_settings(model["preset"])
        for name in _MERGED_TABLES:
            if isinstance(settings.get(name), dict) and isinstance(overrides.get(name), dict):
                overrides[name] = settings[name] | overrides[name]
        program["model"] = settings | overrides
