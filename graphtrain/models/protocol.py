"""Interface of a language model, native or imported: what graphs, keys and checkpoints ask of it.

`graphs.open_model.open_language_model` returns the implementation for the settings of a model.
Opening one imports neither JAX nor PyTorch, and builds nothing. A run traces no graph and asks only
for facts (the last group below); they need neither Flax nor PyTorch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import jax

    from graphtrain.config.resolve import ResolvedProgram
    from graphtrain.config.schema import Program
    from graphtrain.models.attention.cache_layout import CachedLayer
    from graphtrain.models.attention.kv_cache import CacheRows
    from graphtrain.models.layer_terms import LayerTerms
    from graphtrain.models.pipeline_stages import HeadLossFunction, Keys, LossFunction
    from graphtrain.models.unnormed import Unnormed
    from lowering.pipeline.schedules import Pipeline
    from lowering.trees import Tree
    from sharding_rules.arrays import ArraySpec
    from sharding_rules.pipeline import Stages

    # Reads the logits of a decode step from a function that computes those (batch, count, vocab) of
    # the new tokens with the given indices (batch, count).
    LogitsReader = Callable[[Callable[[jax.Array], jax.Array]], Any]


class LanguageModel(Protocol):
    """Pure functions of a causal language model's parameters and tokens, and facts about them.

    Parameters are nested dicts of arrays. Functions of arrays are called inside a trace. Token ids
    are (batch, seq), int32; logits are (batch, seq, vocab).

    Every function of an imported model may raise ImportedModelError: its module cannot be built or
    traced. Every function for pipeline stages may raise ShardingError: the model cannot be split
    into them.
    """

    # Training and evaluation

    def specs(self) -> Tree:
        """Return the tree of parameters as ArraySpecs; nothing is allocated."""
        ...

    def initialize(self, key: jax.Array) -> Tree:
        """Return new float32 parameters, in the tree of `specs`."""
        ...

    def forward(
        self, parameters: Tree, tokens: jax.Array, *, dropout_key: jax.Array | None = None
    ) -> tuple[jax.Array, LayerTerms]:
        """Return logits, and the terms of the layers.

        Args:
            parameters: weights.
            tokens: token ids.
            dropout_key: None disables dropout.
        """
        ...

    def head_inputs(
        self, parameters: Tree, tokens: jax.Array, *, dropout_key: jax.Array | None = None
    ) -> tuple[Unnormed, jax.Array, LayerTerms]:
        """Return the LM head's input before its norm, its weights, and the terms of the layers.

        Requires `has_separate_head`. The arguments are those of `forward`.
        """
        ...

    @property
    def layer_metrics(self) -> tuple[str, ...]:
        """Return the names of the metrics in the terms of the layers."""
        ...

    # Adapters and reference models

    def trained_specs(self, program: Program) -> Tree:
        """Return the tree of arrays with gradients, as ArraySpecs; its layers are in order.

        Raises:
            ShardingError: a pattern of the adapter matches nothing.
        """
        ...

    def frozen_specs(self, program: ResolvedProgram) -> Tree | None:
        """Return the tree of frozen arrays, as ArraySpecs; None if all weights are trained.

        Raises:
            ShardingError: a pattern of the adapter matches nothing, or an array cannot be
                quantized.
        """
        ...

    def lora_inputs(self, spec: ArraySpec) -> int:
        """Return the number of inputs of a weight, by the spec of its factor `lora_a`."""
        ...

    def apply_lora(
        self,
        program: Program,
        trained: Tree,
        frozen: Tree | None,
        key: jax.Array | None = None,
        layers: jax.Array | None = None,
    ) -> Tree:
        """Return the parameters, built from trained and frozen arrays or those of one stage.

        Args:
            program: settings.
            trained: trained arrays.
            frozen: frozen arrays; not read if there is no adapter.
            key: random key for LoRA dropout; None disables it.
            layers: layer of each row of the arrays; None: all in order.
        """
        ...

    def reference_parameters(self, program: Program, frozen: Tree | None) -> Tree:
        """Return frozen arrays, all or those of one stage, as parameters of DPO's reference."""
        ...

    # Pipeline parallelism

    def row_stages(self, stages: Stages) -> Stages:
        """Return the assignment to stages of the rows of arrays that stack layers.

        A row is a layer; of layers that repeat after a period, it is a repetition.
        """
        ...

    @property
    def has_like_layers(self) -> bool:
        """Return whether all layers can be in stages, and a row of stacked arrays is one layer."""
        ...

    def pipeline_specs(self, specs: Tree, stages: Stages) -> Tree:
        """Return the ArraySpecs of the parameters that to_pipeline_layout returns."""
        ...

    def to_pipeline_layout(self, parameters: Tree, stages: Stages) -> Tree:
        """Reorder the layer rows of parameters for the stages of a pipeline."""
        ...

    def pipeline(
        self,
        stages: Stages,
        score: LossFunction,
        keys: Keys | None,
        term_weight: jax.Array | float,
        tokens: jax.Array,
        score_head: HeadLossFunction | None = None,
    ) -> Pipeline:
        """Build the Pipeline of the model: what each part computes of one microbatch.

        Args:
            stages: number of layers in each stage.
            score: loss function, of logits and a microbatch.
            keys: dropout key by microbatch; None disables dropout.
            term_weight: factor of the terms of one microbatch's layers.
            tokens: token ids of all microbatches, (microbatches, batch, seq).
            score_head: loss function with the LM head, in place of `score`; only for models with
                has_separate_head.
        """
        ...

    def split_for_pipeline(self, parameters: Tree) -> Tree:
        """Split parameters into the parts of a Pipeline; a tied weight is in two parts."""
        ...

    def merge_gradients(self, gradients: Tree, parameters: Tree) -> Tree:
        """Merge gradients of the parts into the tree of `parameters`; tied weights are summed."""
        ...

    # Generation

    def cached_layers(self) -> Mapping[str, CachedLayer]:
        """Return the layers whose keys and values are cached, by path.

        Raises:
            ImportedModelError: the model's attention does not support a KV cache.
        """
        ...

    def decode_step(
        self,
        parameters: Tree,
        kv_cache: Tree,
        tokens: jax.Array,
        rows: CacheRows,
        last: jax.Array | None = None,
        read: LogitsReader | None = None,
    ) -> tuple[Any, Tree]:
        """Run one decode step; return the logits of the new tokens, and the updated KV cache.

        Args:
            parameters: weights; in place of each array of stacked layers a tuple of their arrays.
            kv_cache: KV cache of the previous tokens: a tree with {"key", "value"} at each path of
                cached_layers.
            tokens: ids of the new tokens.
            rows: slots and offsets of the batch.
            last: index of the only token whose logits are returned, a scalar; None: of all tokens.
            read: returns what is returned in place of the logits; it computes those that it needs.
        """
        ...

    # Facts, known before anything is built

    @property
    def has_dropout(self) -> bool:
        """Return whether training may apply dropout, and so needs a key."""
        ...

    @property
    def has_separate_head(self) -> bool:
        """Return whether head_inputs is supported, so that the loss can be computed in chunks."""
        ...

    @property
    def mixes_sequences(self) -> bool:
        """Return whether a token's result depends on other sequences, as with expert capacity."""
        ...

    @property
    def layer_count(self) -> int | None:
        """Number of layers; None if only the built module shows it."""
        ...

    @property
    def uses_module_names(self) -> bool:
        """Return whether parameters have the names of a PyTorch module, not those of the decoder.

        Such parameters are read from Hugging Face folders and written to them without conversion.
        Their paths do not tell which of them stack layers; the decoder's do ("layers/...").
        """
        ...

    def key_ingredients(self) -> dict[str, Any]:
        """Return all that can change the traced model, for cache keys: contents, not file names.

        Raises:
            ImportedModelError: the configuration or the module cannot be found.
        """
        ...


class ModuleFacts:
    """Facts about a module that somebody else wrote: what is not known before it is built."""

    @property
    def layer_metrics(self) -> tuple[str, ...]:
        return ()

    @property
    def has_separate_head(self) -> bool:
        return False  # a module returns logits

    @property
    def mixes_sequences(self) -> bool:
        return False

    @property
    def layer_count(self) -> None:
        return None

    @property
    def uses_module_names(self) -> bool:
        return True

    def head_inputs(
        self, parameters: Tree, tokens: jax.Array, *, dropout_key: jax.Array | None = None
    ) -> NoReturn:
        raise AssertionError("has_separate_head is False")
