"""Checks of settings that do not suit each other in programs of the native decoder."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphtrain.config.schema.adapter import Adapter
from graphtrain.config.schema.model import Model
from sharding_rules.rules import matches

if TYPE_CHECKING:
    from graphtrain.config.schema.program import Program

_BIASES = "layers/mlp/selection_bias"  # of routers


def check_ahead(program: Program) -> None:
    """Refuse settings with which a model does not predict the token after the next.

    Raises:
        ValueError: names the setting, and says why and what to change.
    """
    batch, has_stages = program.batch, program.mesh.stage != 1
    refused = {
        'loss.kind = "dpo"': program.loss.kind == "dpo"
        and "its loss is of whole answers, and the module predicts single tokens",
        'precision.compute = "float16"': program.model.dtype == "float16"
        and "the loss scale does not include the module",
        # It adds the sums of earlier microbatches at each use of an array.
        'batch.gradient_reduction = "per_step"': batch.gradient_reduction == "per_step"
        and "the module uses the embedding and the LM head once more",
        'pipeline.schedule = "1f1b"': has_stages
        and program.pipeline.schedule == "1f1b"
        and "it divides the positions of the last part among the stages, and attention of the "
        'module needs all; "gpipe" and "circular" do not',
        "model.dropout with mesh.stage": has_stages
        and program.model.dropout > 0
        and "the last part of a pipeline has no dropout",
        "batch.cross_document_attention = false with mesh.stage and mesh.context": has_stages
        and program.mesh.context != 1
        and not batch.cross_document_attention
        and "the last part has the segment ids of its own positions alone",
    }
    reasons = [f"{name}: {reason}" for name, reason in refused.items() if reason]
    if reasons:
        raise ValueError(
            f"model.mtp_loss_weight cannot be used with {'; '.join(reasons)}; remove one of the "
            "two settings"
        )


def frozen_biases(model: Model, adapter: Adapter) -> str | None:
    """Return a text if an adapter freezes biases of routers that the settings want to be updated.

    Returns:
        The reason, and how to freeze and to update them; None if the settings agree.
    """
    rate = model.moe.bias_update_rate if model.moe else None
    if not rate or any(matches(_BIASES, pattern) for pattern in adapter.modules_to_save):
        return None
    return (
        f"model.moe.bias_update_rate = {rate} updates biases of routers, and [program.adapter] "
        "freezes them; set bias_update_rate = 0 to freeze them, as PEFT does, or add "
        '"mlp/selection_bias" to adapter.modules_to_save to update them'
    )
