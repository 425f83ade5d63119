"""Multi-token prediction: a block that predicts the token after the next, in training alone.

It sees the hidden states of the model and the embeddings of the next tokens, and shares embedding
and LM head with the model.

Source: DeepSeek-AI 2024, "DeepSeek-V3", section 2.2, https://arxiv.org/abs/2412.19437
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from graphtrain.config.schema import Model
from graphtrain.models import init
from graphtrain.models.block import Block, constrain_residual, gather_residual, with_remat
from graphtrain.models.layer_terms import LayerTerms
from graphtrain.models.norms import Norm
from graphtrain.models.projection import project

# Arrays of a batch: the targets of the module and their weights; in a pipeline also the embeddings
# of the next tokens, and the segment ids that its attention reads.
TARGETS, WEIGHTS = "targets_ahead", "weights_ahead"
EMBEDDED, DOCUMENTS = "embedded_ahead", "documents_ahead"


class AheadModule(nnx.Module):
    """Norms and projection of hidden states and embeddings, a block, and the norm of its output."""

    def __init__(self, model: Model, keys: init.ParameterKeys):
        self.model = model
        self.embedding_norm, self.hidden_norm = Norm(model), Norm(model)
        self.projection = init.normal(model, keys, None, "embed", "ahead")
        self.block = Block(model, keys)
        self.norm = Norm(model)

    @jax.named_scope("ahead")
    def __call__(
        self, hidden: jax.Array, embedded: jax.Array, dropout_key: jax.Array | None = None
    ) -> tuple[jax.Array, LayerTerms]:
        """Return normed hidden states (batch, seq, embed), and the terms of the block.

        Args:
            hidden: Normed hidden states of the model (batch, seq, embed).
            embedded: Embeddings of the next tokens (batch, seq, embed).
            dropout_key: Random key; without it there is no dropout.
        """
        normed = self.embedding_norm(embedded), self.hidden_norm(hidden)
        pair = jnp.stack([gather_residual(each) for each in normed], axis=2)
        x = constrain_residual(project(self, "projection", "bspe,pea->bsa", pair))
        block, parameters = nnx.split(self.block)

        def apply(parameters: Any, x: jax.Array, key: Any) -> tuple[jax.Array, LayerTerms]:
            return nnx.merge(block, parameters)(x, key)

        x, terms = with_remat(apply, self.model, in_scan=False)(parameters, x, dropout_key)
        return self.norm(x), terms
