"""Programs that process a prompt into the KV cache: which of them a call uses, and the call."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from graphtrain.graphs.names import FIRST_PREFILL, first_prefill_size
from graphtrain.run.serving.device_model import DeviceModel, padded
from graphtrain.run.serving.prefill_sizes import CALL_TOKENS, next_size
from graphtrain.run.serving.written_positions import WrittenPositions
from lowering.trees import Tree


class PrefillPrograms:
    """Compiled programs for parts of a prompt, of several sizes.

    Args:
        model: The model, whose state they change.
        written: Positions of the KV cache that they write.
    """

    def __init__(self, model: DeviceModel, written: WrittenPositions) -> None:
        self._model, self._written = model, written

    @property
    def call_tokens(self) -> int:
        """Number of tokens whose computation takes as long as a call does beside them."""
        return CALL_TOKENS.get(self._model.program.target.platform, CALL_TOKENS["others"])

    def size(self, count: int, offset: int) -> int:
        """Return the size of the program that processes `count` tokens, or the first of them."""
        sizes = self._model.program.settings.serve.prefill
        return next_size(count, self._room(offset), sizes, self.call_tokens)

    def run(
        self,
        slot: int,
        tokens: Sequence[int],
        offset: int,
        request: dict[str, np.ndarray],
        *,
        is_last: bool,
    ) -> Tree:
        """Process tokens into the KV cache of a slot; return the token that is chosen after them.

        Args:
            slot: The slot.
            tokens: At most as many as one program processes.
            offset: Position of the first of them.
            request: How the token is chosen.
            is_last: Whether they are the last of a prompt.
        """
        model = self._model
        name, size = self._program(self.size(len(tokens), offset), offset)
        graph = model.graphs[name]
        with model.forbid_tracing():
            outputs = graph(
                model.weights,
                model.state,
                model.to_devices(graph, "tokens", padded(tokens, size)[None]),
                *map(np.int32, (len(tokens), slot, offset, is_last)),
                model.to_devices(graph, "request", request),
            )
        model.state = outputs["state"]
        self._written.prefill(slot, offset, len(tokens), size)
        return outputs["choice"]

    def _program(self, size: int, offset: int) -> tuple[str, int]:
        """Return the name and size of the program for up to `size` tokens of a prompt.

        As long as the fastest one is not loaded, it is the one that gives a first token soonest.
        """
        graphs = self._model.graphs
        name, first = f"prefill_{size}", first_prefill_size(self._model.program)
        first_name = f"{FIRST_PREFILL}_{first}"
        if (
            first is None
            or first_name not in graphs.keys
            or graphs.is_loaded(name)
            or not size <= first <= self._room(offset)
        ):
            return name, size
        return first_name, first

    def _room(self, offset: int) -> int:
        """Return the number of positions that the KV cache has from an offset on, with padding."""
        program = self._model.program
        return program.batch.seq_len + program.settings.serve.prefill[0] - offset
