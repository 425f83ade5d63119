"""Text generation: one sequence that continues beyond the context of the model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import TYPE_CHECKING

from graphtrain.cache import Cache
from graphtrain.compile.driver import compile_tasks
from graphtrain.compile.tasks import Observer, tasks_of
from graphtrain.config.resolve import ResolvedProgram
from graphtrain.config.schema import Run
from graphtrain.errors import GraphtrainError
from graphtrain.graphs.names import ServingPurpose
from graphtrain.run.serving.engine import CompiledEngine
from graphtrain.run.serving.engine_protocol import Engine, SamplingParameters
from graphtrain.run.serving.open_engine import open_engine
from graphtrain.run.serving.weights import check_step

if TYPE_CHECKING:
    from graphtrain.weights.named_adapters import NamedAdapter


@dataclass(frozen=True)
class Generation:
    """Text that continues a prompt."""

    text: str  # of the prompt and what was generated
    prompt: tuple[int, ...]  # token ids
    tokens: tuple[int, ...]  # ids of the generated tokens
    is_complete: bool = False  # ended with the end-of-document token
    context_length: int | None = None  # tokens from which the next one can follow

    def __str__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        return f"<pre>{escape(self.text)}</pre>"


def open_generator(
    program: ResolvedProgram,
    run: Run,
    cache: Cache,
    observe: Observer,
    step: int | None,
    vocab: int | None = None,
    name: str = "configuration",
    purpose: ServingPurpose = "generate",
    merged: NamedAdapter | None = None,
) -> CompiledEngine:
    """Compile the programs of generation if they are not in the cache; load them and the weights.

    Args:
        program: The program that was trained.
        run: The run whose weights are used.
        cache: Cache of compiled programs.
        observe: Called with the progress of the compilation.
        step: Step of the checkpoint; None for the last, or for run.init_from if there is none.
        vocab: Number of tokens of the tokenizer; rows that pad the vocabulary are not chosen.
        name: Name of the configuration, which `graphtrain cache ls` shows.
        purpose: Generate one sequence, or many at the same time.
        merged: LoRA adapter to merge into the weights.

    Raises:
        GraphtrainError: a graph cannot be compiled, or there are no weights.
    """
    check_step(run, step)
    tasks = tasks_of({name: program}, purpose)
    for outcome in compile_tasks(tasks, cache, observe=observe).outcomes:
        if outcome.status not in ("compiled", "cached"):
            raise GraphtrainError(f"{outcome.label} {outcome.status}: {outcome.error}")
    return open_engine(
        program,
        run,
        cache,
        step=step,
        compile_hint=f"graphtrain compile --for {purpose}",
        vocab=vocab,
        purpose=purpose,
        merged=merged,
    )


def generate_tokens(
    engine: Engine, prompt: Sequence[int], sampling: SamplingParameters
) -> Iterator[int]:
    """Yield the tokens that continue a prompt, one by one.

    Of a text longer than the context, tokens follow from the end: of a longer prompt from as many
    as fit, and each time the context is full from its later half.

    Args:
        engine: Engine that generates.
        prompt: Token ids, at least one.
        sampling: How tokens are chosen, and how many.

    Raises:
        GraphtrainError: the prompt is empty, or the context is a single token.
    """
    longest = engine.context_length
    if not prompt or longest < 2:
        reason = "the prompt is empty" if not prompt else "the context is a single token"
        raise GraphtrainError(f"{reason}, so there is nothing to continue")
    context, remaining = list(prompt[-longest + 1 :]), sampling.max_tokens
    while remaining:
        rest = replace(sampling, max_tokens=remaining)
        for token in _tokens_in_context(engine, context, rest):
            yield token
            context.append(token)
            remaining -= 1
            if token in sampling.stop_tokens:
                return
        context = context[-(longest // 2) :]
        # Or else the numbers drawn for the same positions would be drawn again.
        sampling = replace(sampling, seed=sampling.seed + 1)


def _tokens_in_context(
    engine: Engine, context: Sequence[int], sampling: SamplingParameters
) -> Iterator[int]:
    choice = None
    for offset in range(0, len(context), engine.chunk):
        chunk = context[offset : offset + engine.chunk]
        is_last = offset + engine.chunk >= len(context)
        choice = engine.prefill(0, chunk, offset, sampling if is_last else None, prompt=context)
    assert choice is not None
    yield choice.token
    while engine.is_active(0):
        yield from (choice.token for choice in engine.decode()[0])
