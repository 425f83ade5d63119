"""Experts of transformers' mixtures, to which tokens are sent as the native mixture sends them.

transformers sends tokens by loops over values, which cannot be traced; it lets others say how.
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
from lowering.tracing.constrain import placement

NAME = "graphtrain"


def register() -> str:
    """Make the experts known to transformers; the name by which it finds them."""
    moe.ALL_EXPERTS_FUNCTIONS.register(NAME, _experts)
    return NAME


def _experts(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """As transformers calls it: tokens (tokens, embed), and the experts and shares of each."""
    if not (by_runs() and _plain(self) and isinstance(hidden_states, Tensor)):
        return _every_expert(self, hidden_states, top_k_index, top_k_weights)
    environment = hidden_states._env  # pyright: ignore[reportAttributeAccessIssue]
    first = self.gate_up_proj if self.has_gate else self.up_proj
    wide, down = first.jax(), self.down_proj.jax()
    if not self.is_transposed:
        wide, down = wide.swapaxes(1, 2), down.swapaxes(1, 2)
    apart = jnp.split(wide, 2, axis=2) if self.has_gate else [wide]

    def combine(products: list[Array]) -> Array:
        *gate, up = (Tensor(one, environment) for one in products)
        return (self.act_fn(gate[0]) * up if gate else self.act_fn(up)).jax()

    # Sequences are no longer apart here: every token is one of its own.
    x, shares, experts = (
        one.jax()[:, None]  # pyright: ignore[reportAttributeAccessIssue]
        for one in (hidden_states, top_k_weights, top_k_index)
    )
    mixed = dropless_experts(combine, x, shares, experts, apart, down)
    return Tensor(mixed[:, 0], environment)


def by_runs() -> bool:
    """Whether the machine multiplies each run of rows by its expert's weights alone.

    XLA for GPUs and CPUs makes a product of all rows with every expert of it (jaxlib 0.10.2: 16
    experts are 3.7 times the operations of 4), and a row is there once for each choice of a token.
    """
    found = placement()
    return found is not None and found.mesh.devices.flat[0].platform == "tpu"


def _plain(experts: Any) -> bool:
    """Whether they are products with a gate as transformers has it by default, and nothing more."""
    own_gate = type(experts)._apply_gate is not moe._default_apply_gate
    more = experts.has_bias or experts.has_post_expert_norm or not experts.is_concatenated
    return not (own_gate or more)


def _every_expert(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """All tokens by all experts, of which each token keeps those it was sent to.

    The products are as many times too many as there are experts for each that a token is sent to.
    """
    if self.has_post_expert_norm:
        raise ImportedModelError("experts with a norm of their own are not known")
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
