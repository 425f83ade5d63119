"""graphtrain plan CONFIG: show the plan of one program for one target, or for several."""

import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from graphtrain.api.checks.purpose import PLAN
from graphtrain.cli.checked import check
from graphtrain.cli.cost_options import cost_options, workload
from graphtrain.cli.options import (
    LocalPath,
    cache_option,
    check_output,
    config_argument,
    json_option,
    overrides_option,
    target_option,
    write_file,
)
from graphtrain.cli.terminal import say

if TYPE_CHECKING:
    from graphtrain.api.checks.checked import CheckedConfig
    from graphtrain.config.resolve import ResolvedProgram
    from graphtrain.config.schema import Program
    from graphtrain.graphs.names import PlannedPurpose, ServingPurpose
    from graphtrain.planning.answer import Answer
    from graphtrain.planning.costs import Cost, Workload

_PAGE_MARK = '<meta name="generator" content="graphtrain plan">'
_STRATEGY_MARK = '"graphtrain_strategy"'
DOES_NOT_FIT = 4  # exit status

compile_or_estimate_option = click.option(
    "--compile/--no-compile",
    "ask_compiler",
    default=True,
    help="Compile for the target, or only estimate. [default: --compile]",
)


@click.command("plan")
@config_argument
@target_option
@click.option("--targets", metavar="A,B,...", help="Compare these machines, one line each.")
@cost_options
@overrides_option
@cache_option
@compile_or_estimate_option
@click.option(
    "--confirm/--no-confirm",
    default=True,
    help="If the step does not fit, compile the changes that would make it fit, or only estimate "
    "them. With --for serve, compile the largest number of slots. [default: --confirm]",
)
@click.option(
    "--for",
    "purpose",
    type=click.Choice(("train", "generate", "batch", "evaluate", "serve")),
    default="train",
    show_default=True,
    help="What to plan: one training step, or the programs that generate one sequence, generate a "
    "batch, evaluate tasks, or serve.",
)
@click.option(
    "--jobs",
    type=click.IntRange(1),
    help="With --targets: number of compilations in parallel. [default: number of cores]",
)
@click.option(
    "--array", "pattern", metavar="PATTERN", help="Show only these arrays, for example '*mlp*'."
)
@click.option(
    "--blame", is_flag=True, help="Show only the cause of every collective, one line each."
)
@click.option(
    "--html",
    type=LocalPath(),
    metavar="FILE",
    help="Also write the plan to FILE as an HTML page.",
)
@click.option(
    "--results",
    type=LocalPath(),
    metavar="FILE",
    help="With --html: output of graphtrain plan search --json, to show on the page.",
)
@click.option(
    "--save-strategy",
    "strategy",
    type=LocalPath(),
    metavar="FILE",
    help="Only write the sharding of every array to FILE, as JSON (.json) or in MindSpore's format "
    "(.ckpt); compiles nothing.",
)
@json_option
def show(
    config: Path,
    target: str | None,
    targets: str | None,
    overrides: Sequence[str],
    cache: Path,
    ask_compiler: bool,
    confirm: bool,
    purpose: "PlannedPurpose",
    jobs: int | None,
    pattern: str | None,
    blame: bool,
    html: Path | None,
    results: Path | None,
    strategy: Path | None,
    as_json: bool,
    tokens: int | None,
    prices: Path | None,
) -> None:
    """Show the memory, communication and time of each device for the training step of CONFIG."""
    if purpose != "train":
        options = {"--targets": targets, "--array": pattern, "--blame": blame, "--html": html,
                   "--results": results, "--save-strategy": strategy, "--tokens": tokens,
                   "--prices": prices}  # fmt: skip
        if given := [name for name, value in options.items() if value]:
            raise click.UsageError(f"{given[0]} is for training steps; remove --for {purpose}")
        checked = check(config, overrides, target, PLAN)
        _show_serving(checked, purpose, cache, ask_compiler, confirm, as_json)
        return
    of_one = {"--target": target, "--array": pattern, "--blame": blame, "--html": html,
              "--save-strategy": strategy}  # fmt: skip
    if targets is not None and (given := [name for name, value in of_one.items() if value]):
        raise click.UsageError(f"{given[0]} is for the plan of one machine; remove --targets")
    if blame and not ask_compiler:
        raise click.UsageError(
            "--blame needs a compiled step, which has the causes of collectives; remove "
            "--no-compile"
        )
    if results is not None and html is None:
        raise click.UsageError("--results is only shown on a page; add --html FILE")
    if targets is not None:
        names = [name.strip() for name in targets.split(",")]
        from graphtrain.cli.plan_targets import check_targets, compare

        check_targets(names)
        compare(names, config, overrides, cache, ask_compiler, jobs, as_json, tokens, prices)
        return
    outputs = {"--html": html, "--save-strategy": strategy}
    checked = check(config, overrides, target, PLAN, outputs=outputs)
    from graphtrain.config.resolve import resolve

    program = resolve(checked.config.program)
    if html is not None:
        check_output(html, _PAGE_MARK)  # before the plan, which takes time
    if strategy is not None:
        check_output(strategy, _STRATEGY_MARK)
        from graphtrain.checkpoints.strategy import save_strategy

        save_strategy(strategy, program)
        say(f"wrote {strategy}")
        return
    if pattern is not None and not as_json and html is None:
        _print_arrays(program, pattern)
        return
    from graphtrain.api.programs import plan
    from graphtrain.cli.compile import print_fallbacks, progress

    work = workload(checked.config, tokens, prices)
    work.check_prices(program.target)
    asked = checked.config.program
    search_results = [] if results is None else _read_search_results(results, asked)
    with progress() as observe:
        plan_answer = plan(
            checked,
            cache=cache,
            compile=ask_compiler,
            confirm=confirm,
            observe=observe,
        )
    if html is not None:
        _write_page(html, config, plan_answer, search_results)
    if as_json:
        _print_json(plan_answer, pattern, work)
    elif blame:
        _print_causes(plan_answer)
    else:
        plan_answer.print(console())
        if work.tokens is not None:
            sentence = work.sentence(_cost(plan_answer, work))
            click.echo(sentence if plan_answer.fits else f"if it did fit: {sentence}")
        _print_imported(program, cache)
        print_fallbacks(checked)
    if not plan_answer.fits:
        sys.exit(DOES_NOT_FIT)


def _show_serving(
    checked: "CheckedConfig",
    purpose: "ServingPurpose",
    cache: Path,
    ask_compiler: bool,
    confirm: bool,
    as_json: bool,
) -> None:
    """Print the plan of the programs that generate or serve; exit with DOES_NOT_FIT."""
    from graphtrain.api.programs import plan
    from graphtrain.cli.compile import progress
    from graphtrain.planning.serving_json import serving_as_json

    with progress() as observe:
        answer = plan(
            checked,
            cache=cache,
            compile=ask_compiler,
            confirm=confirm,
            purpose=purpose,
            observe=observe,
        )
    if as_json:
        click.echo(json.dumps(serving_as_json(answer)))
    else:
        answer.print(console())
    if not answer.fits:
        sys.exit(DOES_NOT_FIT)


def _print_imported(program: "ResolvedProgram", store: Path) -> None:
    """Print how an imported PyTorch model is traced and sharded."""
    from graphtrain.compile.front_end import describe_model

    for line in describe_model(program, store):
        click.echo(line)


def console():
    """Return a console for stdout; not a terminal, it is so wide that no table is cut."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 1000, highlight=False, markup=False)


def _print_arrays(program: "ResolvedProgram", pattern: str) -> None:
    from graphtrain.graphs.plan import plan_program
    from graphtrain.planning.tables import plan_table
    from graphtrain.planning.text import matching_paths

    plan = plan_program(program)
    console().print(plan_table(plan, matching_paths(plan, pattern)))


def _print_causes(plan_answer: "Answer") -> None:
    """Print one line for each collective of the compiled step.

    Raises:
        PlanError: there is no compiled step, although it may fit.
    """
    from graphtrain.errors import PlanError
    from graphtrain.planning.text import explanation_lines

    assessment = plan_answer.assessment
    if assessment.collectives_source == "compiler":
        click.echo(explanation_lines(plan_answer.causes) or "the compiled step has no collectives")
        return
    reason = f"--blame needs a compiled step, and there is none: {assessment.note}"
    if plan_answer.fits:
        raise PlanError(reason)
    click.echo(reason)


def _cost(plan_answer: "Answer", work: "Workload") -> "Cost":
    """Return what a workload costs by the plan of one target."""
    from graphtrain.planning.phases import cost_of

    return cost_of(work, plan_answer.program, plan_answer.assessment, plan_answer.phases)


def _print_json(plan_answer: "Answer", pattern: str | None, work: "Workload") -> None:
    from graphtrain.planning.json_output import answer_as_json
    from graphtrain.planning.text import matching_paths

    contents = answer_as_json(plan_answer)
    contents["cost"] = work.as_json(_cost(plan_answer, work))
    if pattern is not None:
        shown = set(matching_paths(plan_answer.assessment.plan, pattern))
        contents["arrays"] = [row for row in contents["arrays"] if row["path"] in shown]
    click.echo(json.dumps(contents))


def _read_search_results(results: Path, program: "Program") -> list[dict[str, Any]]:
    """Return the strategies in the output of graphtrain plan search --json for a program."""
    from graphtrain.errors import PlanError
    from graphtrain.planning.chosen import searched_program
    from sharding_rules.documents import read_json

    try:
        found = read_json(results)
        searched, strategies = found.get("program"), found["strategies"]
    except OSError as error:
        raise PlanError(f"{results} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise PlanError(f"{results} is not the output of graphtrain plan search --json") from None
    if searched != searched_program(program):
        raise PlanError(
            f"{results} is of another target, model or sequence length, or of another version; run "
            "graphtrain plan search --json again"
        )
    return strategies


def _write_page(
    path: Path, config: Path, plan_answer: "Answer", search_results: Sequence[dict[str, Any]]
) -> None:
    from graphtrain.planning.page import render_page

    command = shlex.join(["graphtrain", *sys.argv[1:]])
    page = render_page(config.stem, plan_answer, search_results, command)
    write_file(path, page, _PAGE_MARK)
    say(f"wrote {path}")
