"""Engine of compiled programs: sequences in the slots of a KV cache on the devices."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

import lowering
from graphtrain.config.resolve import ResolvedProgram
from graphtrain.config.serving_program import packed_rows
from graphtrain.errors import TrainingError, WeightsError
from graphtrain.graphs.names import (
    ADAPTER_RANKS,
    FIRST_PREFILL,
    NO_TOKEN,
    first_prefill_size,
    packed_sizes,
    row_sizes,
)
from graphtrain.models.attention.cache_layout import cache_layout
from graphtrain.models.lora.trainable import ADAPTERS
from graphtrain.run.programs import LoadedPrograms
from graphtrain.run.serving.engine_protocol import SamplingParameters, SlotErrors, TokenChoice
from graphtrain.run.serving.kept_weights import KeptWeights
from graphtrain.run.serving.prefill_sizes import CALL_TOKENS, next_size
from graphtrain.run.serving.request_arrays import request_arrays
from graphtrain.run.serving.row_engine import PackedRow, RowTokens, TargetScore
from graphtrain.run.serving.written_positions import WrittenPositions
from lowering.trees import Tree, flatten

if TYPE_CHECKING:
    from graphtrain.weights.named_adapters import NamedAdapter


class CompiledEngine:
    """Engine that loads its programs from the cache and compiles nothing.

    A program is loaded on first use: the first answer waits only for those that it needs.
    """

    def __init__(
        self,
        program: ResolvedProgram,
        graphs: LoadedPrograms,
        parameters: Tree | None,
        *,
        weights_name: str,
        vocab: int | None = None,
        adapters: Sequence[NamedAdapter] = (),
        weights: Tree | None = None,
        kept: KeptWeights | None = None,
    ) -> None:
        """Make the weights and the KV cache on the devices.

        Args:
            program: The program that generates.
            graphs: Its compiled graphs.
            parameters: Parameters, as `serve_init` takes them; None if there are `weights`.
            weights_name: What the weights are, for error messages.
            vocab: Number of tokens of the tokenizer; others are not generated. None: all.
            adapters: LoRA adapters beside the weights, for which the program has room.
            weights: Weights, as `serve_init` returns them.
            kept: Where `keep_weights` writes the weights; None: they are kept, or cannot be.
        """
        self._program, self._graphs = program, graphs
        self._serve = program.settings.serve
        self.vocab = min(vocab or program.model.vocab, program.model.vocab)
        self._has_decode_one = "decode_one" in graphs.keys
        self._backend = lowering.backend(program.target)
        self._adapters, self._kept = adapters, kept
        self._ranks: dict[str, tuple[int, int]] = {}  # begin and end of each adapter's
        if adapters:
            from graphtrain.weights.named_adapters import rank_intervals

            self._ranks = rank_intervals(adapters)
        self._weights: Tree
        self._state: Tree
        if weights is None:
            self._load(parameters, weights_name)
        else:
            self._weights, self._weights_name = weights, weights_name
            self._state = self._empty_state()  # as serve_init makes it
        self._active = np.zeros(self.slots, bool)
        self._slot_adapters: list[str | None] = [None] * self.slots
        self._written = WrittenPositions(
            self.slots, self.context_length, self.chunk, self._shortest_cache()
        )

    def _load(self, parameters: Tree, weights_name: str) -> None:
        """Make the weights, with the factors of the adapters, and an empty state."""
        graph, factors = self._graphs["serve_init"], []
        with self._backend.forbid_tracing():
            if self._takes_ranks:
                from graphtrain.run.serving.adapters import load_adapters

                described = graph.inputs(ADAPTERS)
                factors = [load_adapters(self._adapters, self._program, described)]
            outputs = graph(parameters, *factors)
        self._weights, self._state = outputs["weights"], outputs["state"]
        self._weights_name = weights_name

    @property
    def slots(self) -> int:
        return self._serve.slots

    @property
    def beams(self) -> int:
        return self._serve.beams

    @property
    def context_length(self) -> int:
        return self._program.batch.seq_len

    @property
    def chunk(self) -> int:
        return self._serve.prefill[-1]

    @property
    def adapters(self) -> tuple[str, ...]:
        return tuple(self._ranks)

    def replace_weights(self, read: Callable[[Tree], Tree], weights_name: str) -> None:
        """Replace the weights by others of the same model; sequences in the slots are lost.

        Args:
            read: Returns parameters as described; called when the weights before are freed.
            weights_name: What the weights are, for error messages.
        """
        nothing: Any = None  # also if a checkpoint cannot be read, and another one is
        self._weights = self._state = nothing
        self._load(read(self._graphs["serve_init"].inputs("parameters")), weights_name)
        self._active[:] = False

    def close(self) -> None:
        """Free the weights and the KV cache; the engine cannot be used any more."""
        nothing: Any = None
        self._weights = self._state = nothing

    def load_programs(self) -> Iterator[str]:
        """Load the programs that were not used yet; yield the name of each when it is loaded."""
        for name in self._graphs.keys:
            self._graphs[name]
            yield name

    def keep_weights(self) -> Iterator[str]:
        """Write the weights for the next start, if they can be kept; yield each array's name."""
        kept, self._kept = self._kept, None
        if kept is None:
            return
        if not kept.has_room_for(self._weights):
            warnings.warn(
                f"no room to keep weights for the next start: {kept.folder}", stacklevel=2
            )
            return
        try:
            yield from kept.write(self._program, self._weights)
        except WeightsError as error:
            warnings.warn(f"no weights are kept for the next start: {error}", stacklevel=2)

    def is_active(self, slot: int) -> bool:
        return bool(self._active[slot])

    def release(self, slot: int) -> None:
        self._active[slot] = False

    def prefill(
        self,
        slot: int,
        tokens: Sequence[int],
        offset: int,
        sampling: SamplingParameters | None = None,
        *,
        prompt: Sequence[int] = (),
        adapter: str | None = None,
    ) -> TokenChoice | None:
        assert self.can_reuse(slot, offset), f"slot {slot} has overwritten what is before {offset}"
        size = self._size(len(tokens), offset)
        if len(tokens) > size:  # no larger program fits before the end of the context
            self.prefill(slot, tokens[:size], offset, adapter=adapter)
            offset, rest = offset + size, tokens[size:]
            return self.prefill(slot, rest, offset, sampling, prompt=prompt, adapter=adapter)
        name, size = self._prefill_program(size, offset)
        graph = self._graphs[name]
        request = request_arrays(
            sampling or SamplingParameters(), prompt, self._program.model.vocab, self.vocab
        )
        request |= self._adapter_ranks(adapter)
        with self._backend.forbid_tracing():
            outputs = graph(
                self._weights,
                self._state,
                self._to_devices(graph, "tokens", _padded(tokens, size)[None]),
                *map(np.int32, (len(tokens), slot, offset, sampling is not None)),
                self._to_devices(graph, "request", request),
            )
        self._state = outputs["state"]
        self._written.prefill(slot, offset, len(tokens), size)
        if sampling is None:
            self._active[slot] = False
            return None
        self._slot_adapters[slot] = adapter
        try:
            choice = self._choice(self._to_host(outputs["choice"]), 0, adapter)
        except TrainingError:
            self._clear([slot])
            raise
        # The same conditions as in the program, which keeps the slot active or not.
        self._active[slot] = (
            choice.token not in sampling.stop_tokens
            and sampling.max_tokens > 1
            and offset + len(tokens) < self.context_length
        )
        return choice

    def decode(self) -> list[list[TokenChoice]]:
        chosen: list[list[TokenChoice]] = [[] for _ in range(self.slots)]
        errors: dict[int, TrainingError] = {}
        slots = np.flatnonzero(self._active)
        if not len(slots):
            return chosen
        with self._backend.forbid_tracing():
            if self._has_decode_one and len(slots) == 1:
                graph, slot = self._graphs["decode_one"], np.int32(slots[0])
                outputs = graph(self._weights, self._state, slot)
            else:
                graph, slots = self._graphs["decode"], np.arange(self.slots)
                enabled = self._to_devices(graph, "enabled", self._active.astype(np.int32))
                outputs = graph(self._weights, self._state, enabled)
        self._state = outputs["state"]
        active = self._to_host(outputs["active"])
        choices = self._to_host(outputs["choices"])
        for row, slot in enumerate(slots):
            by_row = {name: array[:, row] for name, array in choices.items()}
            count = int((by_row["token"] != NO_TOKEN).sum())
            self._written.decode(int(slot), count)
            try:
                adapter = self._slot_adapters[slot]
                chosen[slot] = [self._choice(by_row, index, adapter) for index in range(count)]
                self._active[slot] = bool(active[row])
            except TrainingError as error:
                errors[int(slot)] = error
        if errors:
            self._clear(errors)
            raise SlotErrors(errors, chosen)
        return chosen

    def decode_beams(
        self, parents: Sequence[int], tokens: Sequence[int], position: int
    ) -> tuple[np.ndarray, np.ndarray]:
        graph = self._graphs["decode_beams"]
        rows = graph.inputs("parents").shape[0]
        inputs = {
            "parents": _padded(parents, rows),
            "tokens": _padded(tokens, rows),
        }
        with self._backend.forbid_tracing():
            outputs = graph(
                self._weights,
                self._state,
                *(self._to_devices(graph, name, array) for name, array in inputs.items()),
                np.int32(position),
                np.int32(self.vocab),
            )
        self._state, candidates = outputs["state"], self._to_host(outputs["candidates"])
        self._written.decode_beams(inputs["parents"].tolist(), position)
        log_probs = candidates["log_prob"][: len(tokens)]
        if not np.isfinite(log_probs[:, 0]).all():
            self._clear(range(self.slots))
            raise self._not_finite()
        return candidates["token"][: len(tokens)], log_probs

    def copy_prefix(self, source: int, destination: int, length: int) -> None:
        assert self.can_reuse(source, length), f"slot {source} has overwritten what is copied"
        # All positions are copied; those beyond `length` are overwritten before they are seen.
        graph = self._graphs["copy_prefix"]
        with self._backend.forbid_tracing():
            self._state = graph(self._state, np.int32(source), np.int32(destination))["state"]
        self._active[destination] = False
        self._written.copy(source, destination)

    def _clear(self, slots: Collection[int]) -> None:
        """End sequences whose KV cache is not finite, and put a finite one in its place.

        Otherwise what follows in the slot would not be finite either: positions that it does not
        see are multiplied by 0.
        """
        self._active[list(slots)] = False
        sound = next((slot for slot in range(self.slots) if slot not in slots), None)
        if sound is not None and "copy_prefix" in self._graphs.keys:
            for slot in slots:
                self.copy_prefix(sound, slot, 0)
        elif not self._active.any():
            nothing: Any = None
            self._state = nothing  # freed before
            self._state = self._empty_state()

    def can_reuse(self, slot: int, length: int) -> bool:
        return self._written.can_reuse(slot, length)

    def score(
        self, tokens: Sequence[int], *, adapter: str | None = None
    ) -> list[TokenChoice | None]:
        inputs, offset, cache = list(tokens[:-1]), 0, None
        scored: list[TokenChoice | None] = [None]
        with self._backend.forbid_tracing():
            while offset < len(inputs):
                rest = inputs[offset : offset + self.chunk]
                size = self._size(len(rest), offset)
                rest = rest[:size]
                graph = self._graphs[f"score_{size}"]
                cache = self._empty(graph.inputs("kv_cache")) if cache is None else cache
                targets = tokens[offset + 1 : offset + 1 + len(rest)]
                outputs = graph(
                    self._weights,
                    cache,
                    self._to_devices(graph, "tokens", _padded(rest, size)[None]),
                    self._to_devices(graph, "targets", _padded(targets, size)),
                    np.int32(offset),
                    *(
                        self._to_devices(graph, name, ranks)
                        for name, ranks in self._adapter_ranks(adapter).items()
                    ),
                )
                cache, choices = outputs["kv_cache"], self._to_host(outputs["choices"])
                scored += [self._choice(choices, index, adapter) for index in range(len(rest))]
                offset += len(rest)
        return scored

    @property
    def row_sizes(self) -> tuple[int, ...]:
        return row_sizes(self._program)

    @property
    def call_tokens(self) -> int:
        return CALL_TOKENS.get(self._program.target.platform, CALL_TOKENS["others"])

    def score_rows(self, rows: Sequence[RowTokens], size: int) -> list[list[TargetScore]]:
        graph = self._graphs[f"score_rows_{size}"]
        inputs = {
            "tokens": np.stack([_padded(row.tokens, size) for row in rows]),
            "offset": np.array([row.offset for row in rows], np.int32),
            "after": np.stack([_padded([at for at, _ in row.targets], size) for row in rows]),
            "targets": np.stack([_padded([to for _, to in row.targets], size) for row in rows]),
        }
        assert inputs["offset"].max() + size <= self.context_length + self._serve.prefill[0]
        count = max(len(row.targets) for row in rows)
        with self._backend.forbid_tracing():
            outputs = graph(
                self._weights,
                self._state,
                *(self._to_devices(graph, name, array) for name, array in inputs.items()),
                np.int32(count),
            )
        self._state = outputs["state"]
        for slot, row in enumerate(rows):
            self._written.prefill(slot, row.offset, len(row.tokens), size)
        return self._target_scores(outputs["scores"], [row.targets for row in rows])

    @property
    def packed_rows(self) -> int:
        return packed_rows(self._program)

    @property
    def packed_sizes(self) -> tuple[int, ...]:
        return packed_sizes(self._program)

    def score_packed(
        self, rows: Sequence[PackedRow], prefix: int, size: int
    ) -> list[list[TargetScore]]:
        graph = self._graphs[f"score_packed_{size}"]

        def stacked(name: str, lists: Sequence[Sequence[int]]) -> Any:
            return self._to_devices(graph, name, np.stack([_padded(one, size) for one in lists]))

        targets = [row.targets for row in rows]
        with self._backend.forbid_tracing():
            outputs = graph(
                self._weights,
                self._state["kv_cache"],
                stacked("tokens", [row.tokens for row in rows]),
                stacked("position", [row.positions for row in rows]),
                # The texts begin with 1: 0 is the padding, which sees nothing of them.
                stacked("text", [[text + 1 for text in row.texts] for row in rows]),
                stacked("branch", [row.branches for row in rows]),
                np.int32(prefix),
                stacked("after", [[at for at, _ in one] for one in targets]),
                stacked("targets", [[to for _, to in one] for one in targets]),
                np.int32(max(map(len, targets))),
            )
        return self._target_scores(outputs["scores"], targets)

    def _target_scores(
        self, outputs: Tree, targets: Sequence[Sequence[tuple[int, int]]]
    ) -> list[list[TargetScore]]:
        """Return the scores of each row's targets.

        Raises:
            TrainingError: they are not finite.
        """
        scores = self._to_host(outputs)
        for row, wanted in enumerate(targets):
            if not np.isfinite(scores["log_prob"][row, : len(wanted)]).all():
                self._clear(range(self.slots))
                raise self._not_finite()
        log_probs, likeliest = scores["log_prob"].tolist(), scores["likeliest"].tolist()
        return [
            [
                TargetScore(log_probs[row][at], likeliest[row][at] == token)
                for at, (_, token) in enumerate(wanted)
            ]
            for row, wanted in enumerate(targets)
        ]

    @property
    def _takes_ranks(self) -> bool:
        """Return whether the programs have adapters, loaded or not."""
        return self._serve.total_adapter_rank > 0

    def _adapter_ranks(self, adapter: str | None) -> dict[str, np.ndarray]:
        """Return the input that chooses an adapter, or the base; none if there are no adapters."""
        interval = (0, 0) if adapter is None else self._ranks[adapter]
        return {ADAPTER_RANKS: np.array(interval, np.int32)} if self._takes_ranks else {}

    def _size(self, count: int, offset: int) -> int:
        """Return the size of the program that processes `count` tokens, or the first of them."""
        return next_size(count, self._room(offset), self._serve.prefill, self.call_tokens)

    def _prefill_program(self, size: int, offset: int) -> tuple[str, int]:
        """Return the name and size of the program for up to `size` tokens of a prompt.

        As long as the fastest one is not loaded, it is the one that gives a first token soonest.
        """
        name, first = f"prefill_{size}", first_prefill_size(self._program)
        first_name = f"{FIRST_PREFILL}_{first}"
        if (
            first is None
            or first_name not in self._graphs.keys
            or self._graphs.is_loaded(name)
            or not size <= first <= self._room(offset)
        ):
            return name, size
        return first_name, first

    def _room(self, offset: int) -> int:
        """Return the number of positions that the KV cache has from an offset on, with padding."""
        return self.context_length + self._serve.prefill[0] - offset

    def _choice(
        self, choices: dict[str, np.ndarray], index: int, adapter: str | None
    ) -> TokenChoice:
        token, log_prob = int(choices["token"][index]), float(choices["log_prob"][index])
        if np.isnan(log_prob) or not np.isfinite(choices["top_log_probs"][index][0]):
            raise self._not_finite(adapter)
        top = zip(
            choices["top"][index].tolist(), choices["top_log_probs"][index].tolist(), strict=True
        )
        return TokenChoice(token, log_prob, tuple(top))

    def _not_finite(self, adapter: str | None = None) -> TrainingError:
        dtype = self._program.model.dtype
        wider = "" if dtype == "float32" else ', or set program.serve.dtype = "float32"'
        if adapter is not None:
            return TrainingError(
                f"the adapter {adapter!r} on the weights of {self._weights_name} gives logits that "
                f"are not finite, so no token can be chosen; it overflows {dtype}, unless the "
                f"weights alone do too. Leave it out, or train it again with a lower rate{wider}"
            )
        return TrainingError(
            f"the weights of {self._weights_name} give logits that are not finite, so no token "
            f"can be chosen; they contain values that are not finite, or overflow {dtype}. "
            f"Use another checkpoint (--step), or convert the weights again{wider}"
        )

    def _shortest_cache(self) -> int:
        """Return the number of positions of the layer that caches the fewest."""
        axis = cache_layout(self._program.target).key.index("k")
        caches = flatten(self._state["kv_cache"])
        return min(array.shape[axis] for path, array in caches.items() if path.endswith("/key"))

    def _to_devices(self, graph: Any, name: str, value: Any) -> Tree:
        return self._backend.to_devices(value, graph.inputs(name))

    def _to_host(self, tree: Any) -> Any:
        import jax

        return jax.tree.map(np.asarray, self._backend.checkpoint_arrays(tree))

    def _empty_state(self) -> Tree:
        return self._empty(self._graphs.inputs(first_prefill_name(self._program), "state"))

    def _empty(self, described: Tree) -> Tree:
        import jax

        zeros = jax.tree.map(lambda array: np.zeros(array.shape, array.dtype), described)
        return self._backend.to_devices(zeros, described)


def first_prefill_name(program: ResolvedProgram) -> str:
    """Return the name of the smallest program that processes a part of a prompt."""
    return f"prefill_{program.settings.serve.prefill[0]}"


def _padded(tokens: Sequence[int], size: int) -> np.ndarray:
    padded = np.zeros(size, np.int32)
    padded[: len(tokens)] = tokens
    return padded
