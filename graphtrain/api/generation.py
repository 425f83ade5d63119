"""Generate text with the weights of a run."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphtrain.api.checks.purpose import GENERATE
from graphtrain.api.configuration import (
    Observer,
    Settings,
    checked_config,
    log,
    name_of,
    observe_nothing,
    open_cache,
)

if TYPE_CHECKING:
    from graphtrain.api.configuration import Source
    from graphtrain.cache import Cache
    from graphtrain.checkpoints.steps import StepName
    from graphtrain.config.resolve import ResolvedProgram
    from graphtrain.config.schema import Config, Program
    from graphtrain.data.tokenizers.protocol import Tokenizer
    from graphtrain.run.batch_generation import Continuation
    from graphtrain.run.generate import Generation
    from graphtrain.run.prompt_file import Prompt
    from graphtrain.run.serving.beam_search import BeamSettings
    from graphtrain.run.serving.engine import CompiledEngine
    from graphtrain.run.serving.engine_protocol import SamplingParameters
    from graphtrain.run.serving.sequence import SequenceRequest
    from graphtrain.weights.named_adapters import NamedAdapter


def generate(
    run: Source,
    prompt: str,
    *,
    max_tokens: int = 64,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    beams: int | None = None,
    length_penalty: float = 1.0,
    bos: bool | None = None,
    adapter: str | os.PathLike[str] | None = None,
    step: StepName = "last",
    target: str | None = None,
    set: Settings = (),
    cache: str | os.PathLike[str] | None = None,
    observe: Observer = observe_nothing,
    on_text: Callable[[str], None] | None = None,
) -> Generation:
    """Generate text that continues a prompt, with the weights of a run.

    The programs of generation are compiled into the cache on first use.

    Args:
        run: Directory or summary of a run, or its configuration in any form.
        prompt: Text to continue.
        max_tokens: Maximum number of tokens to generate.
        temperature: Divisor of the logits; 0 always chooses the most likely token.
        top_k: Sample only from this many most likely tokens.
        top_p: Sample only from the fewest most likely tokens with this total probability.
        seed: Seed of the sampling.
        beams: Search for the most likely text with this many beams, at least 2, in place of
            sampling. Then temperature, top_k, top_p and seed are not used, and prompt and text
            must fit into the context.
        length_penalty: Exponent of the number of tokens by which a beam search divides
            log-probabilities: above 0, longer texts are preferred.
        bos: Whether the prompt begins with the beginning-of-sequence token; None: as the training
            documents do.
        adapter: LoRA adapter that is merged into the weights: a folder of PEFT, or the directory
            of a run with [program.adapter]; None: none.
        step: Step of the checkpoint, "last", or "best", that of the lowest validation loss.
        target: Machine to run on, in place of program.target.
        set: Settings to change.
        cache: Directory of compiled programs; None for $GRAPHTRAIN_CACHE, else ./cache.
        observe: Called with the progress of compilations.
        on_text: Called with the prompt, and then with the text as it is generated; after a beam
            search, with all of it.

    Raises:
        UserError: something that the user can change; its text says what.
    """
    from graphtrain.config.resolve import resolve
    from graphtrain.errors import GraphtrainError
    from graphtrain.run.generate import Generation, generate_tokens, open_generator
    from graphtrain.run.prompt import encode_prompt, prompt_prefix, run_tokenizer
    from graphtrain.run.serving.beam_search import beam_search

    if not isinstance(prompt, str):
        raise GraphtrainError(f"prompt = {prompt!r}: must be a string")
    sampling = sampling_parameters(temperature, top_k, top_p, seed, max_tokens)
    settings = checked_config(run, GENERATE, set=set, target=target).config
    tokenizer = run_tokenizer(settings)
    prefix = prompt_prefix(settings, tokenizer, bos)
    prompt_tokens = encode_prompt(tokenizer, prompt, prefix)
    sampling = replace(sampling, stop_tokens=() if tokenizer.eod is None else (tokenizer.eod,))
    search = beam_settings(beams, length_penalty)
    program, number = resolve(_with_beams(settings.program, search)), fixed_step(settings, step)
    engine = open_generator(
        program,
        settings.run,
        open_cache(cache),
        observe,
        number,
        vocab=tokenizer.vocab,
        name=name_of(run),
        merged=_merged_adapter(program, settings, number, adapter),
    )
    if search is None:
        generated = generate_tokens(engine, prompt_tokens, sampling)
    else:
        best, *_ = beam_search(
            engine, prompt_tokens, search, max_tokens, lambda tokens: tokens[-1] == tokenizer.eod
        )
        generated = iter(best.tokens)
    if on_text is not None:
        on_text(tokenizer.decode(prompt_tokens[len(prefix) :]))
        generated = _report_text(generated, tokenizer, prompt_tokens, on_text)
    tokens = list(generated)
    is_complete = tokens[-1:] == [tokenizer.eod]
    tokens = tokens[:-1] if is_complete else tokens
    text = tokenizer.decode([*prompt_tokens[len(prefix) :], *tokens])
    ids = tuple(prompt_tokens), tuple(tokens)
    return Generation(text, *ids, is_complete, engine.context_length)


def generate_batch(
    run: Source,
    prompts: Iterable[str | Sequence[Mapping[str, Any]] | Prompt],
    *,
    samples: int = 1,
    max_tokens: int = 64,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    beams: int | None = None,
    length_penalty: float = 1.0,
    chat_template: str = "own",
    bos: bool | None = None,
    adapter: str | os.PathLike[str] | None = None,
    step: StepName = "last",
    target: str | None = None,
    set: Settings = (),
    cache: str | os.PathLike[str] | None = None,
    observe: Observer = observe_nothing,
) -> Iterator[list[Continuation]]:
    """Continue many prompts with the weights of a run.

    Sequences share the slots of `program.serve.slots` by continuous batching; beam searches follow
    each other. The programs are compiled into the cache on first use. A continuation ends with the
    context at the latest.

    Args:
        run: Directory or summary of a run, or its configuration in any form.
        prompts: Texts to continue, and conversations to answer: lists of messages.
        samples: Number of continuations of each prompt; number i has the seed `seed` + i. Of a
            beam search, number of its best beams.
        max_tokens: Maximum number of tokens of a continuation.
        temperature: Divisor of the logits; 0 always chooses the most likely token.
        top_k: Sample only from this many most likely tokens.
        top_p: Sample only from the fewest most likely tokens with this total probability.
        seed: Seed of the sampling, the same for each prompt.
        beams: Search for the most likely text with this many beams, at least 2, in place of
            sampling. Then temperature, top_k, top_p and seed are not used.
        length_penalty: As for `generate`.
        chat_template: Name of a built-in template, a file, or `own`: that of the training data,
            else that of the tokenizer.
        bos: Whether a text begins with the beginning-of-sequence token; None: as the training
            documents do.
        adapter: LoRA adapter that is merged into the weights: a folder of PEFT, or the directory
            of a run with [program.adapter]; None: none.
        step: Step of the checkpoint, "last", or "best", that of the lowest validation loss.
        target: Machine to run on, in place of program.target.
        set: Settings to change.
        cache: Directory of compiled programs; None for $GRAPHTRAIN_CACHE, else ./cache.
        observe: Called with the progress of compilations.

    Returns:
        Continuations of each prompt in order, each list sorted by mean log-probability, or by the
        score of the beam search. Nothing is generated before the first one is asked for; prompts
        are checked at once.

    Raises:
        UserError: something that the user can change; its text says what.
    """
    batch = PromptBatch.prepare(
        run,
        prompts,
        samples=samples,
        sampling=sampling_parameters(temperature, top_k, top_p, seed, max_tokens),
        search=beam_settings(beams, length_penalty),
        chat_template=chat_template,
        bos=bos,
        target=target,
        set=set,
    )
    chosen = fixed_step(batch.config, step)
    merged = _merged_adapter(batch.program, batch.config, chosen, adapter)
    return batch.continue_with(batch.open_engine(chosen, open_cache(cache), observe, merged))


def beam_settings(beams: int | None, length_penalty: float) -> BeamSettings | None:
    """Return the settings of a beam search; None without beams."""
    from graphtrain.run.serving.beam_search import BeamSettings

    return None if beams is None else BeamSettings(beams=beams, length_penalty=length_penalty)


@dataclass(frozen=True)
class PromptBatch:
    """Prompts that are checked and encoded, for engines of a run."""

    config: Config
    name: str  # of the configuration, for messages
    program: ResolvedProgram
    tokenizer: Tokenizer
    requests: Sequence[SequenceRequest]
    samples: int  # continuations of each prompt
    search: BeamSettings | None  # None: sampling

    @classmethod
    def prepare(
        cls,
        run: Source,
        prompts: Iterable[str | Sequence[Mapping[str, Any]] | Prompt],
        *,
        samples: int,
        sampling: SamplingParameters,
        search: BeamSettings | None,
        chat_template: str,
        bos: bool | None,
        target: str | None = None,
        set: Settings = (),
    ) -> PromptBatch:
        """Check and encode prompts; the arguments are those of `generate_batch`.

        Raises:
            UserError: a prompt cannot be continued.
        """
        from graphtrain.config.resolve import resolve
        from graphtrain.config.serving_program import serving_program
        from graphtrain.errors import GraphtrainError
        from graphtrain.run.batch_generation import RequestEncoder
        from graphtrain.run.prompt import prompt_prefix, run_tokenizer
        from graphtrain.run.prompt_file import Prompt, parse_prompt
        from graphtrain.run.serving.chat_format import open_chat_format

        if isinstance(prompts, str):
            raise GraphtrainError("prompts is one string; write a list of prompts: [PROMPT]")
        if samples < 1 or (search is not None and samples > search.beams):
            most = "" if search is None else f" and at most beams = {search.beams}"
            raise GraphtrainError(f"samples = {samples}: must be at least 1{most}")
        config = checked_config(run, GENERATE, set=set, target=target).config
        program = resolve(_with_beams(config.program, search))
        tokenizer = run_tokenizer(config)
        prefix = prompt_prefix(config, tokenizer, bos)
        encoder = RequestEncoder(
            tokenizer,
            prefix,
            lambda: open_chat_format(config, chat_template, tokenizer, bos),
            serving_program(program).batch.seq_len,
        )
        requests = []
        for number, prompt in enumerate(prompts, 1):
            if not isinstance(prompt, Prompt):
                value = prompt if isinstance(prompt, str) else {"messages": list(prompt)}
                prompt = parse_prompt(value, f"prompt {number}")
            requests.append(encoder.request(prompt, sampling))
        return cls(config, name_of(run), program, tokenizer, requests, samples, search)

    def open_engine(
        self,
        step: int | None,
        cache: Cache,
        observe: Observer,
        merged: NamedAdapter | None = None,
    ) -> CompiledEngine:
        """Open the engine of a checkpoint; compile its programs if they are not in the cache."""
        from graphtrain.run.generate import open_generator

        return open_generator(
            self.program,
            self.config.run,
            cache,
            observe,
            step,
            vocab=self.tokenizer.vocab,
            name=self.name,
            purpose="batch" if self.search is None else "generate",
            merged=merged,
        )

    def continue_with(self, engine: CompiledEngine) -> Iterator[list[Continuation]]:
        """Yield the continuations of each prompt, in order."""
        from graphtrain.run.batch_generation import continue_all, search_all

        if self.search is not None:
            return search_all(engine, self.tokenizer, self.requests, self.search, self.samples)
        return continue_all(engine, self.tokenizer, self.requests, self.samples)


def sampling_parameters(
    temperature: float, top_k: int | None, top_p: float | None, seed: int, max_tokens: int
) -> SamplingParameters:
    """Return the parameters of options, of which None leaves all tokens to sample from."""
    from graphtrain.run.serving.engine_protocol import SamplingParameters

    return SamplingParameters(
        temperature=temperature,
        top_k=top_k or 0,
        top_p=1.0 if top_p is None else top_p,
        seed=seed,
        max_tokens=max_tokens,
    )


def _with_beams(program: Program, search: BeamSettings | None) -> Program:
    """Return a program that has a graph for a beam search, if there is one."""
    if search is None:
        return program
    return replace(program, serve=replace(program.serve, beams=search.beams))


def fixed_step(settings: Config, step: StepName) -> int | None:
    """Return the number of the checkpoint that a name stands for; None if there is none.

    So a run that saves another one meanwhile does not give weights that were not checked.
    """
    from graphtrain.checkpoints.steps import named_step, saved_steps

    directory = Path(settings.run.directory) / "checkpoints"
    chosen, steps = named_step(directory, step), saved_steps(directory)
    return steps[-1] if chosen is None and steps else chosen


def _merged_adapter(
    program: ResolvedProgram,
    settings: Config,
    step: int | None,
    adapter: str | os.PathLike[str] | None,
) -> NamedAdapter | None:
    """Read the adapter that is merged into the weights, if there is one.

    Raises:
        WeightsError: it cannot be merged.
    """
    if adapter is None:
        return None
    from graphtrain.run.serving.adapters import open_merged_adapter

    return open_merged_adapter(program, settings.run, step, str(adapter), Path(adapter), log)


def _report_text(
    tokens: Iterable[int],
    tokenizer: Tokenizer,
    prompt: Sequence[int],
    on_text: Callable[[str], None],
) -> Iterator[int]:
    """Yield tokens, and call on_text with the text that is complete with each of them."""
    from graphtrain.run.serving.detokenizer import IncrementalDetokenizer

    detokenizer = IncrementalDetokenizer(tokenizer.decode, prompt)
    for token in tokens:
        if token != tokenizer.eod:
            on_text(detokenizer.push(token))
        yield token
    on_text(detokenizer.finish())
