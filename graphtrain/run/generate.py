"""Text generation with a KV cache, by two compiled graphs: prefill and decode."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

import lowering
from graphtrain.cache import Cache
from graphtrain.checkpoints.checkpoint import layer_order_of, restore_parameters, saved_steps
from graphtrain.checkpoints.pruned import read_checkpoint
from graphtrain.compile.driver import compile_tasks
from graphtrain.compile.request_keys import request_keys
from graphtrain.compile.tasks import Observer, Task
from graphtrain.config.resolve import ResolvedProgram, resolve
from graphtrain.config.schema import Batch, Loss, Optimizer, PipelineSettings, Run
from graphtrain.data.tokenizers.protocol import Tokenizer
from graphtrain.errors import GraphtrainError, TrainingError
from graphtrain.run.programs import LoadedPrograms
from lowering.trees import Tree, flatten, unflatten

_NAMES = ("prefill", "decode")
# Rules that split the sequence axis, which has length 1 in decode.
_SEQUENCE_RULES = ("sequence", "context", "ulysses")


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Settings that choose the next token from the logits."""

    temperature: float = 0.8  # divisor of the logits; 0: always the most likely token
    top_k: int | None = None  # number of most likely tokens to sample from; None: all
    top_p: float | None = None  # total probability of the tokens to sample from; None: all
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the ranges; the comparisons are written so that NaN fails them."""
        if not (self.temperature >= 0 and (self.top_p is None or 0 < self.top_p <= 1)):
            raise GraphtrainError(
                f"temperature = {self.temperature} and top-p = {self.top_p}: the temperature must "
                "be at least 0, and top-p above 0 and at most 1"
            )


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


def sample_token(scores: np.ndarray, sampling: Sampling, random: np.random.Generator) -> int:
    """Return the id of the next token.

    Args:
        scores: Logits, of shape (vocab,).
        sampling: Temperature, top-k and top-p.
        random: Random numbers, unused at temperature 0.

    Source: Holtzman et al. 2020, "The Curious Case of Neural Text Degeneration", section 3.1,
    https://arxiv.org/abs/1904.09751, for top_p
    """
    if sampling.temperature == 0:
        return int(scores.argmax())
    best = np.argsort(-scores, kind="stable")[: sampling.top_k]
    steep = scores[best].astype(np.float64) / sampling.temperature
    shares = np.exp(steep - steep.max())
    shares /= shares.sum()
    if sampling.top_p is not None:
        count = int(np.searchsorted(np.cumsum(shares), sampling.top_p)) + 1
        best, shares = best[:count], shares[:count] / shares[:count].sum()
    return int(random.choice(best, p=shares))


def check_finite(scores: np.ndarray, weights: str | None) -> None:
    """Check the logits that a token is chosen by; those of tokens that cannot occur may be -inf.

    Args:
        scores: Logits, of shape (vocab,).
        weights: Path of the weights, for the message.

    Raises:
        TrainingError: a logit is NaN or infinite, or all are -inf.
    """
    if not np.isfinite(scores.max()):
        raise TrainingError(
            f"the weights in {weights} give logits that are not finite, so no token can be chosen; "
            "they contain values that are not finite, or overflow program.model.dtype. Use another "
            "checkpoint (--step), convert the weights again, or set program.model.dtype to float32"
        )


def encode_prompt(tokenizer: Tokenizer, prompt: str, prefix: tuple[int, ...]) -> list[int]:
    """Return the token ids of a prompt, which begins with the prefix (BOS) once."""
    tokens = tokenizer.encode(prompt)
    return tokens if tuple(tokens[: len(prefix)]) == prefix else [*prefix, *tokens]


def generation_program(program: ResolvedProgram) -> ResolvedProgram:
    """Return the program that generates with the weights of `program`, on the same mesh.

    LoRA adapters are merged into the weights. Every data-parallel replica computes the same
    sequence, whose length is at most program.batch.seq_len.

    Raises:
        GraphtrainError: the mesh has pipeline stages or context parallelism.
    """
    for axis in ("stage", "context"):
        if (size := program.mesh.axes.get(axis, 1)) > 1:
            raise GraphtrainError(
                f"`graphtrain generate` does not support pipeline or context parallelism "
                f"(program.mesh.{axis} = {size}); use --set program.mesh.{axis}=1 and "
                "a --target with correspondingly fewer devices, for example --target cpu:1"
            )
    resolved = resolve(
        replace(
            program.settings,
            rules=tuple(name for name in program.settings.rules if name not in _SEQUENCE_RULES),
            optimizer=Optimizer(),
            loss=Loss(),
            pipeline=PipelineSettings(),
            adapter=None,
        )
    )
    copies = resolved.mesh.size(resolved.rules.activations.get("batch", ()))
    batch = Batch(global_batch_size=copies, seq_len=program.batch.seq_len)
    return resolved.with_settings(replace(resolved.settings, batch=batch))


class Generator:
    """Model on its devices that generates tokens."""

    def __init__(
        self,
        program: ResolvedProgram,
        run: Run,
        cache: Cache,
        observe: Observer,
        step: int | None,
    ) -> None:
        """Compile the two graphs if they are not in the cache, and load them and the weights.

        Args:
            program: the program that was trained.
            run: the run whose weights are used.
            cache: Cache of compiled programs.
            observe: Called with the progress of the compilation.
            step: Step of the checkpoint; None for the last, or for run.init_from if there is none.

        Raises:
            GraphtrainError: a graph cannot be compiled, or there are no weights.
        """
        self._program = generation_program(program)
        _check_step(run, step)
        keys = request_keys(self._program, _NAMES)
        tasks = [Task(name, self._program, name, keys[name]) for name in _NAMES]
        for outcome in compile_tasks(tasks, cache, observe=observe).outcomes:
            if outcome.status not in ("compiled", "cached"):
                raise GraphtrainError(f"{outcome.label} {outcome.status}: {outcome.error}")
        self._backend = lowering.backend(self._program.target)
        self._graphs = LoadedPrograms(self._program, cache, _NAMES, "graphtrain generate")
        with self._backend.forbid_tracing():
            described = self._graphs["prefill"].inputs("parameters")
            read, self._parameters = read_checkpoint(
                Path(run.directory) / "checkpoints",
                step,
                lambda step: _weights(program, run, self._program, described, step),
            )
        checkpoint = None if read is None else f"{run.directory}/checkpoints/{read}"
        self._weights_path = checkpoint or run.init_from

    def tokens(
        self,
        prompt: Sequence[int],
        max_new_tokens: int,
        sampling: Sampling,
        vocab: int | None = None,
    ) -> Iterator[int]:
        """Yield the tokens that continue a prompt, one by one.

        The context is program.batch.seq_len tokens long. Of a longer text, tokens follow from the
        end: of a longer prompt from as many as fit, and each time the context is full from its
        later half.

        Args:
            prompt: Token ids, at least one.
            max_new_tokens: Maximum number of tokens.
            sampling: How each token is chosen.
            vocab: Number of tokens of the tokenizer; rows that pad the vocabulary are not chosen.

        Raises:
            GraphtrainError: the prompt is empty, or the context is a single token.
            TrainingError: the logits are not finite.
        """
        longest = self.context_length
        if not prompt or longest < 2:
            reason = "the prompt is empty" if not prompt else "program.batch.seq_len is 1"
            raise GraphtrainError(f"{reason}, so there is nothing to continue")
        random = np.random.default_rng(sampling.seed)
        context = list(prompt[-longest + 1 :])
        with self._backend.forbid_tracing():
            kv_cache, scores = self._prefill(context)
            for index in range(max_new_tokens):
                if index and len(context) <= longest:
                    position = len(context) - 1
                    kv_cache, scores = self._decode_step("decode", kv_cache, context[-1:], position)
                elif index:
                    context = context[-(longest // 2) :]
                    kv_cache, scores = self._prefill(context)
                check_finite(scores[:vocab], self._weights_path)
                context.append(sample_token(scores[:vocab], sampling, random))
                yield context[-1]

    @property
    def context_length(self) -> int:
        """Number of tokens from which the next one can follow."""
        return self._program.batch.seq_len

    def _prefill(self, prompt: Sequence[int]) -> tuple[Tree, np.ndarray]:
        described = self._graphs["prefill"].inputs("kept")
        empty = {
            path: np.zeros(array.shape, array.dtype) for path, array in flatten(described).items()
        }
        kv_cache = self._backend.to_devices(unflatten(empty), described)
        count = self._graphs["prefill"].inputs("tokens").shape[1]
        scores = np.zeros(0)
        for begin in range(0, len(prompt), count):
            chunk = list(prompt[begin : begin + count])
            last = len(chunk) - 1
            kv_cache, scores = self._decode_step(
                "prefill", kv_cache, chunk + [0] * (count - len(chunk)), begin, last
            )
        return kv_cache, scores

    def _decode_step(
        self, name: str, kv_cache: Tree, tokens: list[int], begin: int, last: int = 0
    ) -> tuple[Tree, np.ndarray]:
        """Run a graph; return the new KV cache, and the logits after the token at index `last`."""
        graph = self._graphs[name]
        copies = np.tile(np.array(tokens, np.int32), (self._program.batch.global_batch_size, 1))
        device_tokens = self._backend.to_devices(copies, graph.inputs("tokens"))
        outputs = graph(self._parameters, kv_cache, device_tokens, np.int32(begin))
        return outputs["kept"], np.asarray(outputs["scores"])[0, last]


def _check_step(run: Run, step: int | None) -> None:
    """Check that there is a checkpoint to read, or run.init_from instead of the last one.

    Raises:
        TrainingError: there is neither, or the run would start from an adapter.
    """
    directory = Path(run.directory) / "checkpoints"
    steps = saved_steps(directory)
    if step in steps or (steps and step is None):
        return
    if step is not None or run.init_from is None:
        available_steps = ", ".join(map(str, steps)) or "none"
        raise TrainingError(
            f"no such checkpoint in {directory}; available steps: {available_steps}"
        )
    if run.init_adapter_from is not None:
        raise TrainingError(
            f"no checkpoint in {directory}, and generate does not read run.init_adapter_from; "
            "remove "
            "it to generate with run.init_from alone, or train first (graphtrain run)"
        )


def _weights(
    trained: ResolvedProgram,
    run: Run,
    program: ResolvedProgram,
    described: Tree,
    step: int | None,
) -> Any:
    """Return the weights of a checkpoint; if `step` is None, those of run.init_from."""
    fill = lowering.backend(program.target).from_shards
    directory, adapter = Path(run.directory), trained.adapter
    if step is not None and adapter is None:
        arrangement = layer_order_of(program)
        return restore_parameters(
            directory / "checkpoints", step, described, arrangement, trained.settings
        )
    from graphtrain.weights.initial import load_initial_parameters, open_initial_weights
    from graphtrain.weights.open import open_weights
    from graphtrain.weights.torch_modules import HuggingFaceWeights

    if step is None:
        weights = open_initial_weights(trained.model, run)
    else:
        weights = open_weights(directory, step)
    if step is None and adapter is not None:
        from graphtrain.weights.merged import QuantizedBase

        assert weights is not None and not isinstance(weights, HuggingFaceWeights)
        weights = QuantizedBase(weights, adapter)
    assert weights is not None
    return load_initial_parameters(weights, program, described, fill)
