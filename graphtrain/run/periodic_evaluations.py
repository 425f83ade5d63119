"""Evaluations between the steps of a run: the validation loss, samples, scores on tasks."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

import numpy as np

from graphtrain.config.schema import Program, Run
from graphtrain.graphs.names import EVALUATE_AVERAGED
from graphtrain.models.optimizer_state import EMA
from graphtrain.run.agreement import on_all_ranks
from graphtrain.run.batch_placement import BatchPlacement, index_share
from graphtrain.run.phases import PhaseSequence
from graphtrain.run.signals import StopRequest
from graphtrain.run.stalls import EVALUATING, SAMPLING, SCORING
from lowering.trees import Tree

if TYPE_CHECKING:
    from graphtrain.run.training_samples import TrainingSamples
    from graphtrain.run.training_tasks import TrainingTasks


class Move(Protocol):
    """Function that notes what this process does."""

    def __call__(self, stage: str, step: int, batch: int = 0) -> None:
        """Note the stage, the step, and the number of the batch or prompt."""


def is_evaluation_due(run: Run, step: int) -> bool:
    """Return whether the run evaluates after a step."""
    every = run.evaluate_every
    return step == run.steps or bool(every and step % every == 0)


def are_scores_due(run: Run, step: int) -> bool:
    """Return whether the run evaluates its tasks after a step."""
    if run.tasks is None:
        return False
    every = run.tasks.every
    if every is None:
        return is_evaluation_due(run, step)
    return step == run.steps or step % every == 0


def run_validation_batches(
    run: Run, program: Program, rows: np.ndarray | None = None
) -> Iterable[dict[str, np.ndarray]]:
    """Return the batches of one evaluation of a run; of each, the named rows."""
    from graphtrain.run.evaluate import validation_batches

    return validation_batches(
        run.data,
        program,
        program.model.vocab_tokens,
        run.evaluate_batches,
        rows=rows,
        share=index_share(),
    )


@dataclass
class PeriodicEvaluations:
    """Evaluations of a run while it trains. A signal to stop gives them up."""

    run: Run
    phases: PhaseSequence
    frozen: tuple[Tree, ...]  # one tree of weights without gradients, or empty
    samples: TrainingSamples | None
    tasks: TrainingTasks | None
    stop: StopRequest
    move: Move
    raise_if_failed: Callable[[], None]  # if a checkpoint could not be written
    gave_up_scores: bool = False  # of the last evaluation of tasks

    def validation_losses(self, completed_steps: int, state: Tree) -> dict[str, float] | None:
        """Return the validation losses by metric name; None if the evaluation was given up.

        Args:
            completed_steps: Number of completed steps.
            state: State after them.
        """
        from graphtrain.run.evaluate import validation_loss

        current, number = self.phases.current, itertools.count()
        program = current.phase.program

        def should_stop(_: int) -> bool:
            self.move(EVALUATING, completed_steps, next(number))
            self.raise_if_failed()
            return self.stop.should_stop()

        weights = {"evaluate": ("validation_loss", state["parameters"])}
        if (average := state["optimizer"].get(EMA)) is not None:
            named = "averaged_validation_loss", {"optimizer": {EMA: average}}
            weights[EVALUATE_AVERAGED] = named
        losses = {}
        for graph, (name, tree) in weights.items():
            evaluate, target = current.programs[graph], program.target
            rows = BatchPlacement(evaluate.inputs("batch"), target).rows
            batches = on_all_ranks(
                partial(run_validation_batches, self.run, program.settings, rows)
            )
            inputs = tree, *self.frozen
            loss = validation_loss(evaluate, inputs, batches, target, should_stop=should_stop)
            if loss is None:
                return None
            losses[name] = loss
        return losses

    def sample(self, completed_steps: int, state: Tree) -> None:
        """Continue the prompts of run.samples. A failure is a warning, and the run continues."""
        assert self.samples is not None

        def should_stop(prompt: int) -> bool:
            self.move(SAMPLING, completed_steps, prompt)
            return self.stop.should_stop()

        self.move(SAMPLING, completed_steps, 0)
        try:
            self.samples.write(completed_steps, state["parameters"], should_stop)
        except Exception as error:
            warnings.warn(f"no samples of step {completed_steps}: {error}", stacklevel=1)

    def scores(self, completed_steps: int, state: Tree) -> dict[str, float] | None:
        """Evaluate run.tasks; None without a result. A failure is a warning.

        Args:
            completed_steps: Number of completed steps.
            state: State after them.
        """
        assert self.tasks is not None

        def should_stop(request: int) -> bool:
            self.move(SCORING, completed_steps, request)
            return self.stop.should_stop()

        self.move(SCORING, completed_steps, 0)
        try:
            scores = self.tasks.scores(completed_steps, state["parameters"], should_stop)
        except Exception as error:
            warnings.warn(f"no scores of step {completed_steps}: {error}", stacklevel=1)
            return None
        self.gave_up_scores = scores is None
        return scores
