"""Train, evaluate, generate, and read the metrics of a run."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from graphtrain.api.configuration import (
    Observer,
    Settings,
    load_config,
    log,
    observe_nothing,
    open_cache,
)
from graphtrain.api.programs import compile_missing

if TYPE_CHECKING:
    from graphtrain.api.configuration import Source
    from graphtrain.checkpoints.checkpoint import StepName
    from graphtrain.run.callbacks import Callback
    from graphtrain.run.evaluate import Evaluation
    from graphtrain.run.events import RunSummary
    from graphtrain.run.generate import Generation
    from graphtrain.run.metric_columns import Metrics

_COMPILE = "graphtrain.compile(...) with the same configuration"


def train(
    config: Source,
    *,
    callbacks: Sequence[Callback] = (),
    target: str | None = None,
    set: Settings = (),
    cache: str | os.PathLike[str] | None = None,
    compile: bool = False,
    allow_change: Sequence[str] = (),
    fresh: bool = False,
    coordinator: str | None = None,
    processes: int | None = None,
    rank: int | None = None,
    compile_hint: str = _COMPILE,
    log: Callable[[str], None] = log,
) -> RunSummary:
    """Train from compiled programs, and from the last checkpoint if there is one.

    Ctrl-C and SIGTERM save a checkpoint and stop; the summary says so. The same call resumes.

    Args:
        config: A configuration, in any form that load_config accepts.
        callbacks: Objects with methods of `Callback`.
        target: Machine to run on, in place of program.target.
        set: Settings to change.
        cache: Directory of compiled programs; None for $GRAPHTRAIN_CACHE, else ./cache.
        compile: Whether to compile missing programs first, in place of MissingProgram.
        allow_change: Settings that may differ from those of the checkpoint.
        fresh: Start at step 0; a run in the directory is moved to its folder earlier/N.
        coordinator: Address of rank 0, host:port, if the run has several processes.
        processes: Number of processes of the run.
        rank: Rank of this process, from 0.
        compile_hint: What compiles missing programs, for the error message.
        log: Called with what is fetched from a remote cache; by default the logger "graphtrain".

    Raises:
        MissingProgram: a program is not compiled.
        CallbackError: a callback raised an exception.
        UserError: something else that the user can change; its text says what.
    """
    from graphtrain.compile.shared_cache import pull_programs
    from graphtrain.config.resolve import resolve

    settings = load_config(config, set=set, target=target)
    program, store = resolve(settings.program), open_cache(cache)
    if compile:
        compile_missing(settings, cache=cache, log=log)
    else:
        pull_programs(store, [program], log)
    from graphtrain.run.processes import join_run
    from graphtrain.run.train import train as train_program

    join_run(program.target, coordinator, processes, rank)
    return train_program(
        program,
        settings.run,
        store,
        compile_hint=compile_hint,
        callbacks=callbacks,
        allowed_changes=allow_change,
        fresh=fresh,
    )


def evaluate(
    run: Source,
    *,
    step: StepName = "last",
    bigram: bool = False,
    target: str | None = None,
    set: Settings = (),
    cache: str | os.PathLike[str] | None = None,
    coordinator: str | None = None,
    processes: int | None = None,
    rank: int | None = None,
    compile_hint: str = _COMPILE,
) -> Evaluation:
    """Return the mean loss of a checkpoint on the entire validation set, in nats per token.

    For a run without checkpoints, it is that of the weights that it would start from.

    Args:
        run: Directory or summary of a run, or its configuration in any form.
        step: Step of the checkpoint, "last", or "best", that of the lowest validation loss.
        bigram: Whether to measure a bigram model of the training data too.
        target: Machine to run on, in place of program.target.
        set: Settings to change.
        cache: Directory of compiled programs; None for $GRAPHTRAIN_CACHE, else ./cache.
        coordinator: Address of rank 0, host:port, if there are several processes.
        processes: Number of processes.
        rank: Rank of this process, from 0.
        compile_hint: What compiles a missing program, for the error message.

    Raises:
        MissingProgram: the evaluation step is not compiled.
        UserError: something else that the user can change; its text says what.
    """
    from dataclasses import replace

    from graphtrain.checkpoints.checkpoint import named_step
    from graphtrain.config.resolve import resolve
    from graphtrain.run.evaluate import bigram_loss, checkpoint_loss
    from graphtrain.run.processes import is_rank_zero, join_run

    settings = load_config(run, set=set, target=target)
    program = resolve(settings.program)
    join_run(program.target, coordinator, processes, rank)
    chosen = named_step(Path(settings.run.directory) / "checkpoints", step)
    result = checkpoint_loss(
        program, settings.run, open_cache(cache), compile_hint=compile_hint, step=chosen
    )
    if bigram and is_rank_zero():
        return replace(result, bigram_loss=bigram_loss(settings))
    return result


def generate(
    run: Source,
    prompt: str,
    *,
    max_tokens: int = 64,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    bos: bool | None = None,
    step: StepName = "last",
    target: str | None = None,
    set: Settings = (),
    cache: str | os.PathLike[str] | None = None,
    observe: Observer = observe_nothing,
) -> Generation:
    """Generate text that continues a prompt, with the weights of a run.

    The prefill and decode graphs are compiled into the cache on first use.

    Args:
        run: Directory or summary of a run, or its configuration in any form.
        prompt: Text to continue.
        max_tokens: Maximum number of tokens to generate.
        temperature: Divisor of the logits; 0 always chooses the most likely token.
        top_k: Sample only from this many most likely tokens.
        top_p: Sample only from the fewest most likely tokens with this total probability.
        seed: Seed of the sampling.
        bos: Whether the prompt begins with the beginning-of-sequence token; None: as the training
            documents do.
        step: Step of the checkpoint, "last", or "best", that of the lowest validation loss.
        target: Machine to run on, in place of program.target.
        set: Settings to change.
        cache: Directory of compiled programs; None for $GRAPHTRAIN_CACHE, else ./cache.
        observe: Called with the progress of compilations.

    Raises:
        UserError: something that the user can change; its text says what.
    """
    from graphtrain.checkpoints.checkpoint import named_step
    from graphtrain.config.resolve import resolve
    from graphtrain.run.generate import Generation, Generator, Sampling, encode_prompt
    from graphtrain.run.prompt import prompt_prefix, run_tokenizer

    settings = load_config(run, set=set, target=target)
    tokenizer = run_tokenizer(settings)
    prefix = prompt_prefix(settings, tokenizer, bos)
    prompt_tokens = encode_prompt(tokenizer, prompt, prefix)
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    program = resolve(settings.program)
    chosen = named_step(Path(settings.run.directory) / "checkpoints", step)
    generator = Generator(program, settings.run, open_cache(cache), observe, chosen)
    tokens: list[int] = []
    is_complete = False
    for token in generator.tokens(prompt_tokens, max_tokens, sampling, tokenizer.vocab):
        if token == tokenizer.eod:
            is_complete = True
            break
        tokens.append(token)
    text = tokenizer.decode([*prompt_tokens[len(prefix) :], *tokens])
    ids = tuple(prompt_tokens), tuple(tokens)
    return Generation(text, *ids, is_complete, generator.context_length)


def metrics(run: Source) -> Metrics:
    """Return the metrics of a run as columns.

    Args:
        run: Directory or summary of a run, or its configuration in any form.

    Raises:
        TrainingError: the run has no metrics.
    """
    from graphtrain.run.metric_columns import read_metrics

    return read_metrics(_directory(run))


def _directory(run: Source) -> Path:
    """Return the directory of a run, which may have been moved since it was trained."""
    if isinstance(run, str | os.PathLike) and Path(run).is_dir():
        return Path(run)
    return getattr(run, "directory", None) or Path(load_config(run).run.directory)
