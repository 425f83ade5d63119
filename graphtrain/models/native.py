"""Native decoder as a LanguageModel. Flax is imported by the functions that trace, not before."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from graphtrain.models.shapes import STACKS
from lowering.trees import unflatten

if TYPE_CHECKING:
    import jax

    from graphtrain.config.resolve import ResolvedProgram
    from graphtrain.config.schema import Model, Program
    from graphtrain.models.attention.cache_layout import CachedLayer
    from graphtrain.models.attention.kv_cache import CacheRows
    from graphtrain.models.layer_terms import LayerTerms
    from graphtrain.models.pipeline_stages import HeadLossFunction, Keys, LossFunction
    from graphtrain.models.protocol import LogitsReader
    from graphtrain.models.unnormed import Unnormed
    from lowering.pipeline.schedules import Pipeline
    from lowering.trees import Tree
    from sharding_rules.arrays import ArraySpec
    from sharding_rules.pipeline import Stages


@dataclass(frozen=True)
class NativeModel:
    """Decoder with these settings; see LanguageModel."""

    settings: Model

    def specs(self) -> Tree:
        from graphtrain.models import decoder

        return decoder.parameter_specs(self.settings)

    def initialize(self, key: jax.Array) -> Tree:
        from graphtrain.models import decoder

        return decoder.initialize(self.settings, key)

    def forward(
        self, parameters: Tree, tokens: jax.Array, *, dropout_key: jax.Array | None = None
    ) -> tuple[jax.Array, LayerTerms]:
        from graphtrain.models import decoder

        return decoder.forward(self.settings, parameters, tokens, dropout_key=dropout_key)

    def head_inputs(
        self, parameters: Tree, tokens: jax.Array, *, dropout_key: jax.Array | None = None
    ) -> tuple[Unnormed, jax.Array, LayerTerms]:
        from graphtrain.models import decoder

        return decoder.head_inputs(self.settings, parameters, tokens, dropout_key=dropout_key)

    def head_inputs_ahead(
        self,
        parameters: Tree,
        hidden: jax.Array,
        next_tokens: jax.Array,
        *,
        dropout_key: jax.Array | None = None,
    ) -> tuple[jax.Array, LayerTerms]:
        """Return the LM head's input for the token after the next, and the terms of its block."""
        from graphtrain.models import decoder

        return decoder.head_inputs_ahead(
            self.settings, parameters, hidden, next_tokens, dropout_key=dropout_key
        )

    def embed_next(self, parameters: Tree, tokens: jax.Array) -> jax.Array:
        """Return the embeddings that head_inputs_ahead computes of the next tokens."""
        from graphtrain.models import decoder

        return decoder.embed_next(self.settings, parameters, tokens)

    def logits_of(self, parameters: Tree, hidden: jax.Array, head: jax.Array) -> jax.Array:
        """Return the logits of the LM head's input and weights, both from head_inputs."""
        from graphtrain.models import decoder

        return decoder.logits_of(self.settings, parameters, hidden, head)

    def trained_specs(self, program: Program) -> Tree:
        from graphtrain.models.lora import trainable

        if program.adapter is None:
            return self.specs()
        return unflatten(trainable.trained_arrays(program))

    def frozen_specs(self, program: ResolvedProgram) -> Tree | None:
        from graphtrain.models.lora import trainable

        frozen = trainable.frozen_arrays(program)
        return unflatten(frozen) if frozen else None

    def lora_inputs(self, spec: ArraySpec) -> int:
        of_one = (*STACKS, "experts", "rank")
        sizes = zip(spec.axes, spec.shape, strict=True)
        return math.prod(size for axis, size in sizes if axis not in of_one)

    def apply_lora(
        self,
        program: Program,
        trained: Tree,
        frozen: Tree | None,
        key: jax.Array | None = None,
        layers: jax.Array | None = None,
    ) -> Tree:
        from graphtrain.models.lora.layers import apply_lora

        return apply_lora(program, trained, frozen, key, layers)

    def reference_parameters(self, program: Program, frozen: Tree | None) -> Tree:
        from graphtrain.models.lora.layers import reference_parameters

        return reference_parameters(program, frozen)

    @property
    def layer_metrics(self) -> tuple[str, ...]:
        from graphtrain.models import routing

        moe, ahead = self.settings.moe, self.settings.mtp_loss_weight is not None
        names = () if moe is None else routing.metric_names(moe)
        return (*names, "mtp_loss") if ahead else names

    def row_stages(self, stages: Stages) -> Stages:
        return stages

    @property
    def has_like_layers(self) -> bool:
        return True

    def pipeline_specs(self, specs: Tree, stages: Stages) -> Tree:
        from graphtrain.models import pipeline_stages

        return pipeline_stages.pipeline_specs(specs, stages)

    def to_pipeline_layout(self, parameters: Tree, stages: Stages) -> Tree:
        from graphtrain.models import pipeline_stages

        return pipeline_stages.to_pipeline_layout(parameters, stages)

    def pipeline(
        self,
        stages: Stages,
        score: LossFunction,
        keys: Keys | None,
        term_weight: jax.Array | float,
        tokens: jax.Array,
        score_head: HeadLossFunction | None = None,
    ) -> Pipeline:
        from graphtrain.models import pipeline_stages

        return pipeline_stages.decoder_pipeline(
            self.settings, stages, score, keys, term_weight, score_head
        )

    def split_for_pipeline(self, parameters: Tree) -> Tree:
        from graphtrain.models import pipeline_stages

        return pipeline_stages.split_for_pipeline(self.settings, parameters)

    def merge_gradients(self, gradients: Tree, parameters: Tree) -> Tree:
        from graphtrain.models import pipeline_stages

        return pipeline_stages.merge_gradients(gradients)

    def cached_layers(self) -> dict[str, CachedLayer]:
        from graphtrain.models import decode

        return decode.cached_layers(self.settings)

    def decode_step(
        self,
        parameters: Tree,
        kv_cache: Tree,
        tokens: jax.Array,
        rows: CacheRows,
        last: jax.Array | None = None,
        read: LogitsReader | None = None,
    ) -> tuple[Any, Tree]:
        from graphtrain.models import decode

        return decode.decode_step(self.settings, parameters, kv_cache, tokens, rows, last, read)

    @property
    def has_dropout(self) -> bool:
        return bool(self.settings.dropout)

    @property
    def has_separate_head(self) -> bool:
        return True

    @property
    def mixes_sequences(self) -> bool:
        return self.settings.moe is not None

    @property
    def layer_count(self) -> int:
        return self.settings.layers

    @property
    def uses_module_names(self) -> bool:
        return False

    def key_ingredients(self) -> dict[str, Any]:
        return asdict(self.settings)
