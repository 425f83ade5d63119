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
from graphtrain.models.grouped_matmul_support import rows_of_block, why_no_grouped_matmul
from graphtrain.torch_frontend import private_torch
from lowering.tracing.constrain import mesh_axes_of, shards_of
from lowering.tracing.current_target import traced_target

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
    if not (isinstance(hidden_states, Tensor) and _is_sorted(self, top_k_index.numel())):
        return _dense_experts(self, hidden_states, top_k_index, top_k_weights)
    environment = private_torch.environment_of(hidden_states)
    input_proj = self.gate_up_proj if self.has_gate else self.up_proj
    input_weights, output_weights = input_proj.jax(), self.down_proj.jax()
    if not self.is_transposed:
        input_weights, output_weights = input_weights.swapaxes(1, 2), output_weights.swapaxes(1, 2)
    # Only a gate that is known to pair columns of its halves can be sharded.
    halves = 2 if self.has_gate and not _has_own_gate(self) else 1
    gate_and_up = [ExpertWeight(one) for one in jnp.split(input_weights, halves, axis=2)]
    biases: list[Array] = []
    if self.has_bias:
        bias = (self.gate_up_proj_bias if self.has_gate else self.up_proj_bias).jax()
        biases = jnp.split(bias, halves, axis=1)

    def combine(products: list[Array]) -> Array:
        *gate, up = (Tensor(product, environment) for product in products)
        if gate:
            return (self.act_fn(gate[0]) * up).jax()
        return (self._apply_gate(up) if self.has_gate else self.act_fn(up)).jax()

    # The batch and sequence axes are flattened here: each token is passed as a sequence of 1.
    x, router_weights, experts = (
        tensor.jax()[:, None]  # pyright: ignore[reportAttributeAccessIssue]
        for tensor in (hidden_states, top_k_weights, top_k_index)
    )
    expert_out = dropless_experts(
        *(combine, x, router_weights, experts, gate_and_up, ExpertWeight(output_weights), biases),
        loops=True,
    )
    out = Tensor(expert_out[:, 0], environment)
    if not self.has_bias:
        return out
    shares = _router_weights(self, top_k_index, top_k_weights).to(out.dtype)
    return out + shares @ self.down_proj_bias.to(out.dtype)


def _is_sorted(experts: Any, choices: int) -> bool:
    """Return whether tokens are sorted by expert, each multiplied by the experts it chose alone.

    Args:
        experts: the experts module.
        choices: number of choices, k for each token.
    """
    is_whole = not mesh_axes_of("mlp") and not mesh_axes_of("seq")
    if experts.has_post_expert_norm or (_has_own_gate(experts) and not is_whole):
        return False
    width, embed = experts.down_proj.shape[1:]
    if not experts.is_transposed:
        width, embed = embed, width
    return computes_active_experts(experts.num_experts, embed, width, choices)


def computes_active_experts(experts: int, embed: int, mlp: int, choices: int) -> bool:
    """Return whether there is a product of rows with only their expert's matrices.

    XLA for GPUs and CPUs multiplies all rows of a ragged product by every expert (jaxlib 0.10.2: 16
    experts take 3.7 times the operations of 4), and each token is k rows.

    Args:
        experts: number of experts.
        embed: width of the residual stream.
        mlp: hidden width of an expert.
        choices: number of choices, k for each token, on all devices.
    """
    target = traced_target()
    if target is None or mesh_axes_of("seq"):
        return False
    if target.platform == "tpu":
        return True
    shards = shards_of("experts")
    own, gathered = experts // shards, choices * shards // shards_of("batch")
    if target.platform == "cpu":
        return shards == 1 and rows_of_block(gathered, own) > 0
    return not why_no_grouped_matmul(target, own, embed, mlp // shards_of("mlp"), gathered)


def _has_own_gate(experts: Any) -> bool:
    """Return true for a gate that is not transformers' default, concatenated with up."""
    own = not private_torch.has_default_gate(experts) or not experts.is_concatenated
    return experts.has_gate and own


def _router_weights(
    self: Any, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Return the weight of every expert for every token (tokens, experts); 0 if not chosen."""
    zeros = torch.zeros(
        len(top_k_index), self.num_experts, dtype=top_k_weights.dtype, device=top_k_weights.device
    )
    return zeros.scatter_add(1, top_k_index, top_k_weights)


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
    router_weights = _router_weights(self, top_k_index, top_k_weights)
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
