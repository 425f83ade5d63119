"""Descriptions of the configurations of stored programs, from the parts of their requests.

Parts may come from an older version or from another user, so every setting may be absent.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from graphtrain.cache.summaries import parse_part

_MAX_DIFFERENCES = 3  # settings that distinguish one configuration from another in a listing
_MAX_VALUE_LENGTH = 60  # characters; longer values are described only as different

Settings = Mapping[str, Any]  # values by dotted name, for example "model.layers"


class SettingsText(NamedTuple):
    """The parts of a request that its configuration determines, as JSON text, not parsed."""

    program: bytes = b"null"
    mesh: bytes = b"null"
    rules: bytes = b"null"


@dataclass(frozen=True)
class Description:
    """Configuration of a program, in words; empty for what is not known."""

    model: str = ""
    batch: str = ""
    optimizer: str = ""
    loss: str = ""
    mesh: str = ""  # axes of more than one device

    def __str__(self) -> str:
        """Return one line; the optimizer and the loss only if they are not the default."""
        unusual = [self.optimizer] if self.optimizer != "AdamW" else []
        unusual += [self.loss] if self.loss != "cross entropy" else []
        mesh = f"mesh {self.mesh}" if self.mesh else ""
        return "; ".join(filter(None, [self.model, self.batch, *unusual, mesh]))


def settings_text(parts: Mapping[str, bytes]) -> SettingsText:
    """Return the parts of a request that its configuration determines."""
    return SettingsText(*(parts.get(name, b"null") for name in SettingsText._fields))


@cache  # thousands of requests share a few configurations
def describe_settings(text: SettingsText) -> Description:
    """Describe the configuration of a request."""
    settings = flatten(text)
    return Description(
        _model(settings), _batch(settings), _optimizer(settings), _loss(settings), _mesh(settings)
    )


@cache
def flatten(text: SettingsText) -> dict[str, Any]:
    """Return every setting by its dotted name, for example "model.layers" or "mesh.data"."""
    prefixes = {"program": "", "mesh": "mesh", "rules": "rules"}
    try:
        return {
            setting: value
            for part, prefix in prefixes.items()
            for setting, value in _leaves(parse_part(getattr(text, part)), prefix)
        }
    except RecursionError:  # nested too deeply to be a key of ours
        return {}


def distinction(settings: Settings, other: Settings) -> str:
    """Return the settings that differ from another configuration, for example "activation gelu"."""
    names = [name for name in {**settings, **other} if settings.get(name) != other.get(name)]
    shown = [_setting(name, settings.get(name)) for name in names[:_MAX_DIFFERENCES]]
    more = len(names) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def _leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(item, f"{name}.{key}" if name else key)
    else:
        yield name, value


def _setting(name: str, value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return f"{name} {text}" if len(text) <= _MAX_VALUE_LENGTH else f"another {name}"


def _model(settings: Settings) -> str:
    if "torch_xla" in settings:
        return "graph of a PyTorch/XLA script"
    adapter = settings.get("adapter.rank")
    sizes = _hugging_face(settings) or _user_code(settings) or _native(settings)
    return f"{sizes}; LoRA of rank {adapter}" if sizes and adapter else sizes


def _native(settings: Settings) -> str:
    layers, embed, vocab = (settings.get(f"model.{name}") for name in ("layers", "embed", "vocab"))
    if layers is None:
        return ""
    experts = settings.get("model.moe.experts")
    sizes = f"{_layers(layers)} x {embed}, vocab {vocab}"
    return f"{sizes}, {experts} experts" if experts else sizes


def _hugging_face(settings: Settings) -> str:
    kind = settings.get("model.hf.model_type")
    if kind is None:
        return ""
    layers, width = (settings.get(f"model.hf.{n}") for n in ("num_hidden_layers", "hidden_size"))
    return f"{kind}" + (f", {_layers(layers)} x {width}" if layers and width else "")


def _layers(count: object) -> str:
    return "1 layer" if count == 1 else f"{count} layers"


def _user_code(settings: Settings) -> str:
    names = {"Flax": "model.flax.name", "PyTorch": "model.torch.factory"}
    return next(
        (f"{kind} {settings[name]}" for kind, name in names.items() if name in settings), ""
    )


def _batch(settings: Settings) -> str:
    size, length = (settings.get(f"batch.{name}") for name in ("global_batch_size", "seq_len"))
    if size is None or length is None:
        return ""
    microbatches = settings.get("batch.microbatches", 1)
    divided = f" in {microbatches} microbatches" if microbatches != 1 else ""
    return f"{size} x {length} tokens{divided}"


def _optimizer(settings: Settings) -> str:
    custom = settings.get("optimizer.custom.name")
    if custom or "optimizer.beta1" not in settings:
        return str(custom or "")
    kind = str(settings.get("optimizer.kind", "adamw"))
    return "AdamW" if kind == "adamw" else kind.replace("_", "-")


def _loss(settings: Settings) -> str:
    custom = settings.get("loss.custom.name")
    return str(custom or settings.get("loss.kind", "")).replace("_", " ")


def _mesh(settings: Settings) -> str:
    axes = [(name.removeprefix("mesh."), size) for name, size in settings.items()
            if name.startswith("mesh.") and size != 1]  # fmt: skip
    return " x ".join(f"{name} {size}" for name, size in axes)
