"""Evaluate a run on tasks of lm-eval, by compiled programs."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from graphtrain.api.checks.purpose import SERVE
from graphtrain.api.configuration import Settings, checked_config, open_cache

if TYPE_CHECKING:
    from graphtrain.api.configuration import Source
    from graphtrain.checkpoints.steps import StepName
    from graphtrain.config.schema import Config
    from graphtrain.run.evaluation.task_results import TaskResults
    from graphtrain.run.evaluation.text_format import TextFormat
    from graphtrain.run.evaluation_curve import EvaluationCurve
    from graphtrain.run.serving.engine import CompiledEngine
    from graphtrain.run.serving.row_engine import RowEngine

_COMPILE = "graphtrain compile CONFIG --for evaluate"


def _ignore_progress(kind: str, finished: int, count: int) -> None:
    """Ignore the progress of an evaluation."""


def _ignore_step(step: int) -> None:
    """Ignore which step is evaluated."""


def evaluate_tasks(
    run: Source,
    tasks: Sequence[str],
    *,
    data: str | os.PathLike[str] | None = None,
    limit: int | None = None,
    fewshot: int | None = None,
    apply_chat_template: bool = False,
    chat_template: str = "own",
    allow_code: bool = False,
    bos: bool | None = None,
    step: StepName = "last",
    target: str | None = None,
    set: Settings = (),
    cache: str | os.PathLike[str] | None = None,
    coordinator: str | None = None,
    processes: int | None = None,
    rank: int | None = None,
    compile_hint: str = _COMPILE,
    on_progress: Callable[[str, int, int], None] = _ignore_progress,
) -> TaskResults:
    """Evaluate a run on tasks of lm-eval with local data; nothing is fetched or compiled.

    Answers are kept in the folder `evaluation` of the run: an evaluation that was interrupted does
    not compute them again. Packages of Hugging Face that are imported by it are offline from then
    on, in this process.

    With several processes, each of them calls this. Rank 0 alone reads the data, and has the
    samples in its results.

    Args:
        run: Directory or summary of a run, or its configuration in any form.
        tasks: Names of tasks, groups and tags of lm-eval, and paths of task files.
        data: Directory with TASK/SPLIT.jsonl or .parquet; None if the task files name their data.
        limit: Number of rows of each task; None for all.
        fewshot: Number of examples in a prompt; None for that of each task.
        apply_chat_template: Whether prompts are conversations.
        chat_template: Name of a built-in template, a file, or `own`: that of the training data,
            else that of the tokenizer.
        allow_code: Whether to run code that the model writes, confined, as HumanEval needs.
        bos: Whether texts begin with the beginning-of-sequence token; None: as the training
            documents do.
        step: Step of the checkpoint, "last", or "best", that of the lowest validation loss.
        target: Machine to run on, in place of program.target.
        set: Settings to change.
        cache: Directory of compiled programs; None for $GRAPHTRAIN_CACHE, else ./cache.
        coordinator: Address of rank 0, host:port, if there are several processes.
        processes: Number of processes.
        rank: Rank of this process, from 0.
        compile_hint: What compiles missing programs, for the error message.
        on_progress: Called with "scoring" or "generating", the number of requests that are
            answered, and that of all.

    Raises:
        MissingProgram: a program is not compiled.
        UserError: something else that the user can change; its text says what.
    """
    from graphtrain.checkpoints.steps import named_step
    from graphtrain.run.evaluation.evaluate_tasks import evaluate_tasks as evaluate
    from graphtrain.run.evaluation.task_settings import TaskSettings
    from graphtrain.run.serving.weights import check_step

    settings = TaskSettings(
        tasks=tuple(tasks),
        data=None if data is None else Path(data),
        limit=limit,
        fewshot=fewshot,
        allow_code=allow_code,
    )
    template = _template_of(chat_template, applied=apply_chat_template)
    peers = _Peers(coordinator, processes, rank)
    model = _Model.of(run, template, bos, target, set, cache, peers, compile_hint)
    chosen = named_step(model.checkpoints, step)
    check_step(model.config.run, chosen)
    return evaluate(settings, lambda: model.open(chosen), *model.identity(chosen), on_progress)


def evaluate_steps(
    run: Source,
    tasks: Sequence[str] = (),
    *,
    steps: Literal["all"] | Sequence[int] = "all",
    data: str | os.PathLike[str] | None = None,
    limit: int | None = None,
    fewshot: int | None = None,
    apply_chat_template: bool = False,
    chat_template: str = "own",
    allow_code: bool = False,
    bos: bool | None = None,
    target: str | None = None,
    set: Settings = (),
    cache: str | os.PathLike[str] | None = None,
    coordinator: str | None = None,
    processes: int | None = None,
    rank: int | None = None,
    compile_hint: str = _COMPILE,
    on_progress: Callable[[str, int, int], None] = _ignore_progress,
    on_step: Callable[[int], None] = _ignore_step,
) -> EvaluationCurve:
    """Evaluate the checkpoints of a run on tasks, or without tasks measure their validation loss.

    The arguments are those of `evaluate_tasks`, and:

    Args:
        run: Directory or summary of a run, or its configuration in any form.
        tasks: Names of tasks, groups and tags of lm-eval, and paths of task files; none: the mean
            loss on the validation set.
        steps: Steps of the checkpoints, or "all".
        data: Directory with TASK/SPLIT.jsonl or .parquet.
        limit: Number of rows of each task.
        fewshot: Number of examples in a prompt.
        apply_chat_template: Whether prompts are conversations.
        chat_template: Name of a built-in template, a file, or `own`.
        allow_code: Whether to run code that the model writes, confined.
        bos: Whether texts begin with the beginning-of-sequence token.
        target: Machine to run on, in place of program.target.
        set: Settings to change.
        cache: Directory of compiled programs; None for $GRAPHTRAIN_CACHE, else ./cache.
        coordinator: Address of rank 0, host:port, if there are several processes.
        processes: Number of processes.
        rank: Rank of this process, from 0.
        compile_hint: What compiles missing programs, for the error message.
        on_progress: Called with the kind of request, the number of those answered, and that of all.
        on_step: Called with each step before it is evaluated.

    Raises:
        MissingProgram: a program is not compiled.
        TrainingError: there are no checkpoints, or not all of these.
        UserError: something else that the user can change; its text says what.
    """
    from graphtrain.run.evaluation.evaluate_tasks import evaluate_steps as evaluate
    from graphtrain.run.evaluation.task_settings import TaskSettings

    peers = _Peers(coordinator, processes, rank)
    if not tasks:
        return _losses_of_steps(run, steps, target, set, cache, peers, compile_hint, on_step)
    settings = TaskSettings(
        tasks=tuple(tasks),
        data=None if data is None else Path(data),
        limit=limit,
        fewshot=fewshot,
        allow_code=allow_code,
    )
    template = _template_of(chat_template, applied=apply_chat_template)
    model = _Model.of(run, template, bos, target, set, cache, peers, compile_hint)

    def open_step(step: int) -> tuple[RowEngine, TextFormat]:
        on_step(step)
        return model.open(step)

    chosen = _steps_of(model.checkpoints, steps)
    return evaluate(settings, chosen, open_step, model.identity, on_progress)


def _template_of(name: str, *, applied: bool) -> str | None:
    """Return the chat template of prompts; None if they are no conversations."""
    from graphtrain.errors import GraphtrainError
    from graphtrain.run.serving.chat_format import OWN_TEMPLATE

    if not applied and name != OWN_TEMPLATE:
        raise GraphtrainError(
            f"chat_template = {name!r}: has no effect without apply_chat_template = True"
        )
    return name if applied else None


def _losses_of_steps(
    run: Source,
    steps: Literal["all"] | Sequence[int],
    target: str | None,
    set: Settings,
    cache: str | os.PathLike[str] | None,
    peers: _Peers,
    compile_hint: str,
    on_step: Callable[[int], None],
) -> EvaluationCurve:
    """Return the validation loss of checkpoints."""
    from graphtrain.api.checks.purpose import evaluation_purpose
    from graphtrain.config.resolve import resolve
    from graphtrain.run.evaluate import checkpoint_loss, verify_data
    from graphtrain.run.evaluation_curve import EvaluationCurve

    purpose = evaluation_purpose(bigram=False)
    config = checked_config(run, purpose, set=set, target=target, rank=peers.known_rank).config
    program, losses = resolve(config.program), {}
    peers.join(config)
    chosen = _steps_of(Path(config.run.directory) / "checkpoints", steps)
    verify_data(config.run)
    for step in chosen:
        on_step(step)
        result = checkpoint_loss(
            program, config.run, open_cache(cache), compile_hint=compile_hint, step=step
        )
        losses[step] = result.validation_loss
    return EvaluationCurve({"validation_loss": losses})


def _steps_of(checkpoints: Path, steps: Literal["all"] | Sequence[int]) -> list[int]:
    """Return the steps to evaluate, oldest first.

    Raises:
        TrainingError: there are no checkpoints, or not all of these.
    """
    from graphtrain.checkpoints.steps import saved_steps
    from graphtrain.errors import TrainingError

    saved = saved_steps(checkpoints)
    if not saved:
        raise TrainingError(f"no checkpoints in {checkpoints}; without --steps, the weights that "
                            "the run would start from are evaluated")  # fmt: skip
    if steps == "all":
        return saved
    if missing := sorted({*steps} - {*saved}):
        raise TrainingError(
            f"no checkpoint of step {', '.join(map(str, missing))} in {checkpoints}; available "
            f"steps: {', '.join(map(str, saved))}"
        )
    return sorted({*steps})


@dataclass(frozen=True)
class _Peers:
    """The processes that evaluate together; None where the environment says it."""

    coordinator: str | None
    processes: int | None
    rank: int | None

    @property
    def known_rank(self) -> int:
        """Rank that this process has once it has joined the others."""
        from graphtrain.run.processes import expected_rank

        return expected_rank(self.coordinator, self.processes, self.rank)

    def join(self, config: Config) -> None:
        """Connect this process to the others."""
        from graphtrain.run.processes import join_run
        from lowering.machine.target import Target

        target = Target.parse(config.program.target)
        join_run(target, config.run.watchdog, self.coordinator, self.processes, self.rank)


class _Model:
    """Run that is evaluated on tasks: how its prompts are read, and its weights are loaded."""

    def __init__(
        self,
        config: Config,
        text: TextFormat,
        cache: str | os.PathLike[str] | None,
        compile_hint: str,
    ) -> None:
        from graphtrain.config.resolve import resolve

        self.config, self._text = config, text
        self.checkpoints = Path(config.run.directory) / "checkpoints"
        self._program, self._cache, self._hint = resolve(config.program), cache, compile_hint
        self._engine: CompiledEngine | None = None

    @classmethod
    def of(
        cls,
        run: Source,
        chat_template: str | None,
        bos: bool | None,
        target: str | None,
        settings: Settings,
        cache: str | os.PathLike[str] | None,
        peers: _Peers,
        compile_hint: str,
    ) -> _Model:
        """Check a run, connect its processes, and open its tokenizer."""
        rank = peers.known_rank
        config = checked_config(run, SERVE, set=settings, target=target, rank=rank).config
        peers.join(config)
        from graphtrain.run.evaluation.text_format import open_text_format

        return cls(config, open_text_format(config, chat_template, bos), cache, compile_hint)

    def open(self, step: int | None) -> tuple[CompiledEngine, TextFormat]:
        """Return the model with the weights of a step; those of the step before are lost."""
        from graphtrain.run.serving.open_engine import load_checkpoint, open_engine

        if self._engine is not None:
            assert step is not None
            load_checkpoint(self._engine, self._program, self.config.run, step)
            return self._engine, self._text
        self._engine = open_engine(
            self._program,
            self.config.run,
            open_cache(self._cache),
            step=step,
            compile_hint=self._hint,
            vocab=self._text.tokenizer.vocab,
            purpose="evaluate",
        )
        return self._engine, self._text

    def identity(self, step: int | None) -> tuple[dict[str, Any], Path]:
        """Return the identity of the model of a step, and the file of its answers."""
        from graphtrain.run.evaluation.model_identity import identity_digest, model_identity

        digest = self._text.tokenizer.digest
        identity = model_identity(self._program, self.config.run, step, digest)
        folder = Path(self.config.run.directory) / "evaluation"
        return identity, folder / f"{identity_digest(identity)}.jsonl"
