"""[[program.phase]]: earlier parts of a run, with another batch size or sequence length."""

from typing import Any

from pydantic.dataclasses import dataclass

from graphtrain.config.schema.types import STRICT, Count, NotNegative, Positive, PositiveFloat

_OF_BATCH = ("global_batch_size", "seq_len", "microbatches", "padding_sequences")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Phase:
    """Settings of the steps up to one step; those after the last phase have none of their own."""

    until: Positive  # last step of the phase, counted from the first step of the run
    global_batch_size: Count | None = None  # sequences per step; unset: as in [program.batch]
    seq_len: Count | None = None  # tokens per sequence; unset: as in [program.batch]
    microbatches: Count | None = None  # unset: as in [program.batch]
    padding_sequences: NotNegative | None = None  # unset: as in [program.batch]
    rope_theta: PositiveFloat | None = None  # unset: as in [program.model]
    rope_scaling: bool | None = None  # false: without [program.model.rope_scaling]; unset: with it

    def __post_init__(self) -> None:
        if not self.of_batch and not self.changes_model:
            raise ValueError(
                "a phase differs from [program] in at least one of global_batch_size, seq_len, "
                "microbatches, rope_theta and rope_scaling; set one, or remove the phase"
            )

    @property
    def of_batch(self) -> dict[str, int]:
        """Return the settings that replace those of [program.batch], by name."""
        values = {name: getattr(self, name) for name in _OF_BATCH}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def changes_model(self) -> bool:
        """Return whether the model of the phase has other rotary positions."""
        return self.rope_theta is not None or self.rope_scaling is False

    @property
    def of_model(self) -> dict[str, Any]:
        """Return the settings that replace those of [program.model], by name."""
        theta = {} if self.rope_theta is None else {"rope_theta": self.rope_theta}
        return theta | ({"rope_scaling": None} if self.rope_scaling is False else {})


class PhaseError(ValueError):
    """A phase does not suit the program or the run.

    Attributes:
        within: table of the phase, relative to the class that checks it, for the line.
    """

    def __init__(self, within: tuple[str, ...], message: str) -> None:
        super().__init__(message)
        self.within = within


def describe_phase(number: int, phase: Phase) -> str:
    """Return a phase for a message; numbers are from 1."""
    return f"phase {number} (until = {phase.until})"
