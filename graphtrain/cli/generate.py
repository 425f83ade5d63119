"""graphtrain generate: generate text that continues a prompt."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from graphtrain.cli.options import (
    cache_option,
    config_argument,
    json_option,
    overrides_option,
    target_option,
)

if TYPE_CHECKING:
    from graphtrain.config.schema import Config
    from graphtrain.data.tokenizers.protocol import Tokenizer


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
    default=0.0,
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
@click.option("--step", type=click.IntRange(0), help="Step of the checkpoint. [default: the last]")
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
    step: int | None,
    target: str | None,
    overrides: Sequence[str],
    cache: Path,
    as_json: bool,
) -> None:
    """Generate text that continues PROMPT, with the weights of a run.

    For a run without checkpoints, uses the weights that it would start from (run.init_from). The
    prefill and decode graphs are compiled into the cache on first use. Generation ends at the
    end-of-document token, after --tokens tokens, or at a sequence length of program.batch.seq_len.
    --seed is the seed of the sampling.
    """
    from graphtrain.cache import Cache
    from graphtrain.cli.compile import progress
    from graphtrain.config import load_config
    from graphtrain.config.resolve import resolve
    from graphtrain.run.generate import Generator, Sampling, encode_prompt

    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise click.BadParameter("the prompt is not UTF-8 text", param_hint="PROMPT") from None
    settings = load_config(config, overrides, target)
    tokenizer = _tokenizer(settings)
    prefix = _prompt_prefix(settings, tokenizer, bos)
    prompt_tokens = encode_prompt(tokenizer, prompt, prefix)
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    program = resolve(settings.program)
    with progress() as observe:
        generator = Generator(program, settings.run, Cache(cache), observe, step)
    generated_tokens: list[int] = []
    for token in generator.tokens(prompt_tokens, tokens, sampling, tokenizer.vocab):
        if token == tokenizer.eod:
            break
        generated_tokens.append(token)
    text = tokenizer.decode([*prompt_tokens[len(prefix) :], *generated_tokens])
    click.echo(
        json.dumps({"prompt": prompt_tokens, "tokens": generated_tokens, "text": text})
        if as_json
        else text
    )


def _prompt_prefix(config: "Config", tokenizer: "Tokenizer", bos: bool | None) -> tuple[int, ...]:
    """Return the token ids that begin a prompt: as asked, else as the training documents begin.

    Raises:
        DataError: BOS is required, and the tokenizer has none.
    """
    from graphtrain.data.indexed.description import read_description
    from graphtrain.data.tokenizers.special_tokens import document_prefix

    if bos is not None:
        return document_prefix(tokenizer, bos)
    descriptions = map(read_description, _train_prefixes(config))
    beginnings = list(dict.fromkeys(entry.bos for entry in descriptions if entry))
    if len(beginnings) > 1:
        click.echo(
            "only some datasets of run.data.train begin documents with the beginning-of-sequence "
            f"token; the prompt begins {'with' if beginnings[0] else 'without'} it, as in the "
            "first of them (choose with --bos or --no-bos)",
            err=True,
        )
    return beginnings[0] if beginnings else tokenizer.prefix


def _train_prefixes(config: "Config") -> list[str]:
    """Return the path prefixes of the training datasets."""
    train = config.run.data.train
    return [train] if isinstance(train, str) else [entry.dataset for entry in train]


def _tokenizer(config: "Config") -> "Tokenizer":
    """Return the tokenizer stored with the weights, else that of the training data.

    Raises:
        DataError: there is no tokenizer, or it cannot be used.
        WeightsError: its file is damaged.
    """
    from graphtrain.data.indexed.description import dataset_tokenizer
    from graphtrain.data.tokenizers.open import load_tokenizer
    from graphtrain.errors import DataError
    from graphtrain.weights.hf_record import verify_hf_files
    from graphtrain.weights.sources import HF_FILES

    folders = [Path(config.run.directory) / HF_FILES]
    if config.run.init_from is not None:  # converted weights, or a Hugging Face folder
        folders += [Path(config.run.init_from) / HF_FILES, Path(config.run.init_from)]
    for folder in folders:
        if any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model")):
            if folder.name == HF_FILES:
                verify_hf_files(folder.parent)
            return load_tokenizer(folder)
    for prefix in _train_prefixes(config):
        if (tokenizer := dataset_tokenizer(prefix)) is not None:
            return tokenizer
    raise DataError(
        f"no tokenizer in {config.run.directory}/{HF_FILES}, with the weights of run.init_from, or "
        "with the datasets of run.data.train; prepare the data with graphtrain data prepare"
    )
