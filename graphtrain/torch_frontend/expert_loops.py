"""Experts, and adapters of languages, that are a loop over tensor values, as traceable functions.

Other families call an implementation that is chosen by name, see `experts`. These compute the same,
which the parity check confirms: all experts for all tokens, weighted by the router or selected.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch


def replace_loops(model: torch.nn.Module) -> None:
    """Replace the forward of such modules in a model of transformers."""
    for module in model.modules():
        if (forward := _replacement(module)) is not None:
            module.forward = MethodType(forward, module)


def restore_loops(model: torch.nn.Module) -> None:
    """Give the modules their own forward again."""
    for module in model.modules():
        if _replacement(module) is not None:
            vars(module).pop("forward", None)


def _replacement(module: torch.nn.Module) -> Callable[..., Any] | None:
    kind = type(module)
    is_published = kind.__module__.startswith("transformers.models.")
    return _FORWARDS.get(kind.__name__) if is_published else None


def unsorted_experts(model: torch.nn.Module) -> list[str]:
    """Return the kinds of modules in a model that multiply every token by every expert."""
    kinds = {type(module).__name__ for module in model.modules() if _replacement(module)}
    return sorted(kinds & _UNSORTED)


def _router_weights(index: torch.Tensor, weights: torch.Tensor, experts: int) -> torch.Tensor:
    """Return the weight of every expert for every token, (tokens, experts)."""
    zeros = torch.zeros(len(index), experts, dtype=weights.dtype, device=weights.device)
    return zeros.scatter_add(1, index, weights)


def _dbrx(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    x = hidden_states.reshape(-1, self.hidden_size)
    shape = self.num_experts, self.ffn_hidden_size, self.hidden_size
    gate, up, down = (one.view(shape) for one in (self.mlp.w1, self.mlp.v1, self.mlp.w2))
    inner = self.mlp.activation_fn(torch.einsum("ti,eoi->eto", x, gate))
    inner = inner * torch.einsum("ti,eoi->eto", x, up)
    weights = _router_weights(top_k_index, top_k_weights, self.num_experts)
    out = torch.einsum("eto,eoi,te->ti", inner, down, weights.to(inner.dtype))
    return out.view(hidden_states.shape[0], -1, self.hidden_size)


def _longcat_flash(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Compute experts, of which those after the routed ones return their input."""
    weights = _router_weights(top_k_index, top_k_weights, self.total_experts)
    weights, identity = weights.split((self.num_routed_experts, self.zero_expert_num), 1)
    out = hidden_states * identity.sum(1, keepdim=True).to(hidden_states.dtype)
    if self.gate_up_proj is None:
        return out
    input_weights = self.gate_up_proj[: self.num_routed_experts]
    gate, up = torch.einsum("ti,eoi->eto", hidden_states, input_weights).chunk(2, -1)
    inner = self.act_fn(gate) * up
    return out + torch.einsum("eto,eio,te->ti", inner, self.down_proj, weights.to(inner.dtype))


def _jetmoe_router(self: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Sort tokens by their experts; the numbers of tokens per expert stay a tensor."""
    logits = self.layer(hidden_states).float()
    top_k_logits, top_k_index = logits.topk(self.top_k, dim=1)
    gates = torch.softmax(top_k_logits, dim=1).type_as(hidden_states).flatten()
    experts = top_k_index.flatten()
    order = experts.argsort()
    numbers = torch.arange(self.num_experts, device=experts.device)
    sizes = (experts[:, None] == numbers).sum(0)
    rows = order.div(self.top_k, rounding_mode="trunc")
    return order, rows, gates[order], sizes, logits


def _jetmoe_experts(self: Any, inputs: torch.Tensor, expert_size: torch.Tensor) -> torch.Tensor:
    """Multiply rows, sorted by expert, by the matrix of their expert."""
    rows = torch.arange(len(inputs), device=inputs.device)[:, None]
    ends = expert_size.cumsum(0)
    is_own = (rows < ends) & (rows >= ends - expert_size)
    return torch.einsum("ti,eoi,te->to", inputs, self.weight, is_own.to(inputs.dtype))


def _xmod_output(
    self: Any, hidden_states: torch.Tensor, input_tensor: torch.Tensor, lang_ids: torch.Tensor
) -> torch.Tensor:
    """Compute the adapters of all languages; each row takes that of its own."""
    x = self.dropout(self.dense(hidden_states)) + input_tensor
    residual = x
    if self.adapter_layer_norm is not None:
        x = self.adapter_layer_norm(x)
    elif self.adapter_reuse_layer_norm:
        x = self.LayerNorm(x)
    if self.ln_before_adapter:
        residual = x
    out = torch.zeros_like(x)
    for language, adapter in enumerate(self.adapter_modules.values()):
        out = torch.where((lang_ids == language)[:, None, None], adapter(x), out)
    return self.dropout(out) + residual


_UNSORTED = {"DbrxExperts", "LongcatFlashExperts", "JetMoeParallelExperts"}
_FORWARDS: dict[str, Callable[..., Any]] = {
    "DbrxExperts": _dbrx,
    "LongcatFlashExperts": _longcat_flash,
    "JetMoeTopKGating": _jetmoe_router,
    "JetMoeParallelExperts": _jetmoe_experts,
    "XmodOutput": _xmod_output,
}
