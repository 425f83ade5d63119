"""graphtrain evaluate: measure the validation loss of a checkpoint, or evaluate it on tasks."""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from graphtrain.api.checks.purpose import SERVE, evaluation_purpose
from graphtrain.cli.checked import check
from graphtrain.cli.options import (
    LocalPath,
    cache_option,
    chat_template_option,
    compile_hint,
    config_argument,
    json_option,
    overrides_option,
    process_options,
    step_option,
    target_option,
    write_file,
)
from graphtrain.cli.terminal import say

if TYPE_CHECKING:
    from graphtrain.checkpoints.steps import StepName

_TASK_OPTIONS = (
    "data", "limit", "fewshot", "samples", "report", "apply_chat_template", "chat_template",
    "allow_code", "bos",
)  # fmt: skip
_LOSS_OPTIONS = ("bigram",)
_NOT_OF_CURVES = ("step", "samples", "report", *_LOSS_OPTIONS)


class _Steps(click.ParamType):
    """`all`, or steps separated by commas."""

    name = "steps"

    def convert(self, value: Any, param: Any, ctx: Any) -> "str | list[int]":
        if value == "all" or isinstance(value, list):
            return value
        words = [word.strip() for word in value.split(",")]
        if not all(word.isascii() and word.isdecimal() for word in words):
            self.fail(f"{value!r} is neither all nor steps separated by commas", param, ctx)
        return [int(word) for word in words]


def task_options(command: Callable) -> Callable:
    """Add the options of an evaluation on tasks."""
    options = (
        click.option(
            "--tasks",
            metavar="NAMES",
            help="Evaluate on these tasks of lm-eval, separated by commas: tasks, groups, tags, or "
            "YAML files of tasks.",
        ),
        click.option(
            "--data",
            type=LocalPath(exists=True, file_okay=False),
            metavar="DIR",
            help="Directory of the tasks' data: DIR/TASK/SPLIT.jsonl or .parquet.",
        ),
        click.option("--limit", type=click.IntRange(1), help="Number of rows of each task."),
        click.option(
            "--fewshot",
            type=click.IntRange(0),
            help="Number of examples in a prompt. [default: as each task says]",
        ),
        click.option(
            "--apply-chat-template", is_flag=True, help="Make each prompt a conversation."
        ),
        chat_template_option,
        click.option(
            "--bos/--no-bos",
            default=None,
            help="Begin texts with the beginning-of-sequence token. [default: as the documents of "
            "run.data.train begin; without them, as the tokenizer does by itself]",
        ),
        click.option(
            "--allow-code",
            is_flag=True,
            help="Run code that the model writes, as HumanEval does, without network, new "
            "processes and writing, with limits of memory and time.",
        ),
        click.option(
            "--samples",
            type=LocalPath(),
            metavar="FILE",
            help="Write every answer with its prompt to FILE, as JSON lines.",
        ),
        click.option(
            "--report", type=LocalPath(), metavar="FILE", help="Write the results to FILE, as JSON."
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


@click.command("evaluate")
@config_argument
@task_options
@target_option
@overrides_option
@cache_option
@process_options
@step_option
@click.option(
    "--bigram",
    is_flag=True,
    help="Also measure a bigram model of the training data, with add-one smoothing.",
)
@click.option(
    "--steps",
    type=_Steps(),
    metavar="all|N,N",
    help="Evaluate all checkpoints, or those of these steps, and show the curve.",
)
@click.option(
    "--plot",
    type=LocalPath(),
    metavar="FILE",
    help="With --steps, draw the curve into FILE, a .svg or .png.",
)
@json_option
def command(
    config: Path,
    tasks: str | None,
    target: str | None,
    overrides: Sequence[str],
    cache: Path,
    step: "StepName",
    steps: "Literal['all'] | list[int] | None",
    plot: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Measure the mean loss of a checkpoint on the entire validation set, in nats per token.

    For a run without checkpoints, measures the weights that it would start from. For a preference
    loss (DPO), the mean is per pair.

    With --tasks, evaluates it on tasks of lm-eval instead, offline, with local data. Nothing is
    traced or compiled: a missing program is an error (status 3). Answers are kept in the run's
    directory, so that the same command resumes an evaluation that was interrupted.

    With --steps, evaluates several checkpoints, and shows the curve.
    """
    _check_options(with_tasks=tasks is not None, with_steps=steps is not None)
    hint = compile_hint(config, target, overrides, cache)
    names = [name.strip() for name in (tasks or "").split(",") if name.strip()]
    peers = {name: options[name] for name in ("coordinator", "rank")}
    peers["processes"] = options["count"]
    if steps is not None:
        given = {name: options[name] for name in _TASK_OPTIONS if name not in _NOT_OF_CURVES}
        given |= {"steps": steps, "cache": cache, "set": overrides, "target": target, **peers}
        hint += " --for evaluate" if names else ""
        _evaluate_steps(config, names, plot, given | {"compile_hint": hint}, as_json=as_json)
        return
    if tasks is not None:
        files = {f"--{name}": options[name] for name in ("samples", "report")}
        checked = check(config, overrides, target, SERVE, outputs=files, rank=_known_rank(peers))
        given = {name: options[name] for name in _TASK_OPTIONS if f"--{name}" not in files}
        given |= {"step": step, "cache": cache, "compile_hint": f"{hint} --for evaluate", **peers}
        _evaluate_tasks(checked, names, files, given, as_json=as_json)
        return
    purpose = evaluation_purpose(bigram=options["bigram"])
    checked = check(config, overrides, target, purpose, rank=_known_rank(peers))
    from graphtrain.api.runs import evaluate
    from graphtrain.run.processes import is_rank_zero

    result = evaluate(
        checked,
        step=step,
        bigram=options["bigram"],
        cache=cache,
        compile_hint=hint,
        **peers,
    )
    if is_rank_zero():
        _print_loss(result, as_json=as_json)


def _known_rank(peers: dict[str, Any]) -> int:
    """Return the rank that this process has once it has joined the others."""
    from graphtrain.run.processes import expected_rank

    return expected_rank(peers["coordinator"], peers["processes"], peers["rank"])


def _evaluate_steps(
    config: Path, tasks: Sequence[str], plot: Path | None, options: dict[str, Any], *, as_json: bool
) -> None:
    """Evaluate checkpoints; print the curve, and draw it into a file."""
    from graphtrain.api.evaluation import evaluate_steps
    from graphtrain.files import atomic_write, output_exists
    from graphtrain.run.processes import is_rank_zero

    kind = plot and plot.suffix.lower().removeprefix(".")
    if kind not in (None, "svg", "png"):
        raise click.UsageError(f"--plot {plot}: the name has to end in .svg or .png")
    if plot is not None and plot.exists():
        raise output_exists(plot)
    if plot is not None:
        from graphtrain.planning.page import require_charts

        require_charts("--plot")

    def announce(step: int) -> None:
        if is_rank_zero():
            say(f"step {step}")

    with _progress() as on_progress:
        curve = evaluate_steps(config, tasks, on_progress=on_progress, on_step=announce, **options)
    if not is_rank_zero():
        return
    if plot is not None:
        with atomic_write(plot) as file:
            file.write(curve.picture(kind or "svg"))
    if as_json:
        click.echo(curve.json())
        return
    click.echo(curve.table())
    if len(curve.steps) > 1:
        click.echo(curve.chart())


def _print_loss(result: Any, *, as_json: bool) -> None:
    if as_json:
        known = {name: value for name, value in vars(result).items() if value is not None}
        finite = {name: value if math.isfinite(value) else None for name, value in known.items()}
        click.echo(json.dumps(finite))
        return
    click.echo(f"validation loss of step {result.step}: {result.validation_loss:.4f}")
    click.echo(f"perplexity: {result.perplexity:.2f}")
    if result.bigram_loss is not None:
        click.echo(
            f"validation loss of a bigram model (add-one smoothing): {result.bigram_loss:.4f}"
        )


def _evaluate_tasks(
    checked: Any,
    tasks: Sequence[str],
    files: dict[str, Path | None],
    options: dict[str, Any],
    *,
    as_json: bool,
) -> None:
    """Evaluate on tasks; print and write the results."""
    from graphtrain.api.evaluation import evaluate_tasks
    from graphtrain.files import atomic_write, output_exists
    from graphtrain.run.processes import is_rank_zero

    for path in files.values():  # before an evaluation that may take hours
        if path is not None and path.exists():
            raise output_exists(path)
    with _progress() as on_progress:
        results = evaluate_tasks(checked, tasks, on_progress=on_progress, **options)
    if not is_rank_zero():
        return
    origin = results.document["graphtrain"]
    if origin["reused_answers"]:
        say(f"{origin['reused_answers']} answers of an earlier evaluation were used")
    if origin["cut_texts"]:
        say(
            f"{origin['cut_texts']} texts were longer than the context of "
            f"{results.document['max_length']} tokens, and lost their beginning "
            "(program.serve.context_length)"
        )
    click.echo(results.json() if as_json else results.table())  # first: a disk may be full
    if (samples := files["--samples"]) is not None:
        with atomic_write(samples) as file:
            file.write(results.sample_lines().encode())
    if (report := files["--report"]) is not None:
        write_file(report, results.json() + "\n")


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """Show a progress bar on a terminal; elsewhere one line for each kind of request."""
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress

    console = Console(stderr=True)
    if not console.is_terminal:
        announced: set[str] = set()

        def announce(kind: str, finished: int, count: int) -> None:
            if kind not in announced and count:
                say(f"{kind}: {count} requests, {finished} of them answered before")
            announced.add(kind)

        yield announce
        return
    columns = (*Progress.get_default_columns(), MofNCompleteColumn())
    with Progress(*columns, console=console, transient=True) as display:
        rows: dict[str, Any] = {}

        def update(kind: str, finished: int, count: int) -> None:
            if kind not in rows:
                rows[kind] = display.add_task(kind, total=count)
            display.update(rows[kind], completed=finished, total=count)

        yield update


def _check_options(*, with_tasks: bool, with_steps: bool) -> None:
    """Refuse options of another kind of evaluation."""
    context = click.get_current_context()
    default = click.core.ParameterSource.DEFAULT
    environment = click.core.ParameterSource.ENVIRONMENT
    refused = _LOSS_OPTIONS if with_tasks else _TASK_OPTIONS
    plain_prompts = with_tasks and not context.params["apply_chat_template"]
    for parameter in context.command.params:
        name, word = parameter.name or "", parameter.opts[0]
        if context.get_parameter_source(name) in (default, environment):
            continue
        if plain_prompts and name == "chat_template":
            raise click.UsageError(f"{word} needs --apply-chat-template")
        if with_steps and name in _NOT_OF_CURVES:
            raise click.UsageError(f"--steps leaves {word} without effect")
        if not with_steps and name == "plot":
            raise click.UsageError("--plot needs --steps")
        if name in refused:
            raise click.UsageError(
                f"--tasks leaves {word} without effect" if with_tasks else f"{word} needs --tasks"
            )
