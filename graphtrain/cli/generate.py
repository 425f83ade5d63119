"""graphtrain generate: generate text that continues a prompt."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from graphtrain.cli.options import (
    cache_option,
    config_argument,
    json_option,
    overrides_option,
    step_option,
    target_option,
)
from graphtrain.cli.terminal import say

if TYPE_CHECKING:
    from graphtrain.checkpoints.checkpoint import StepName


@click.command("generate")
@config_argument
@click.argument("prompt")
@click.option(
    "--tokens",
    type=click.IntRange(1),
    default=64,
    show_default=True,
    help="Maximum number of tokens to generate.",
)
@click.option(
    "--temperature",
    type=click.FloatRange(0),
    default=0.8,
    show_default=True,
    help="Divisor of the logits; 0 always chooses the most likely token.",
)
@click.option(
    "--top-k",
    type=click.IntRange(1),
    help="Sample only from this many most likely tokens. [default: all tokens]",
)
@click.option(
    "--top-p",
    type=click.FloatRange(0, 1, min_open=True),
    help="Sample only from the fewest most likely tokens whose probabilities add up to this. "
    "[default: all tokens]",
)
@click.option(
    "--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of the sampling."
)
@click.option(
    "--bos/--no-bos",
    default=None,
    help="Begin the prompt with the beginning-of-sequence token. [default: as the documents of "
    "run.data.train begin; without them, as the tokenizer does by itself]",
)
@step_option
@target_option
@overrides_option
@cache_option
@json_option
def command(
    config: Path,
    prompt: str,
    tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    seed: int,
    bos: bool | None,
    step: "StepName",
    target: str | None,
    overrides: Sequence[str],
    cache: Path,
    as_json: bool,
) -> None:
    """Generate text that continues PROMPT, with the weights of a run.

    For a run without checkpoints, uses the weights that it would start from (run.init_from). The
    prefill and decode graphs are compiled into the cache on first use. Generation ends at the
    end-of-document token, or after --tokens tokens. A token follows from the tokens before it, of
    which program.batch.seq_len fit into the context; a longer text loses its beginning.
    """
    from graphtrain.api.runs import generate
    from graphtrain.cli.compile import progress

    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise click.BadParameter("the prompt is not UTF-8 text", param_hint="PROMPT") from None
    with progress() as observe:
        result = generate(
            config,
            prompt,
            max_tokens=tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            bos=bos,
            step=step,
            target=target,
            set=overrides,
            cache=cache,
            observe=observe,
        )
    if result.is_complete:
        say(f"the document ended after {len(result.tokens)} tokens")
    if len(result.prompt) + len(result.tokens) > (result.context_length or math.inf):
        say(
            f"longer than program.batch.seq_len = {result.context_length}: later tokens follow "
            "from the end of the text alone"
        )
    document = {"prompt": result.prompt, "tokens": result.tokens, "text": result.text}
    click.echo(json.dumps(document) if as_json else result.text)
