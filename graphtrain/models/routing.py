"""Router of a mixture of experts: which experts a token chooses, with which weights; its losses."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from graphtrain.config.schema import MixtureOfExperts
from graphtrain.models.layer_terms import LayerTerms

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float, Int

DROPPED = "dropped_choices"  # metric: fraction of the choices beyond the capacity


def top_k(
    scores: Float[Array, "batch seq router"],
    mixture: MixtureOfExperts,
    bias: Float[Array, " router"] | None = None,
) -> tuple[Float[Array, "batch seq choices"], Int[Array, "batch seq choices"]]:
    """Return the weights and indices of each token's top-k experts.

    The weights are the router's probabilities, by softmax or sigmoid. With `moe.normalize_topk`
    they are rescaled to sum to 1 for each token. `moe.routed_scaling_factor` multiplies them.

    Args:
        scores: Outputs of the router.
        mixture: Settings.
        bias: Added to the probabilities for the choice of experts alone; its gradient is the load
            of the experts, from which the step updates it (`graphs.expert_bias`).

    Source: DeepSeek-AI 2024, "DeepSeek-V3", section 2.1.2, https://arxiv.org/abs/2412.19437
    """
    probs, count = probabilities(scores, mixture), mixture.experts_per_token
    if bias is None and mixture.groups is None:
        shares, experts = jax.lax.top_k(probs, count)
    else:
        preferences = probs if bias is None else probs + jax.lax.stop_gradient(bias)
        _, experts = jax.lax.top_k(_within_best_groups(preferences, mixture), count)
        shares = jnp.take_along_axis(probs, experts, -1)
    if mixture.normalize_topk:
        least = 1e-20 if mixture.score_function == "sigmoid" else 0.0
        shares = shares / (shares.sum(-1, keepdims=True) + least)
    if bias is not None:
        shares = _with_load_as_gradient(shares, bias, experts)
    factor = mixture.routed_scaling_factor
    return (shares if factor == 1 else shares * factor), experts


def probabilities(
    scores: Float[Array, "batch seq router"], mixture: MixtureOfExperts
) -> Float[Array, "batch seq router"]:
    """Return each expert's probability, by softmax over the experts or by a sigmoid of its own."""
    if mixture.score_function == "sigmoid":
        return jax.nn.sigmoid(scores)
    return jax.nn.softmax(scores, axis=-1)


def _within_best_groups(preferences: jax.Array, mixture: MixtureOfExperts) -> jax.Array:
    """Set to minus infinity the experts outside of each token's best groups.

    A group is as good as the sum of its two best experts.
    """
    if mixture.groups is None:
        return preferences
    assert mixture.groups_per_token
    grouped = preferences.reshape(*preferences.shape[:-1], mixture.groups, -1)
    best_two, _ = jax.lax.top_k(grouped, 2)
    _, chosen = jax.lax.top_k(best_two.sum(-1), mixture.groups_per_token)
    is_chosen = jax.nn.one_hot(chosen, mixture.groups, dtype=bool).any(-2)
    return jnp.where(is_chosen[..., None], grouped, -jnp.inf).reshape(preferences.shape)


@jax.custom_vjp
def _with_load_as_gradient(shares: jax.Array, bias: jax.Array, experts: jax.Array) -> jax.Array:
    """Return `shares`; the gradient of `bias` is the number of choices of each expert.

    So the counts are summed over microbatches, devices and stages as every gradient is. They are 0
    where no gradient arrives, as in a pipeline's ticks without a microbatch.
    """
    return shares


def _load_forward(
    shares: jax.Array, bias: jax.Array, experts: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return shares, (bias, experts)


def _load_backward(
    residuals: tuple[jax.Array, jax.Array], gradient: jax.Array
) -> tuple[jax.Array, jax.Array, None]:
    bias, experts = residuals
    chosen = jax.nn.one_hot(experts, len(bias), dtype=bias.dtype)
    counts = chosen.sum(tuple(range(chosen.ndim - 1)))
    return gradient, jnp.where((gradient != 0).any(), counts, 0), None


_with_load_as_gradient.defvjp(_load_forward, _load_backward)


def slot_in_expert(
    experts: Int[Array, "batch seq choices"], count: int
) -> Int[Array, "batch seq choices"]:
    """Return how many earlier choices in the same sequence chose the same expert.

    `count` is the number of experts. Choices are counted in sequence order, so the result is the
    slot that a choice takes at its expert.
    """
    chosen = jax.nn.one_hot(experts, count, dtype=jnp.int32)
    flat = chosen.reshape(len(experts), -1, count)
    earlier = (jnp.cumsum(flat, axis=1) - flat).reshape(chosen.shape)
    return (earlier * chosen).sum(-1)


def router_metrics(
    scores: Float[Array, "batch seq router"],
    experts: Int[Array, "batch seq choices"],
    mixture: MixtureOfExperts,
) -> dict[str, jax.Array]:
    """Return the losses of one router without their weights, and the load of its experts.

    All are means over tokens. A load is the number of an expert's choices over the mean number. In
    the balance loss, probabilities by sigmoid are divided by their sum.

    Source: Fedus et al. 2021, "Switch", equation 4, https://arxiv.org/abs/2101.03961, with f as
    the fraction of all choices; Zoph et al. 2022, "ST-MoE", equation 5,
    https://arxiv.org/abs/2202.08906
    """
    mean_choices = jax.nn.one_hot(experts, mixture.experts).mean((0, 1, 2))
    probs = probabilities(scores, mixture)
    if mixture.score_function == "sigmoid":
        probs = probs / probs.sum(-1, keepdims=True)
    mean_probs = probs.mean((0, 1))
    return {
        "balance_loss": mixture.experts * (mean_choices * mean_probs).sum(),
        "router_z_loss": jnp.square(jax.nn.logsumexp(scores, axis=-1)).mean(),
        "expert_load_max": mixture.experts * mean_choices.max(),
        "expert_load_min": mixture.experts * mean_choices.min(),
    }


def metric_names(mixture: MixtureOfExperts) -> tuple[str, ...]:
    """Return the names of the metrics of a mixture's layers."""
    names = "balance_loss", "router_z_loss", "expert_load_max", "expert_load_min"
    return names if mixture.capacity_factor is None else (*names, DROPPED)


def layer_terms(
    metrics: dict[str, jax.Array], mixture: MixtureOfExperts, layers: int
) -> LayerTerms:
    """Return the terms of one layer; summed over the model's layers they are means over layers."""
    means = {name: value / layers for name, value in metrics.items()}
    losses = {
        "balance_loss": mixture.balance_loss * means["balance_loss"],
        "router_z_loss": mixture.router_z_loss * means["router_z_loss"],
    }
    return LayerTerms(losses, jax.lax.stop_gradient(means))
