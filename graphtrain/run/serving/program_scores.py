"""Scores of given tokens by compiled programs: of one text, of the slots, of packed texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from graphtrain.run.serving.device_model import DeviceModel, padded
from graphtrain.run.serving.engine_protocol import TokenChoice
from graphtrain.run.serving.program_outputs import token_choice
from graphtrain.run.serving.row_engine import PackedRow, RowTokens
from lowering.trees import Tree


def score_tokens(
    model: DeviceModel,
    tokens: Sequence[int],
    size_of: Callable[[int, int], int],
    adapter: str | None,
) -> list[TokenChoice | None]:
    """Return the log-probability of tokens given those before them; None for the first.

    Args:
        model: The model.
        tokens: The tokens.
        size_of: Returns the size of the program for so many tokens from an offset on.
        adapter: LoRA adapter that scores; None: the base.

    Raises:
        TrainingError: logits are not finite.
    """
    inputs, offset, cache = list(tokens[:-1]), 0, None
    scored: list[TokenChoice | None] = [None]
    ranks = model.ranks_of(adapter)
    with model.forbid_tracing():
        while offset < len(inputs):
            size = size_of(len(inputs) - offset, offset)
            rest = inputs[offset : offset + size]
            graph = model.graphs[f"score_{size}"]
            cache = model.empty(graph.inputs("kv_cache")) if cache is None else cache
            targets = tokens[offset + 1 : offset + 1 + len(rest)]
            outputs = graph(
                model.weights,
                cache,
                model.to_devices(graph, "tokens", padded(rest, size)[None]),
                model.to_devices(graph, "targets", padded(targets, size)),
                np.int32(offset),
                *(model.to_devices(graph, name, value) for name, value in ranks.items()),
            )
            cache, choices = outputs["kv_cache"], model.to_host(outputs["choices"])
            scored += [token_choice(model, choices, index, adapter) for index in range(len(rest))]
            offset += len(rest)
    return scored


def score_in_slots(model: DeviceModel, rows: Sequence[RowTokens], size: int) -> Tree:
    """Process tokens into the KV caches of all slots; return the scores, on the devices.

    Args:
        model: The model.
        rows: For each slot at most `size` tokens, and at most as many targets.
        size: Size of the program.
    """
    graph = model.graphs[f"score_rows_{size}"]
    inputs = {
        "tokens": np.stack([padded(row.tokens, size) for row in rows]),
        "offset": np.array([row.offset for row in rows], np.int32),
        "after": np.stack([padded([at for at, _ in row.targets], size) for row in rows]),
        "targets": np.stack([padded([to for _, to in row.targets], size) for row in rows]),
    }
    positions = model.program.batch.seq_len + model.program.settings.serve.prefill[0]
    assert inputs["offset"].max() + size <= positions
    count = max(len(row.targets) for row in rows)
    with model.forbid_tracing():
        outputs = graph(
            model.weights,
            model.state,
            *(model.to_devices(graph, name, array) for name, array in inputs.items()),
            np.int32(count),
        )
    model.state = outputs["state"]
    return outputs["scores"]


def score_packed_texts(
    model: DeviceModel, rows: Sequence[PackedRow], prefix: int, size: int
) -> Tree:
    """Return the scores of the targets of packed texts, on the devices.

    Args:
        model: The model.
        rows: For each row at most `size` tokens, and at most as many targets.
        prefix: Number of tokens of the slots that the texts continue.
        size: Size of the program.
    """
    graph = model.graphs[f"score_packed_{size}"]

    def stacked(name: str, lists: Sequence[Sequence[int]]) -> Any:
        return model.to_devices(graph, name, np.stack([padded(one, size) for one in lists]))

    targets = [row.targets for row in rows]
    with model.forbid_tracing():
        outputs = graph(
            model.weights,
            model.state["kv_cache"],
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
    return outputs["scores"]
