"""Logits of an imported module by the strict front end, which traces it as one graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import jax
import torch

from graphtrain.errors import ImportedModelError
from graphtrain.models.quantized_matmul import quantization_of
from graphtrain.torch_frontend.attention import requested_feature
from graphtrain.torch_frontend.joint import trace_joint
from graphtrain.torch_frontend.meta_module import MetaModule
from graphtrain.torch_frontend.strict import StrictEnvironment, StrictGraph

if TYPE_CHECKING:
    from graphtrain.config.schema import TorchModel


def check_strict(settings: TorchModel, reason: str) -> None:
    """Refuse what the strict front end cannot compute.

    Args:
        settings: The model.
        reason: Why the strict front end is used.

    Raises:
        ImportedModelError: a feature needs graphtrain's attention, or products in fp8 or int8.
    """
    if feature := requested_feature(settings.attention):
        raise ImportedModelError(
            f"{feature} requires graphtrain's attention, but the strict front end (used "
            f"because {reason}) computes PyTorch's own; turn one of them off"
        )
    if quantization_of() is not None:
        raise ImportedModelError(
            "program.precision.compute: the strict front end (used because "
            f'{reason}) computes no product in fp8 or int8; set it to "bfloat16"'
        )


def strict_logits(
    meta: MetaModule,
    settings: TorchModel,
    call: Callable[[torch.Tensor], torch.Tensor],
    arrays: Mapping[str, jax.Array],
    tokens: jax.Array,
    key: jax.Array | None,
    embed: int,
) -> jax.Array:
    """Trace the module as one graph, and return its logits.

    Args:
        meta: The module without weights.
        settings: The model.
        call: Returns the module's logits of tokens.
        arrays: Parameters by name, in the dtype of the computation.
        tokens: Token ids, (batch, seq).
        key: For dropout; None disables dropout.
        embed: Width of the residual stream; 0 if it is unknown.
    """
    joint = trace_joint(meta, settings.dtype, tokens.shape, call, training=key is not None)
    environment = StrictEnvironment(settings.dtype, settings.vocab)
    graph = StrictGraph(joint, meta.buffers, environment, embed, settings.remat)
    return graph.logits(arrays, tokens, jax.random.key(0) if key is None else key)
