"""A causal language model of transformers from its configuration; nothing is downloaded."""

from __future__ import annotations

from typing import Any

import torch

from graphtrain.torch_models.errors import ImportedModelError


def from_config(config: dict[str, Any]) -> torch.nn.Module:
    """The model of a config.json, with weights as its constructor makes them, in float32.

    Raises:
        ImportedModelError: transformers has no such causal language model, or refuses the config.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    from graphtrain.torch_models.interface import OWN, asks, register

    logging.set_verbosity_error()
    settings = {name: value for name, value in config.items() if name != "model_type"}
    kind = config["model_type"]
    if settings.pop("quantization_config", None):
        raise ImportedModelError(
            "config.json has a quantization_config; train from a folder that is not quantized"
        )
    if settings.get("output_router_logits"):
        raise ImportedModelError(
            "output_router_logits adds a loss that is not traced; set it to false in overrides"
        )
    try:
        made = AutoConfig.for_model(kind, **settings)
    except (ValueError, TypeError) as error:
        raise ImportedModelError(f"transformers refuses the config of a {kind}: {error}") from error
    if type(made) not in AutoModelForCausalLM._model_mapping:
        raise ImportedModelError(
            f"transformers has no causal language model of model_type {kind!r}"
        )
    made.use_cache = False
    register()
    _use_every_expert()
    options: dict[str, Any] = {"dtype": torch.float32}
    if getattr(made, "num_experts_per_tok", None) is not None:
        options["experts_implementation"] = EVERY_EXPERT
    if asks(AutoModelForCausalLM._model_mapping[type(made)], made):
        options["attn_implementation"] = OWN
    return AutoModelForCausalLM.from_config(made, **options)


def use_own_parts(module: Any) -> None:
    """Let it attend, and a mixture send tokens, as transformers does, to compare with."""
    module.set_attn_implementation(module.get_correct_attn_implementation(None))
    if hasattr(module.config, "num_experts_per_tok"):
        module.set_experts_implementation("eager")


EVERY_EXPERT = "every_expert"


def _use_every_expert() -> None:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(EVERY_EXPERT, _every_expert)


def _every_expert(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """All tokens by all experts, of which each token keeps those it was sent to.

    transformers sends tokens by loops over values, which cannot be traced. The products are as many
    times too many as there are experts for each that a token is sent to.
    """
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
