"""Scalars that the layers of a model return beside the hidden states."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import jax


class LayerTerms(NamedTuple):
    """Losses and metrics of layers, by name."""

    losses: dict[str, jax.Array]  # added to the objective, weighted
    metrics: dict[str, jax.Array]  # reported only


NO_TERMS = LayerTerms({}, {})
