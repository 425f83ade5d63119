"""Steps of the checkpoints in a directory, and the names that users give them."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from graphtrain.checkpoints import private_orbax
from graphtrain.checkpoints.info import read_checkpoint_info
from graphtrain.config.run_record import CONFIG
from graphtrain.errors import TrainingError

StepName = int | Literal["last", "best"] | None  # None is the last


def saved_steps(directory: Path) -> list[int]:
    """Return the steps of the complete checkpoints in a directory, oldest first."""
    return private_orbax.complete_steps(directory)


def named_step(directory: Path, step: StepName) -> int | None:
    """Return the step of a checkpoint that a name stands for; None for the last.

    Raises:
        TrainingError: the best is asked for, and no checkpoint has a validation loss.
    """
    if step == "best":
        return best_step(directory)
    return None if step == "last" else step


def missing_checkpoint(directory: Path, steps: Sequence[int]) -> TrainingError:
    """Return the error that a checkpoint does not exist; if none does, how to train the run.

    Args:
        directory: Directory of the checkpoints, in that of the run.
        steps: Those that exist.
    """
    if steps:
        available_steps = ", ".join(map(str, steps))
        return TrainingError(
            f"no such checkpoint in {directory}; available steps: {available_steps}"
        )
    project = directory.parent.parent  # as graphtrain init places the directory of a run
    config = str(project) if (project / CONFIG).is_file() else "CONFIG"
    return TrainingError(
        f"no checkpoint in {directory}: the run is not trained yet; to train it: "
        + shlex.join(["graphtrain", "run", config, "--compile"])
    )


def best_step(directory: Path) -> int:
    """Return the step of the checkpoint with the lowest validation loss; the newest of several.

    Raises:
        TrainingError: no checkpoint was saved with a validation loss.
    """
    losses = saved_validation_losses(directory)
    if not losses:
        if not saved_steps(directory):
            raise missing_checkpoint(directory, [])
        raise TrainingError(
            f"no checkpoint in {directory} was saved with a validation loss; set "
            "run.data.validation and run.evaluate_every (run.checkpoints.keep_best saves after "
            "every evaluation with a lower loss)"
        )
    return lowest_loss(losses)


@dataclass(frozen=True)
class Retention:
    """Rule for the checkpoints that are kept when others are deleted."""

    newest: int  # number of newest ones
    best: bool = False  # that of the lowest validation loss too
    every: int | None = None  # those whose step is a multiple of this too

    def kept(self, losses: Mapping[int, float | None]) -> set[int]:
        """Return the steps that are kept, of those with their validation losses."""
        kept = set(sorted(losses)[-self.newest :])
        evaluated = {step: loss for step, loss in losses.items() if loss is not None}
        if self.best and evaluated:
            kept.add(lowest_loss(evaluated))
        if self.every:
            kept.update(step for step in losses if step % self.every == 0)
        return kept


def lowest_loss(losses: Mapping[int, float]) -> int:
    """Return the step with the lowest loss; the newest of several."""
    return min(losses, key=lambda step: (losses[step], -step))


def saved_validation_losses(directory: Path, *, skip_damaged: bool = False) -> dict[int, float]:
    """Return the validation loss by step, of the checkpoints that were saved with one.

    Args:
        directory: Directory of the checkpoints.
        skip_damaged: Leave out checkpoints whose metadata cannot be read, instead of raising.
    """
    losses = {}
    for step in saved_steps(directory):
        try:
            loss = read_checkpoint_info(directory, step).validation_loss
        except TrainingError:
            if not skip_damaged:
                raise
            continue
        if loss is not None:
            losses[step] = loss
    return losses
