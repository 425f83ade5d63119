"""Load-balancing loss of transformers' mixtures of experts (router_aux_loss_coef).

transformers collects router logits by hooks, which do not work inside a scan over blocks. Here each
iteration of the scan returns the sums that the loss needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import torch

from graphtrain.errors import ImportedModelError
from graphtrain.models.layer_terms import LayerTerms
from lowering.tracing.constrain import in_shard_map
from sharding_rules.errors import ShardingError

# Per expert: share of tokens routed to it, and mean router probability.
RouterStatistics = tuple[jax.Array, jax.Array]


@dataclass(frozen=True)
class LoadBalancing:
    """The load-balancing loss that a configuration requests."""

    weight: float  # router_aux_loss_coef
    per_token: int  # experts per token
    router: type[torch.nn.Module]  # class of router modules
    index: int  # index of the logits in a router's output

    @classmethod
    def from_module(cls, module: torch.nn.Module) -> LoadBalancing | None:
        """Return the loss if config.output_router_logits is set, and clear that setting.

        Raises:
            ImportedModelError: the router modules are unknown.
        """
        config: Any = getattr(module, "config", None)
        if not getattr(config, "output_router_logits", False):
            return None
        recorder = (getattr(module, "_can_record_outputs", None) or {}).get("router_logits")
        inner = getattr(module, getattr(module, "base_model_prefix", ""), None)
        recorder = recorder or (getattr(inner, "_can_record_outputs", None) or {}).get(
            "router_logits"
        )
        weight = getattr(config, "router_aux_loss_coef", None)
        if recorder is None or weight is None:
            raise ImportedModelError(
                f"output_router_logits adds a load-balancing loss to {type(module).__name__}, but "
                "its router modules are unknown; set it to false in program.model.overrides"
            )
        config.output_router_logits = False
        return cls(weight, config.num_experts_per_tok, recorder.target_class, recorder.index)

    def check(self, module: torch.nn.Module, is_in_scan: Callable[[str], bool]) -> None:
        """Refuse programs that would balance experts over fewer tokens than the module does.

        Args:
            module: The module.
            is_in_scan: Whether a module of this name is inside a block that a scan runs.

        Raises:
            ImportedModelError: a router is outside of the scans.
            ShardingError: the loss is computed for the tokens of one replica at a time.
        """
        outside = [inner for name, inner in module.named_modules() if not is_in_scan(name)]
        if any(isinstance(inner, self.router) for inner in outside):
            raise ImportedModelError(
                "output_router_logits adds a load-balancing loss, which requires that blocks "
                "with a router run in scans; `graphtrain plan` reports how these differ. Or set it "
                "to false in program.model.overrides"
            )
        if in_shard_map():
            raise ShardingError(
                'batch.gradient_reduction = "per_step" computes the loss of one replica\'s tokens '
                "at a time, but "
                "output_router_logits balances experts over the tokens of all replicas; use "
                'batch.gradient_reduction = "per_microbatch"'
            )

    @contextmanager
    def recording(self, block: torch.nn.Module) -> Iterator[list[RouterStatistics]]:
        """Record the sums of each router of a block that is called inside."""
        sums: list[RouterStatistics] = []
        with ExitStack() as stack:
            for inner in block.modules():
                if isinstance(inner, self.router):
                    handle = inner.register_forward_hook(
                        lambda _, inputs, returned: sums.append(self._sums(returned[self.index]))
                    )
                    stack.callback(handle.remove)
            yield sums

    def _sums(self, scores: Any) -> RouterStatistics:
        """Return each expert's share of tokens, and its mean router probability."""
        probs = jax.nn.softmax(scores.jax(), axis=-1)
        _, expert_indices = jax.lax.top_k(probs, self.per_token)
        counts = jax.nn.one_hot(expert_indices, probs.shape[-1], dtype=jnp.float32).sum(1)
        return counts.mean(0), probs.astype(jnp.float32).mean(0)

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Names of the metrics in `terms`."""
        return "balance_loss", "expert_load_max", "expert_load_min"

    def terms(self, sums: list[RouterStatistics]) -> LayerTerms:
        """Compute the loss and the load from the sums of all blocks, which a scan stacks.

        Source: Fedus et al. 2021, "Switch", equation 4, https://arxiv.org/abs/2101.03961; as in
        transformers, means are over the tokens of all layers.
        """
        token_shares, probs = (
            jnp.concatenate(
                [statistics[index].reshape(-1, statistics[index].shape[-1]) for statistics in sums]
            )
            for index in (0, 1)
        )
        experts = token_shares.shape[-1]
        loss = experts * (token_shares.mean(0) * probs.mean(0)).sum()
        loads = token_shares * (experts / self.per_token)  # (layers, experts)
        metrics = {
            "balance_loss": loss,
            "expert_load_max": loads.max(-1).mean(),
            "expert_load_min": loads.min(-1).mean(),
        }
        return LayerTerms({"balance_loss": self.weight * loss}, jax.lax.stop_gradient(metrics))
