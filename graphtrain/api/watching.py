"""Answer the same prompts again with each new checkpoint of a run that is being trained."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from graphtrain.api.configuration import log, observe_nothing, open_cache

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

    from graphtrain.api.configuration import Observer
    from graphtrain.api.generation import PromptBatch
    from graphtrain.run.batch_generation import Continuation


def watch(
    batch: PromptBatch,
    *,
    cache: str | os.PathLike[str] | None = None,
    observe: Observer = observe_nothing,
    log: Callable[[str], None] = log,
) -> Iterator[tuple[int, list[list[Continuation]]]]:
    """Yield the step of each new checkpoint, and what continues the prompts, until the run ends.

    The programs are loaded once, and only the weights again. A checkpoint that is damaged, or that
    the run deletes before it is read, is left out.

    Args:
        batch: The prompts.
        cache: Directory of compiled programs; None for $GRAPHTRAIN_CACHE, else ./cache.
        observe: Called with the progress of compilations.
        log: Called with why a checkpoint is left out.

    Raises:
        TrainingError: there is no checkpoint, and no process trains the run.
        UserError: something else that the user can change; its text says what.
    """
    from graphtrain.checkpoints.manifest import DamagedCheckpoint
    from graphtrain.checkpoints.steps import saved_steps
    from graphtrain.errors import TrainingError, WeightsError
    from graphtrain.run.new_checkpoints import new_checkpoints
    from graphtrain.run.serving.open_engine import load_checkpoint

    directory, engine = Path(batch.config.run.directory), None
    for step in new_checkpoints(directory):
        try:
            if engine is None:
                engine = batch.open_engine(step, open_cache(cache), observe)
            else:
                load_checkpoint(engine, batch.program, batch.config.run, step)
        except (TrainingError, WeightsError) as error:  # the second: of an adapter
            is_there = step in saved_steps(directory / "checkpoints")
            if is_there and not isinstance(error, DamagedCheckpoint):
                raise
            log(f"no answers of step {step}: {error}")
            continue
        yield step, list(batch.continue_with(engine))
