"""Engine of compiled programs: sequences in the slots of a KV cache on the devices."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from graphtrain.config.resolve import ResolvedProgram
from graphtrain.config.serving_program import packed_rows
from graphtrain.errors import TrainingError
from graphtrain.graphs.names import (
    NO_TOKEN,
    packed_sizes,
    row_sizes,
)
from graphtrain.run.programs import LoadedPrograms
from graphtrain.run.serving.device_model import DeviceModel, padded
from graphtrain.run.serving.engine_protocol import SamplingParameters, SlotErrors, TokenChoice
from graphtrain.run.serving.kept_weights import KeptWeights
from graphtrain.run.serving.prefill_programs import PrefillPrograms
from graphtrain.run.serving.program_outputs import target_scores, token_choice
from graphtrain.run.serving.program_scores import (
    score_in_slots,
    score_packed_texts,
    score_tokens,
)
from graphtrain.run.serving.request_arrays import request_arrays
from graphtrain.run.serving.row_engine import PackedRow, RowTokens, TargetScore
from graphtrain.run.serving.written_positions import WrittenPositions
from lowering.trees import Tree

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
        self._model = DeviceModel(program, graphs, adapters)
        self._program, self._graphs, self._kept = program, graphs, kept
        self._serve = program.settings.serve
        self.vocab = min(vocab or program.model.vocab, program.model.vocab)
        if weights is None:
            self._model.load(parameters, weights_name)
        else:
            self._model.hold(weights, weights_name)
        self._active = np.zeros(self.slots, bool)
        self._slot_adapters: list[str | None] = [None] * self.slots
        self._written = WrittenPositions(
            self.slots, self.context_length, self.chunk, self._model.shortest_cache()
        )
        self._prefills = PrefillPrograms(self._model, self._written)

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
        return tuple(self._model.adapter_ranks)

    def replace_weights(self, read: Callable[[Tree], Tree], weights_name: str) -> None:
        """Replace the weights by others of the same model; sequences in the slots are lost.

        Args:
            read: Returns parameters as described; called when the weights before are freed.
            weights_name: What the weights are, for error messages.
        """
        self._model.free()  # also if a checkpoint cannot be read, and another one is
        parameters = read(self._graphs["serve_init"].inputs("parameters"))
        self._model.load(parameters, weights_name)
        self._active[:] = False

    def close(self) -> None:
        """Free the weights and the KV cache; the engine cannot be used any more."""
        self._model.free()

    def load_programs(self) -> Iterator[str]:
        """Load the programs that were not used yet; yield the name of each when it is loaded."""
        for name in self._graphs.keys:
            self._graphs[name]
            yield name

    def keep_weights(self) -> Iterator[str]:
        """Write the weights for the next start, if they can be kept; yield each array's name."""
        kept, self._kept = self._kept, None
        if kept is not None:
            yield from kept.keep(self._program, self._model.weights)

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
        size = self._prefills.size(len(tokens), offset)
        if len(tokens) > size:  # no larger program fits before the end of the context
            self.prefill(slot, tokens[:size], offset, adapter=adapter)
            offset, rest = offset + size, tokens[size:]
            return self.prefill(slot, rest, offset, sampling, prompt=prompt, adapter=adapter)
        request = request_arrays(
            sampling or SamplingParameters(), prompt, self._program.model.vocab, self.vocab
        )
        request |= self._model.ranks_of(adapter)
        is_last = sampling is not None
        outputs = self._prefills.run(slot, tokens, offset, request, is_last=is_last)
        if sampling is None:
            self._active[slot] = False
            return None
        self._slot_adapters[slot] = adapter
        try:
            choice = token_choice(self._model, self._model.to_host(outputs), 0, adapter)
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
        slots = np.flatnonzero(self._active)
        if not len(slots):
            return [[] for _ in range(self.slots)]
        model = self._model
        with model.forbid_tracing():
            if "decode_one" in self._graphs.keys and len(slots) == 1:
                graph, slot = self._graphs["decode_one"], np.int32(slots[0])
                outputs = graph(model.weights, model.state, slot)
            else:
                graph, slots = self._graphs["decode"], np.arange(self.slots)
                enabled = model.to_devices(graph, "enabled", self._active.astype(np.int32))
                outputs = graph(model.weights, model.state, enabled)
        model.state = outputs["state"]
        active, choices = model.to_host(outputs["active"]), model.to_host(outputs["choices"])
        return self._chosen(slots, active, choices)

    def _chosen(
        self, slots: np.ndarray, active: np.ndarray, choices: dict[str, np.ndarray]
    ) -> list[list[TokenChoice]]:
        """Return the new tokens by slot.

        Args:
            slots: Slots of the rows of the outputs.
            active: Whether each of them is still active.
            choices: Tokens that were chosen.

        Raises:
            SlotErrors: the logits of some slots are not finite.
        """
        chosen: list[list[TokenChoice]] = [[] for _ in range(self.slots)]
        errors: dict[int, TrainingError] = {}
        for row, slot in enumerate(slots):
            by_row = {name: array[:, row] for name, array in choices.items()}
            count = int((by_row["token"] != NO_TOKEN).sum())
            self._written.decode(int(slot), count)
            try:
                adapter = self._slot_adapters[slot]
                chosen[slot] = [
                    token_choice(self._model, by_row, index, adapter) for index in range(count)
                ]
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
        model, graph = self._model, self._graphs["decode_beams"]
        rows = graph.inputs("parents").shape[0]
        inputs = {"parents": padded(parents, rows), "tokens": padded(tokens, rows)}
        with model.forbid_tracing():
            outputs = graph(
                model.weights,
                model.state,
                *(model.to_devices(graph, name, array) for name, array in inputs.items()),
                np.int32(position),
                np.int32(self.vocab),
            )
        model.state, candidates = outputs["state"], model.to_host(outputs["candidates"])
        self._written.decode_beams(inputs["parents"].tolist(), position)
        log_probs = candidates["log_prob"][: len(tokens)]
        if not np.isfinite(log_probs[:, 0]).all():
            self._clear(range(self.slots))
            raise model.not_finite()
        return candidates["token"][: len(tokens)], log_probs

    def copy_prefix(self, source: int, destination: int, length: int) -> None:
        assert self.can_reuse(source, length), f"slot {source} has overwritten what is copied"
        # All positions are copied; those beyond `length` are overwritten before they are seen.
        graph, model = self._graphs["copy_prefix"], self._model
        with model.forbid_tracing():
            model.state = graph(model.state, np.int32(source), np.int32(destination))["state"]
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
            self._model.reset_state()

    def can_reuse(self, slot: int, length: int) -> bool:
        return self._written.can_reuse(slot, length)

    def score(
        self, tokens: Sequence[int], *, adapter: str | None = None
    ) -> list[TokenChoice | None]:
        def size_of(count: int, offset: int) -> int:
            return self._prefills.size(min(count, self.chunk), offset)

        return score_tokens(self._model, tokens, size_of, adapter)

    @property
    def row_sizes(self) -> tuple[int, ...]:
        return row_sizes(self._program)

    @property
    def call_tokens(self) -> int:
        return self._prefills.call_tokens

    def score_rows(self, rows: Sequence[RowTokens], size: int) -> list[list[TargetScore]]:
        scores = score_in_slots(self._model, rows, size)
        for slot, row in enumerate(rows):
            self._written.prefill(slot, row.offset, len(row.tokens), size)
        return self._target_scores(scores, [row.targets for row in rows])

    @property
    def packed_rows(self) -> int:
        return packed_rows(self._program)

    @property
    def packed_sizes(self) -> tuple[int, ...]:
        return packed_sizes(self._program)

    def score_packed(
        self, rows: Sequence[PackedRow], prefix: int, size: int
    ) -> list[list[TargetScore]]:
        scores = score_packed_texts(self._model, rows, prefix, size)
        return self._target_scores(scores, [row.targets for row in rows])

    def _target_scores(
        self, scores: Tree, targets: Sequence[Sequence[tuple[int, int]]]
    ) -> list[list[TargetScore]]:
        try:
            return target_scores(self._model, scores, targets)
        except TrainingError:
            self._clear(range(self.slots))
            raise
