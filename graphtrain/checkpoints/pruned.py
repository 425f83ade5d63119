"""Checkpoints of a run that is training: it may delete one while another command reads it."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from graphtrain.checkpoints.steps import saved_steps
from graphtrain.errors import TrainingError, WeightsError
from lowering.xla import distributed

_DELETION_SECONDS = 2.0  # for the rest of a checkpoint to disappear
T = TypeVar("T")


def read_checkpoint(
    directory: Path, step: int | None, read: Callable[[int | None], T]
) -> tuple[int | None, T]:
    """Read a checkpoint; the newest again if the run deleted it meanwhile.

    Args:
        directory: Directory of the checkpoints.
        step: Step of the checkpoint; None for the last.
        read: Called with the step; with None if there is no checkpoint.

    Returns:
        The step that was read, and what `read` returned.

    Raises:
        TrainingError: the run deleted the checkpoint of the step that was named.
    """
    while True:
        steps = saved_steps(directory)
        chosen = steps[-1] if step is None and steps else step
        try:
            return chosen, read(chosen)
        except (TrainingError, WeightsError) as error:
            if chosen is None or chosen not in steps or not _is_pruned(directory, chosen):
                raise
            # Several processes would have to choose another one together.
            if step is not None or distributed.count() > 1:
                raise TrainingError(
                    f"{directory / str(chosen)} was deleted by the run while it was read (it keeps "
                    "run.checkpoints.keep of them); try again, or name another step; the steps "
                    f"are {', '.join(map(str, saved_steps(directory)))}"
                ) from error


def _is_pruned(directory: Path, step: int) -> bool:
    """Return whether a checkpoint is gone, or disappears now, and a newer one exists."""
    deadline = time.monotonic() + _DELETION_SECONDS
    while step in (steps := saved_steps(directory)):
        if steps[-1] == step or time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return bool(steps) and steps[-1] > step
