"""[run.learning_rate]: the learning rate of each step, an input of the compiled program."""

from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from graphtrain.config.schema.types import (
    STRICT,
    NotNegative,
    NotNegativeFloat,
    Positive,
    PositiveFloat,
)

DecayFraction = Annotated[float, Field(gt=0, le=1)]
_DECAY_FRACTION = 0.1  # of wsd; Hägele et al. 2024 find 10 to 20 % enough

# The settings that only one schedule has.
_ONLY_FOR = {
    "decay_fraction": "wsd",
    "decay_steps": "wsd",
    "decay_style": "wsd",
    "power": "polynomial",
    "boundaries": "piecewise",
    "factors": "piecewise",
}


@dataclass(frozen=True, kw_only=True, config=STRICT)
class LearningRate:
    """Learning rate by step: a linear warm-up to peak, then the schedule.

    Nothing is compiled when it changes. Settings of one schedule are unset by default, so that
    checkpoints of others do not name them.
    """

    # constant, inverse_sqrt, piecewise: independent of run.steps. linear, cosine, polynomial: from
    # the warm-up to the last step. wsd: stable at peak, then a decay in the last steps.
    schedule: Literal[
        "constant", "linear", "cosine", "wsd", "inverse_sqrt", "polynomial", "piecewise"
    ] = "cosine"  # after the warm-up; see docs/guides/optimizers.md
    peak: PositiveFloat = 3e-4  # learning rate at the end of the warm-up
    minimum: NotNegativeFloat = 0.0  # learning rate of the last step; inverse_sqrt: the lowest
    warmup_steps: NotNegative = 0  # steps of the linear warm-up
    decay_fraction: DecayFraction | None = None  # wsd: decaying part of run.steps; unset: 0.1
    decay_steps: Positive | None = None  # wsd: last steps, which decay; in place of decay_fraction
    decay_style: Literal["linear", "sqrt", "cosine"] | None = None  # wsd: of the decay; unset: sqrt
    power: PositiveFloat | None = None  # polynomial: exponent of the decay; unset: 1
    boundaries: tuple[Positive, ...] | None = None  # piecewise: steps after which the rate changes
    factors: tuple[PositiveFloat, ...] | None = None  # piecewise: of peak, after each boundary

    def __post_init__(self) -> None:
        if self.minimum > self.peak:
            raise ValueError(f"minimum = {self.minimum} is more than peak = {self.peak}")
        for name, schedule in _ONLY_FOR.items():
            if getattr(self, name) is not None and self.schedule != schedule:
                raise ValueError(
                    f'{name} is only for schedule = "{schedule}", and schedule = "{self.schedule}"'
                )
        if self.decay_fraction is not None and self.decay_steps is not None:
            raise ValueError("set either decay_fraction or decay_steps")
        if self.schedule == "inverse_sqrt" and not self.warmup_steps:
            raise ValueError(
                'schedule = "inverse_sqrt" is peak x sqrt(warmup_steps / step) after the warm-up; '
                "set warmup_steps to at least 1"
            )
        if self.schedule == "piecewise":
            self._check_pieces()
            if self.minimum:
                raise ValueError("minimum is not for piecewise; the last of factors says it")

    def _check_pieces(self) -> None:
        boundaries, factors = self.boundaries or (), self.factors or ()
        if not boundaries or len(boundaries) != len(factors):
            raise ValueError(
                'schedule = "piecewise" needs boundaries, and a factor for each: '
                f"{len(boundaries)} boundaries, {len(factors)} factors"
            )
        if any(
            after <= before
            for before, after in zip((self.warmup_steps, *boundaries), boundaries, strict=False)
        ):
            raise ValueError(
                f"boundaries = {list(boundaries)} must rise, from after warmup_steps = "
                f"{self.warmup_steps}"
            )

    def steps_of_decay(self, steps: int) -> int:
        """Return the number of steps, the last of a run, in which schedule "wsd" decays.

        Args:
            steps: Number of steps of the entire run.
        """
        if self.decay_steps is not None:
            return self.decay_steps
        return max(1, round((self.decay_fraction or _DECAY_FRACTION) * steps))
