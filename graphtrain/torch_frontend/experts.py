"""Experts implementation for mixtures of transformers, with the native mixture's dispatch.

The eager implementation of transformers loops over tensor values, which cannot be traced.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import torch
from jax import Array
from torchax.tensor import Tensor
from transformers.integrations import moe

from graphtrain.errors import ImportedModelError
from graphtrain.models.dropless import ExpertWeight, dropless_experts
from graphtrain.torch_frontend import private_torch
from lowering.tracing.constrain import placement

IMPLEMENTATION = "graphtrain"


def register() -> str:
    """Register the implementation with transformers; return its name."""
    moe.ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, _experts)
    return IMPLEMENTATION


def _experts(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Compute the experts' output, (tokens, embed), with the signature of transformers.

    Args:
        self: the experts module.
        hidden_states: (tokens, embed).
        top_k_index: experts of each token, (tokens, k).
        top_k_weights: their router weights, (tokens, k).
    """
    if not (has_grouped_matmul() and _is_standard(self) and isinstance(hidden_states, Tensor)):
        return _dense_experts(self, hidden_states, top_k_index, top_k_weights)
    environment = private_torch.environment_of(hidden_states)
    input_proj = self.gate_up_proj if self.has_gate else self.up_proj
    input_weights, output_weights = input_proj.jax(), self.down_proj.jax()
    if not self.is_transposed:
        input_weights, output_weights = input_weights.swapaxes(1, 2), output_weights.swapaxes(1, 2)
    gate_and_up = jnp.split(input_weights, 2, axis=2) if self.has_gate else [input_weights]
    gate_and_up, down = [ExpertWeight(one) for one in gate_and_up], ExpertWeight(output_weights)

    def combine(products: list[Array]) -> Array:
        *gate, up = (Tensor(product, environment) for product in products)
        return (self.act_fn(gate[0]) * up if gate else self.act_fn(up)).jax()

    # The batch and sequence axes are flattened here: each token is passed as a sequence of 1.
    x, router_weights, experts = (
        tensor.jax()[:, None]  # pyright: ignore[reportAttributeAccessIssue]
        for tensor in (hidden_states, top_k_weights, top_k_index)
    )
    expert_out = dropless_experts(combine, x, router_weights, experts, gate_and_up, down)
    return Tensor(expert_out[:, 0], environment)


def has_grouped_matmul() -> bool:
    """Return true on TPUs, where a grouped matmul multiplies rows by only their expert's weights.

    XLA for GPUs and CPUs multiplies all rows by every expert (jaxlib 0.10.2: 16 experts take 3.7
    times the operations of 4), and each token is k rows.
    """
    current_placement = placement()
    return (
        current_placement is not None and current_placement.mesh.devices.flat[0].platform == "tpu"
    )


def _is_standard(experts: Any) -> bool:
    """Return true for experts with the default gate, concatenated with up, no bias, no norm."""
    has_custom_gate = not private_torch.has_default_gate(experts)
    has_extras = experts.has_bias or experts.has_post_expert_norm or not experts.is_concatenated
    return not (has_custom_gate or has_extras)


def _dense_experts(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Compute all experts for all tokens, weighted by the router (zero for unselected experts).

    This takes experts / k times the operations of a dispatch.
    """
    if self.has_post_expert_norm:
        raise ImportedModelError(
            "experts with a norm after each expert (has_post_expert_norm) are not supported"
        )
    tokens = hidden_states.size(0)
    router_weights = torch.zeros(
        tokens, self.num_experts, dtype=top_k_weights.dtype, device=top_k_weights.device
    )
    router_weights = router_weights.scatter_add(1, top_k_index, top_k_weights)
    input_proj = self.gate_up_proj if self.has_gate else self.up_proj
    input_axes, output_axes = ("eio", "eoi") if self.is_transposed else ("eoi", "eio")
    inner = torch.einsum(f"ti,{input_axes}->eto", hidden_states, input_proj)
    if self.has_bias:
        bias = self.gate_up_proj_bias if self.has_gate else self.up_proj_bias
        inner = inner + bias[:, None]
    inner = self._apply_gate(inner) if self.has_gate else self.act_fn(inner)
    out = torch.einsum(f"eto,{output_axes}->eti", inner, self.down_proj)
    if self.has_bias:
        out = out + self.down_proj_bias[:, None]
    return torch.einsum("eti,te->ti", out, router_weights.to(out.dtype)).to(hidden_states.dtype)
