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
        ValueError: names the settings.
    """
    refused = {
        "mesh.stage": program.mesh.stage != 1,
        "mesh.context": program.mesh.context != 1,
        "adapter": program.adapter is not None,
        'loss.kind = "dpo"': program.loss.kind == "dpo",
        'precision.compute = "float16"': program.model.dtype == "float16",
        # It adds the sums of earlier microbatches at each use of an array, and the module uses the
        # embedding and the LM head once more.
        'batch.gradient_reduction = "per_step"': program.batch.gradient_reduction == "per_step",
    }
    if names := [name for name, is_set in refused.items() if is_set]:
        raise ValueError(
            f"model.mtp_loss_weight cannot be used with {' and '.join(names)}; remove it"
        )


def check_frozen_biases(model: Model, adapter: Adapter) -> None:
    """Refuse an adapter that freezes biases of routers which the settings want to be updated.

    Raises:
        ValueError: says how to freeze them, and how to update them.
    """
    rate = model.moe.bias_update_rate if model.moe else None
    if rate and not any(matches(_BIASES, pattern) for pattern in adapter.modules_to_save):
        raise ValueError(
            f"model.moe.bias_update_rate = {rate} updates biases of routers, and [program.adapter] "
            "freezes them; set bias_update_rate = 0 to freeze them, as PEFT does, or add "
            '"mlp/selection_bias" to adapter.modules_to_save to update them'
        )
