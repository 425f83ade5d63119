"""Targets of multi-token prediction: the tokens after the next, beside the arrays of a batch."""

from __future__ import annotations

import jax.numpy as jnp

from graphtrain.config.resolve import ResolvedProgram
from graphtrain.config.schema import is_imported
from graphtrain.models.ahead import TARGETS, WEIGHTS
from lowering.trees import Tree


def with_targets_ahead(program: ResolvedProgram, batch: Tree) -> Tree:
    """Return a batch with the targets after the next token and their weights, if they are used.

    Args:
        program: Settings.
        batch: Arrays (..., batch, seq), in the order of the sequences.
    """
    if is_imported(program.model) or program.model.mtp_loss_weight is None:
        return batch
    targets, weights = targets_ahead(batch)
    return {**batch, TARGETS: targets, WEIGHTS: weights}


def targets_ahead(batch: Tree) -> Tree:
    """Return the targets after the next token, with their weights: 0 for those of no token.

    The last position of a sequence has none, and a document has none beyond its end. Rows that pack
    documents omit the last token of each as an input, so that what follows there is not the target.
    Where documents are not isolated, and end with the token with which they begin, a row is one
    document here.
    """
    targets, counts = batch["targets"], batch["weights"]
    follows = batch["tokens"][..., 1:] == targets[..., :-1]
    if (documents := batch.get("documents")) is not None:
        follows &= documents[..., 1:] == documents[..., :-1]
    last = (*((0, 0) for _ in targets.shape[:-1]), (0, 1))
    return jnp.pad(targets[..., 1:], last), jnp.pad(counts[..., 1:] * follows, last)
