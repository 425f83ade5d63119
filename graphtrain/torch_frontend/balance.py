"""What transformers' mixtures add to the loss, so that every expert is used (router_aux_loss_coef).

A module collects the scores of its routers by hooks, which a scan over its blocks does not reach;
here each turn of the scan returns their sums.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import torch

from graphtrain.errors import ImportedModelError

Sums = tuple[jax.Array, jax.Array]  # of a block, by expert


@dataclass(frozen=True)
class Balance:
    """The balance loss that a config asks for."""

    weight: float
    per_token: int
    router: type[torch.nn.Module]
    index: int  # of the scores in what a router returns

    @classmethod
    def taken_from(cls, module: torch.nn.Module) -> Balance | None:
        """What output_router_logits asks for; the module itself no longer does it.

        Raises:
            ImportedModelError: it is not known which modules route.
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
                f"output_router_logits asks {type(module).__name__} for a balance loss, and which "
                "modules route is not known; set it to false in overrides"
            )
        config.output_router_logits = False
        return cls(weight, config.num_experts_per_tok, recorder.target_class, recorder.index)

    @contextmanager
    def recorded(self, block: torch.nn.Module) -> Iterator[list[Sums]]:
        """The sums of each router of a block that is called inside."""
        sums: list[Sums] = []
        with ExitStack() as stack:
            for inner in block.modules():
                if isinstance(inner, self.router):
                    handle = inner.register_forward_hook(
                        lambda _, given, returned: sums.append(self._sums(returned[self.index]))
                    )
                    stack.callback(handle.remove)
            yield sums

    def _sums(self, scores: Any) -> Sums:
        """Parts of all tokens that chose each expert, and means of what each is likely to get."""
        likely = jax.nn.softmax(scores.jax(), axis=-1)
        _, chosen = jax.lax.top_k(likely, self.per_token)
        counts = jax.nn.one_hot(chosen, likely.shape[-1], dtype=jnp.float32).sum(1)
        return counts.mean(0), likely.astype(jnp.float32).mean(0)

    def loss(self, sums: list[Sums]) -> jax.Array:
        """Of the sums of all blocks, which a scan stacks.

        Source: Fedus et al. 2021, "Switch", equation 4, https://arxiv.org/abs/2101.03961, with
        means over the tokens of all layers, as transformers has it
        """
        chosen, likely = (
            jnp.concatenate([each[part].reshape(-1, each[part].shape[-1]) for each in sums]).mean(0)
            for part in (0, 1)
        )
        return self.weight * chosen.shape[0] * (chosen * likely).sum()
