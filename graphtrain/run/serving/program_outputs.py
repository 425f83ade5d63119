"""Outputs of compiled programs, read on the host: chosen tokens, and scores of given ones."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from graphtrain.run.serving.device_model import DeviceModel
from graphtrain.run.serving.engine_protocol import TokenChoice
from graphtrain.run.serving.row_engine import TargetScore
from lowering.trees import Tree


def token_choice(
    model: DeviceModel, choices: dict[str, np.ndarray], index: int, adapter: str | None
) -> TokenChoice:
    """Return a token that was chosen or given.

    Args:
        model: The model, for the error.
        choices: Output of a program, on the host.
        index: Position in it.
        adapter: LoRA adapter that was used.

    Raises:
        TrainingError: its logits are not finite.
    """
    token, log_prob = int(choices["token"][index]), float(choices["log_prob"][index])
    if np.isnan(log_prob) or not np.isfinite(choices["top_log_probs"][index][0]):
        raise model.not_finite(adapter)
    top = zip(choices["top"][index].tolist(), choices["top_log_probs"][index].tolist(), strict=True)
    return TokenChoice(token, log_prob, tuple(top))


def target_scores(
    model: DeviceModel, outputs: Tree, targets: Sequence[Sequence[tuple[int, int]]]
) -> list[list[TargetScore]]:
    """Return the scores of each row's targets.

    Args:
        model: The model.
        outputs: Scores, on the devices.
        targets: For each row, the index of a position and the token that may follow it.

    Raises:
        TrainingError: they are not finite.
    """
    scores = model.to_host(outputs)
    for row, wanted in enumerate(targets):
        if not np.isfinite(scores["log_prob"][row, : len(wanted)]).all():
            raise model.not_finite()
    log_probs, likeliest = scores["log_prob"].tolist(), scores["likeliest"].tolist()
    return [
        [
            TargetScore(log_probs[row][at], likeliest[row][at] == token)
            for at, (_, token) in enumerate(wanted)
        ]
        for row, wanted in enumerate(targets)
    ]
