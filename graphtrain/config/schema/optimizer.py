"""[program.optimizer]: the optimizer of a training step, by kind, or one of the user."""

from dataclasses import fields
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic.dataclasses import dataclass

from graphtrain.config.schema.types import (
    STRICT,
    DecayRate,
    NotNegativeFloat,
    Plain,
    Positive,
    PositiveDecayRate,
    PositiveFloat,
)
from graphtrain.config.user_code import UserCode

Kind = Literal["adamw", "lion", "sgd", "adafactor", "muon", "schedule_free", "soap"]
_DECAY = ("weight_decay", "decay_mask")


def _not_custom(kind: Any) -> Any:
    """Refuse the name of one's own optimizer with the setting that takes it."""
    if isinstance(kind, str) and ":" in kind:
        raise ValueError(f'an optimizer of your own is set as custom = "{kind}"; remove kind')
    return kind


_ADAM = ("beta1", "beta2", "epsilon")
# Settings that each kind has, beside those of every kind.
_OF_KIND: dict[str, tuple[str, ...]] = {
    "adamw": (*_ADAM, *_DECAY, "moment_dtype"),
    "lion": ("beta1", "beta2", *_DECAY, "moment_dtype"),
    "sgd": ("momentum", "nesterov", *_DECAY, "moment_dtype"),
    "adafactor": _DECAY,
    "muon": (
        *("momentum", "nesterov", "newton_schulz_steps", "consistent_rms"),
        *(*_ADAM, *_DECAY, "moment_dtype"),
    ),
    "schedule_free": (*_ADAM, *_DECAY),
    "soap": (
        *("precondition_frequency", "max_precondition_dim"),
        *(*_ADAM, *_DECAY, "moment_dtype"),
    ),
}
_ONLY_OF_KINDS = tuple(dict.fromkeys(name for names in _OF_KIND.values() for name in names))
_MOMENTUM = {"muon": 0.95, "sgd": 0.9}
_NESTEROV = {"muon": True, "sgd": False}
_NEWTON_SCHULZ_STEPS = 5
_CONSISTENT_RMS = 0.2
_PRECONDITION_FREQUENCY = 10
_MAX_PRECONDITION_DIM = 10_000
# Largest decay rate of a moment in bfloat16 or int8: a change of less than 1/256 is rounded away.
_MAX_DECAY_IN_FEW_BITS = 1 - 1 / 256
_EMPTY: Any = Field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Optimizer:
    """The optimizer. The learning rate is an input of the step, set under [run.learning_rate].

    Settings of single kinds, other than AdamW's, are unset by default, so that checkpoints of
    others do not name them.
    """

    kind: Annotated[Kind, BeforeValidator(_not_custom)] = "adamw"  # see docs/guides/optimizers.md
    beta1: DecayRate = 0.9  # decay rate of the first moment; schedule_free: weight of the average
    beta2: DecayRate = 0.95  # decay rate of the second moment; lion: of its only one
    epsilon: PositiveFloat = 1e-8  # added to the root of the second moment
    weight_decay: NotNegativeFloat = 0.1  # multiplied by the learning rate
    decay_mask: Literal["matrices", "all"] = "matrices"  # decayed weights; not norms and biases
    clip_norm: NotNegativeFloat = 1.0  # maximum global norm of the gradients; 0: no clipping
    offload_to_host: bool = False  # keep the moments in host memory, if the target supports it
    moment_dtype: Literal["float32", "bfloat16", "int8"] = "float32"  # of the first moment
    momentum: DecayRate | None = None  # muon, sgd: its decay rate; unset: 0.95, 0.9
    nesterov: bool | None = None  # muon, sgd: Nesterov's momentum; unset: true, false
    newton_schulz_steps: Positive | None = None  # muon: iterations; unset: 5
    consistent_rms: PositiveFloat | None = None  # muon: root mean square of updates; unset: 0.2
    precondition_frequency: Positive | None = None  # soap: steps between two eigenbases; unset: 10
    max_precondition_dim: Positive | None = None  # soap: longer sides have none; unset: 10000
    ema_decay: PositiveDecayRate | None = None  # of averaged weights; unset: none
    skip_spikes: bool = False  # a step can be left undone; for run.spikes.on_spike = "skip"
    group_norms: bool = False  # metrics of the norms of parameters and updates, by module
    custom: str | None = None  # "file.py:name" that makes an optax optimizer, in place of kind
    arguments: dict[str, Plain] = _EMPTY  # arguments of custom

    def __post_init__(self) -> None:
        if self.custom is None:
            if self.arguments:
                raise ValueError("arguments are those of custom; set custom too")
            self._check_settings_of_kind()
            return
        if self.kind != "adamw":
            raise ValueError(f'custom takes the place of kind = "{self.kind}"; set one of them')
        if unused := self._changed(_ONLY_OF_KINDS):
            raise ValueError(
                f"{', '.join(unused)} is only for AdamW; with custom, pass it in arguments"
            )

    def _check_settings_of_kind(self) -> None:
        names = _OF_KIND[self.kind]
        if unused := self._changed(name for name in _ONLY_OF_KINDS if name not in names):
            kinds = [f'"{kind}"' for kind, of_kind in _OF_KIND.items() if unused[0] in of_kind]
            raise ValueError(
                f'{unused[0]} is not a setting of kind = "{self.kind}"; it is one of '
                f"{', '.join(kinds)}"
            )
        if (
            self.kind == "sgd"
            and self.momentum == 0
            and (unused := self._changed(("nesterov", "moment_dtype")))
        ):
            raise ValueError(
                f"{unused[0]} has no effect with momentum = 0; remove it, or set momentum"
            )
        if self.kind == "schedule_free":
            if self.beta1 == 0:
                raise ValueError('kind = "schedule_free" averages weights with beta1; raise it')
            if self.ema_decay is not None:
                raise ValueError(
                    'kind = "schedule_free" trains averaged weights already; remove ema_decay'
                )

        if self.moment_dtype != "float32":
            self._check_decay_in_few_bits()

    def _check_decay_in_few_bits(self) -> None:
        by_kind = {"lion": ("beta2",), "sgd": ("momentum",), "muon": ("momentum", "beta1")}
        for name in by_kind.get(self.kind, ("beta1",)):
            rate = self.momentum_or_default if name == "momentum" else getattr(self, name)
            if rate > _MAX_DECAY_IN_FEW_BITS:
                raise ValueError(
                    f'moment_dtype = "{self.moment_dtype}" rounds away what a moment with '
                    f"{name} = {rate} loses at a step, so that it would not decay; set "
                    f'moment_dtype = "float32", or {name} to at most 0.996'
                )

    def _changed(self, names: Any) -> list[str]:
        defaults = {field.name: field.default for field in fields(self)}
        return [name for name in names if getattr(self, name) != defaults[name]]

    def __hash__(self) -> int:
        return hash(repr(self))  # dictionaries are not hashable

    @property
    def has_moment_dtype(self) -> bool:
        """Return whether the dtype of a first moment can be chosen."""
        return self.custom is None and "moment_dtype" in _OF_KIND[self.kind]

    @property
    def vector_moment_dtype(self) -> Literal["float32", "bfloat16"]:
        """Return the dtype of the stored first moments that int8 leaves out."""
        return "float32" if self.moment_dtype == "int8" else self.moment_dtype

    @property
    def momentum_or_default(self) -> float:
        """Return the decay rate of the momentum of kinds that have one."""
        return _MOMENTUM[self.kind] if self.momentum is None else self.momentum

    @property
    def nesterov_or_default(self) -> bool:
        """Return whether kinds with momentum use Nesterov's."""
        return _NESTEROV[self.kind] if self.nesterov is None else self.nesterov

    @property
    def newton_schulz_steps_or_default(self) -> int:
        """Return the number of Muon's Newton-Schulz iterations."""
        return self.newton_schulz_steps or _NEWTON_SCHULZ_STEPS

    @property
    def consistent_rms_or_default(self) -> float:
        """Return the root mean square that Muon's updates have, whatever the matrix's shape."""
        return self.consistent_rms or _CONSISTENT_RMS

    @property
    def precondition_frequency_or_default(self) -> int:
        """Return the number of steps between two updates of SOAP's eigenbases."""
        return self.precondition_frequency or _PRECONDITION_FREQUENCY

    @property
    def max_precondition_dim_or_default(self) -> int:
        """Return the length of the longest side of a matrix for which SOAP has an eigenbasis."""
        return self.max_precondition_dim or _MAX_PRECONDITION_DIM

    @property
    def user_code(self) -> UserCode | None:
        """Return the optimizer of the user, if there is one."""
        if self.custom is None:
            return None
        return UserCode("program.optimizer.custom", "graphtrain.optimizers", self.custom)
