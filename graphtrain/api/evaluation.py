"""Evaluate a run on tasks of lm-eval, by compiled programs."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from graphtrain.api.checks.purpose import SERVE
from graphtrain.api.configuration import Settings, checked_config, open_cache

if TYPE_CHECKING:
    from graphtrain.api.configuration import Source
    from graphtrain.checkpoints.steps import StepName
    from graphtrain.run.evaluation.harness_model import TextFormat
    from graphtrain.run.evaluation.task_results import TaskResults
    from graphtrain.run.serving.row_engine import RowEngine

_COMPILE = "graphtrain compile CONFIG --for evaluate"


def _ignore_progress(kind: str, finished: int, count: int) -> None:
    """Ignore the progress of an evaluation."""


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
    compile_hint: str = _COMPILE,
    on_progress: Callable[[str, int, int], None] = _ignore_progress,
) -> TaskResults:
    """Evaluate a run on tasks of lm-eval with local data; nothing is fetched or compiled.

    Answers are kept in the folder `evaluation` of the run: an evaluation that was interrupted does
    not compute them again. Packages of Hugging Face that are imported by it are offline from then
    on, in this process.

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
        compile_hint: What compiles missing programs, for the error message.
        on_progress: Called with "scoring" or "generating", the number of requests that are
            answered, and that of all.

    Raises:
        MissingProgram: a program is not compiled.
        UserError: something else that the user can change; its text says what.
    """
    from lowering.machine.extras import optional_import

    config = checked_config(run, SERVE, set=set, target=target).config
    with optional_import("an evaluation of tasks"):
        from graphtrain.run.evaluation.evaluate_tasks import evaluate_tasks as evaluate
        from graphtrain.run.evaluation.loaded_tasks import TaskSettings
    from graphtrain.checkpoints.steps import named_step
    from graphtrain.config.resolve import resolve
    from graphtrain.run.evaluation.model_identity import identity_digest, model_identity
    from graphtrain.run.evaluation.text_format import open_text_format
    from graphtrain.run.serving.engine import open_engine
    from graphtrain.run.serving.weights import check_step

    directory, program = Path(config.run.directory), resolve(config.program)
    chosen = named_step(directory / "checkpoints", step)
    check_step(config.run, chosen)
    text = open_text_format(config, chat_template if apply_chat_template else None, bos)

    def open_model() -> tuple[RowEngine, TextFormat]:
        engine = open_engine(
            program,
            config.run,
            open_cache(cache),
            step=chosen,
            compile_hint=compile_hint,
            vocab=text.tokenizer.vocab,
            purpose="evaluate",
        )
        return engine, text

    settings = TaskSettings(
        tasks=tuple(tasks),
        data=None if data is None else Path(data),
        limit=limit,
        fewshot=fewshot,
        allow_code=allow_code,
    )
    identity = model_identity(program, config.run, chosen, text.tokenizer.digest)
    journal = directory / "evaluation" / f"{identity_digest(identity)}.jsonl"
    return evaluate(settings, open_model, identity, journal, on_progress)
