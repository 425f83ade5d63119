"""Settings that forbid an export of a model to Hugging Face."""

from dataclasses import fields, replace
from typing import Any

from graphtrain.config.render import toml
from graphtrain.config.schema import Model
from graphtrain.errors import WeightsError
from graphtrain.weights.families import FAMILIES, Family, functional_settings
from graphtrain.weights.families.settings import EnumSetting

_MAX_NAMED = 4  # settings to change; a family that needs more is not near


def export_obstacle(model: Model) -> str | None:
    """Return why no Hugging Face family has a native model; None if one has.

    The reason names the nearest family, and the settings to change for it.
    """
    model = replace(model, vocab=model.vocab_tokens, vocab_padding=None)
    needed = [(family, _changes(family, model)) for family in FAMILIES]
    near = [(family, changes) for family, changes in needed if changes is not None]
    if any(not changes for _, changes in near):
        return None
    if not near:
        known = ", ".join(family.model_type for family in FAMILIES)
        return (
            "no Hugging Face family supports this combination of settings in [program.model]; "
            f"known families: {known}"
        )
    family, changes = min(near, key=lambda entry: len(entry[1]))
    settings = ", ".join(
        f"program.model.{name} = {_say(value)} (now {_say(getattr(model, name))})"
        for name, value in changes.items()
    )
    return (
        "no Hugging Face family supports this combination of settings in [program.model]; the "
        f"nearest, {family.model_type}, needs {settings}"
    )


def _changes(family: Family, model: Model) -> dict[str, Any] | None:
    """Return the settings to change for a family; None if it is not near."""
    changes: dict[str, Any] = {}
    for setting in family.settings:
        if isinstance(setting, EnumSetting):
            values = list(setting.values.values())
            if getattr(model, setting.setting) not in values:
                changes[setting.setting] = values[0]
    try:
        changed = replace(model, **changes)
        expressed = family.model_from_config(family.config_from_model(changed))
    except (WeightsError, ValueError):  # a combination that the family or the decoder refuses
        return None
    wanted, found = functional_settings(changed), functional_settings(expressed)
    for field in fields(Model):
        if getattr(found, field.name) != getattr(wanted, field.name):
            changes[field.name] = getattr(expressed, field.name)
    # config.json of any family may state a module of multi-token prediction; few have its tensors.
    if changed.mtp_loss_weight is not None and family.unmapped_arrays(changed):
        changes["mtp_loss_weight"] = None
    return changes if len(changes) <= _MAX_NAMED else None


def _say(value: Any) -> str:
    return "unset" if value is None else toml(value)
