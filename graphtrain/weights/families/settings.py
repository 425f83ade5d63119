"""Mappings of config.json entries to settings of a Model, one class for each kind of entry."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from graphtrain.config.schema import Model, RopeScaling
from graphtrain.errors import WeightsError
from graphtrain.weights.families.family import Config

_REQUIRED = object()


@dataclass(frozen=True)
class RenamedSetting:
    """Setting with the same values under another name."""

    setting: str
    key: str
    default: Any = _REQUIRED  # used if config.json omits the key

    def read(self, config: Config) -> dict[str, Any]:
        value = config.get(self.key)
        if value is None:
            value = self.default
        if value is _REQUIRED:
            raise WeightsError(f"config.json: {self.key} is missing; it is required")
        return {self.setting: value}

    def write(self, model: Model) -> dict[str, Any]:
        return {self.key: getattr(model, self.setting)}


@dataclass(frozen=True)
class EnumSetting:
    """Setting whose values have other names."""

    setting: str
    key: str
    values: dict[Any, Any]  # Hugging Face's value to graphtrain's
    default: Any  # Hugging Face's value if config.json omits the key

    def read(self, config: Config) -> dict[str, Any]:
        value = config.get(self.key)
        value = self.default if value is None else value
        if value not in self.values:
            supported = ", ".join(map(repr, self.values))
            raise WeightsError(f"config.json: {self.key} = {value!r} is not one of {supported}")
        return {self.setting: self.values[value]}

    def write(self, model: Model) -> dict[str, Any]:
        value = getattr(model, self.setting)
        for hf_value, native_value in self.values.items():
            if native_value == value:
                return {self.key: hf_value}
        raise WeightsError(
            f"{self.setting} = {value!r} cannot be expressed by {self.key} in config.json"
        )


@dataclass(frozen=True)
class FixedEntry:
    """Entry for which the decoder supports a single value."""

    key: str
    value: Any

    def read(self, config: Config) -> dict[str, Any]:
        value = config.get(self.key)
        if value is not None and value != self.value:
            raise WeightsError(
                f"config.json: {self.key} = {value!r} is not supported, only {self.value!r} is"
            )
        return {}

    def write(self, model: Model) -> dict[str, Any]:
        return {self.key: self.value}


@dataclass(frozen=True)
class Rope:
    """Base and scaling of RoPE, in the formats of transformers 4 and transformers 5.

    Of a file with both, transformers 5 reads the older `rope_scaling`, and so does this.
    """

    base: float = 10_000.0
    partial: float | None = None  # default of partial_rotary_factor; None: the family has no other

    def read(self, config: Config) -> dict[str, Any]:
        entries = config.get("rope_scaling") or config.get("rope_parameters") or {}
        bases = entries.get("rope_theta"), config.get("rope_theta"), self.base
        base = next(base for base in bases if base is not None)
        factor = read_partial_rotary_factor(entries, config, self.partial)
        scaling = read_rope_scaling(entries, config)
        return {"rope_theta": base, "rope_scaling": scaling, "partial_rotary_factor": factor}

    def write(self, model: Model) -> dict[str, Any]:
        scaling = write_rope_scaling(model.rope_scaling)
        rope_parameters = scaling or {"rope_type": "default"}
        factor = {}
        if self.partial is not None:
            factor = {"partial_rotary_factor": model.partial_rotary_factor}
        return {
            **factor,
            "rope_theta": model.rope_theta,
            "rope_scaling": scaling,
            "rope_parameters": {"rope_theta": model.rope_theta, **rope_parameters, **factor},
            **scaled_length(model.rope_scaling),
        }


# Entries of config.json besides the type, which are settings of the same name.
_ROPE_ENTRIES = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
    "yarn": (
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    ),
    "longrope": (
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "short_factor",
        "long_factor",
    ),
}


def read_rope_scaling(entries: Config, config: Config) -> RopeScaling | None:
    """Return the RoPE scaling that config.json specifies, or None.

    Args:
        entries: rope_parameters or rope_scaling.
        config: All of config.json, whose lengths are defaults, as in transformers.

    Raises:
        WeightsError: the decoder does not support this scaling, or an entry is missing.
    """
    kind: Any = entries.get("rope_type") or entries.get("type") or "default"
    kind = "longrope" if kind == "su" else kind  # its name in older files
    if kind == "default":
        return None
    if kind not in list(_ROPE_ENTRIES):
        supported = ", ".join(_ROPE_ENTRIES)
        raise WeightsError(
            f"config.json: RoPE type {kind!r} is not supported; supported types: default, "
            f"{supported}"
        )
    longest = config.get("max_position_embeddings")
    settings: dict[str, Any] = {name: entries.get(name) for name in _ROPE_ENTRIES[kind]}
    if kind == "dynamic":
        settings["original_max_position_embeddings"] = longest
    elif kind != "linear":  # the entry of config.json itself takes precedence
        settings["original_max_position_embeddings"] = original = (
            config.get("original_max_position_embeddings")
            or settings["original_max_position_embeddings"]
            or longest
        )
        if settings["factor"] is None and kind in ("yarn", "longrope") and longest and original:
            settings["factor"] = longest / original
    for name in ("mscale", "mscale_all_dim", "beta_fast", "beta_slow"):
        settings[name] = settings.get(name) or None  # 0 is unset, as in transformers
    for name in ("short_factor", "long_factor"):
        if isinstance(settings.get(name), list):
            settings[name] = tuple(settings[name])
    try:
        return RopeScaling(kind=kind, **settings)
    except ValidationError as error:
        problem = error.errors()[0]
        where = "".join(f"{name}: " for name in problem["loc"])
        raise WeightsError(f"config.json: RoPE of type {kind!r}: {where}{problem['msg']}") from None


def read_partial_rotary_factor(entries: Config, config: Config, default: float | None) -> Any:
    """Return the part of head_dim that is rotated.

    Args:
        entries: rope_parameters or rope_scaling.
        config: All of config.json.
        default: Factor of the family where config.json has none; None: it has no other than 1.
    """
    factor = entries.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if factor is None:
        return default or 1.0
    if default is None and factor != 1:
        raise WeightsError(
            f"config.json: partial_rotary_factor = {factor!r} is not supported in this family, "
            "only 1 is"
        )
    return factor


def write_rope_scaling(scaling: RopeScaling | None) -> dict[str, Any] | None:
    """Return the entry of config.json that `read_rope_scaling` reads, or None."""
    if scaling is None:
        return None
    settings = {name: getattr(scaling, name) for name in _ROPE_ENTRIES[scaling.kind]}
    entries = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in settings.items()
        if value is not None
    }
    return {"rope_type": scaling.kind, **entries}


def scaled_length(scaling: RopeScaling | None) -> dict[str, Any]:
    """Return the entry of config.json beyond which transformers scales dynamically, if it does."""
    if scaling is None or scaling.kind != "dynamic":
        return {}
    return {"max_position_embeddings": scaling.original_max_position_embeddings}


@dataclass(frozen=True)
class SlidingWindow:
    """Sliding window in all layers, or in none if null."""

    def read(self, config: Config) -> dict[str, Any]:
        return {"sliding_window": config.get("sliding_window")}

    def write(self, model: Model) -> dict[str, Any]:
        return {"sliding_window": model.sliding_window}


@dataclass(frozen=True)
class AlternatingSlidingWindow:
    """Sliding window in some layers, from layer_types or from an interval of full attention."""

    window: int
    every: int

    def read(self, config: Config) -> dict[str, Any]:
        window = config.get("sliding_window", self.window)
        types = config.get("layer_types")
        if types is None:
            every = config.get("sliding_window_pattern", self.every)
            return {"sliding_window": window, "global_attention_every": every}
        return {"sliding_window": window, "global_attention_every": full_attention_interval(types)}

    def write(self, model: Model) -> dict[str, Any]:
        every = model.global_attention_every or model.layers + 1
        return {
            "sliding_window": model.sliding_window,
            "sliding_window_pattern": every,
            "layer_types": [
                "sliding_attention" if (layer + 1) % every else "full_attention"
                for layer in range(model.layers)
            ],
        }


def full_attention_interval(types: list[str]) -> int | None:
    """Return the interval between full-attention layers, or None if there are none.

    Raises:
        WeightsError: the full-attention layers are not at multiples of one number.
    """
    full = [layer for layer, kind in enumerate(types) if kind == "full_attention"]
    if not full:
        return None
    every = full[0] + 1
    if full != list(range(every - 1, len(types), every)):
        raise WeightsError(
            "config.json: the full-attention layers in layer_types are not at equal intervals, "
            "which is not supported"
        )
    return every


@dataclass(frozen=True)
class QwenSlidingWindow:
    """Qwen's sliding window, which use_sliding_window switches on or off."""

    def read(self, config: Config) -> dict[str, Any]:
        if not config.get("use_sliding_window"):
            return {}
        types = config.get("layer_types")
        if types is None:
            first, layers = config.get("max_window_layers", 28), config["num_hidden_layers"]
            types = ["full_attention"] * min(first, layers)
            types += ["sliding_attention"] * (layers - len(types))
        if "sliding_attention" not in types:
            return {}
        return {
            "sliding_window": config["sliding_window"],
            "global_attention_every": full_attention_interval(types),
        }

    def write(self, model: Model) -> dict[str, Any]:
        if model.global_attention_every is not None:
            raise WeightsError(
                "Qwen models cannot alternate full and sliding-window attention; "
                "program.model.global_attention_every must not be set"
            )
        windowed = model.sliding_window is not None
        kind = "sliding_attention" if windowed else "full_attention"
        return {
            "use_sliding_window": windowed,
            "sliding_window": model.sliding_window,
            "max_window_layers": 0 if windowed else model.layers,
            "layer_types": [kind] * model.layers,
        }
