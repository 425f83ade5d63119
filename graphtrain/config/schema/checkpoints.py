"""[run.checkpoints]: when checkpoints are saved, and which are kept."""

from pydantic.dataclasses import dataclass

from graphtrain.config.schema.types import STRICT, Positive


@dataclass(frozen=True, kw_only=True, config=STRICT)
class CheckpointSettings:
    """When checkpoints are saved, and which of them are kept."""

    local_every: Positive = 1000  # steps between checkpoints; the last step is always saved
    keep: Positive = 3  # number of newest checkpoints to keep
    keep_best: bool = False  # save and keep the checkpoint with the lowest validation loss too
    keep_every: Positive | None = None  # keep every checkpoint whose step is a multiple of this
