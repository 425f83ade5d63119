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
from graphtrain.models.moe import dropless_experts
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
    if not (has_grouped_matmul() and _plain(self) and isinstance(hidden_states, Tensor)):
        return _dense_experts(self, hidden_states, top_k_index, top_k_weights)
    environment = private_torch.environment_of(hidden_states)
    first = self.gate_up_proj if self.has_gate else self.up_proj
    wide, down = first.jax(), self.down_proj.jax()
    if not self.is_transposed:
        wide, down = wide.swapaxes(1, 2), down.swapaxes(1, 2)
    apart = jnp.split(wide, 2, axis=2) if self.has_gate else [wide]

    def combine(products: list[Array]) -> Array:
        *gate, up = (Tensor(one, environment) for one in products)
        return (self.act_fn(gate[0]) * up if gate else self.act_fn(up)).jax()

    # The batch and sequence axes are flattened here: each token is passed as a sequence of 1.
    x, shares, experts = (
        one.jax()[:, None]  # pyright: ignore[reportAttributeAccessIssue]
        for one in (hidden_states, top_k_weights, top_k_index)
    )
    mixed = dropless_experts(combine, x, shares, experts, apart, down)
    return Tensor(mixed[:, 0], environment)


def has_grouped_matmul() -> bool:
    """Return true on TPUs, where a grouped matmul multiplies rows by only their expert's weights.

    XLA for GPUs and CPUs multiplies all rows by every expert (jaxlib 0.10.2: 16 experts take 3.7
    times the operations of 4), and each token is k rows.
    """
    found = placement()
    return found is not None and found.mesh.devices.flat[0].platform == "tpu"


def _plain(experts: Any) -> bool:
    """Return true for experts with the default gate, concatenated with up, no bias, no norm."""
    own_gate = not private_torch.has_default_gate(experts)
    more = experts.has_bias or experts.has_post_expert_norm or not experts.is_concatenated
    return not (own_gate or more)


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
    shares = torch.zeros(
        tokens, self.num_experts, dtype=top_k_weights.dtype, device=top_k_weights.device
    )
    shares = shares.scatter_add(1, top_k_index, top_k_weights)
    first = self.gate_up_proj if self.has_gate else self.up_proj
    into, back = ("eio", "eoi") if self.is_transposed else ("eoi", "eio")
    inner = torch.einsum(f"ti,{into}->eto", hidden_states, first)
    if self.has_bias:
        bias = self.gate_up_proj_bias if self.has_gate else self.up_proj_bias
        inner = inner + bias[:, None]
    inner = self._apply_gate(inner) if self.has_gate else self.act_fn(inner)
    out = torch.einsum(f"eto,{back}->eti", inner, self.down_proj)
    if self.has_bias:
        out = out + self.down_proj_bias[:, None]
    return torch.einsum("eti,te->ti", out, shares.to(out.dtype)).to(hidden_states.dtype)
