"""graphtrain evaluate: measure the validation loss of a checkpoint."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from graphtrain.cli.checked import check
from graphtrain.cli.options import (
    cache_option,
    compile_hint,
    config_argument,
    json_option,
    overrides_option,
    process_options,
    step_option,
    target_option,
)

if TYPE_CHECKING:
    from graphtrain.checkpoints.checkpoint import StepName


@click.command("evaluate")
@config_argument
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
@json_option
def command(
    config: Path,
    target: str | None,
    overrides: Sequence[str],
    cache: Path,
    coordinator: str | None,
    count: int | None,
    rank: int | None,
    step: "StepName",
    bigram: bool,
    as_json: bool,
) -> None:
    """Measure the mean loss of a checkpoint on the entire validation set, in nats per token.

    For a run without checkpoints, measures the weights that it would start from. For a preference
    loss (DPO), the mean is per pair.
    """
    check(config, overrides, target, "EVALUATE_BIGRAM" if bigram else "EVALUATE")
    from graphtrain.api.runs import evaluate
    from graphtrain.run.processes import is_rank_zero

    result = evaluate(
        config,
        step=step,
        bigram=bigram,
        target=target,
        set=overrides,
        cache=cache,
        coordinator=coordinator,
        processes=count,
        rank=rank,
        compile_hint=compile_hint(config, target, overrides, cache),
    )
    if not is_rank_zero():
        return
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
