"""PyTorch and Hugging Face models as a LanguageModel. PyTorch is imported when one is built."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from graphtrain.models.layer_terms import LayerTerms
from graphtrain.models.protocol import ModuleFacts
from graphtrain.torch_frontend.source import key_ingredients
from graphtrain.torch_frontend.versions import check_versions, installed
from lowering.trees import unflatten

if TYPE_CHECKING:
    import jax

    from graphtrain.config.resolve import ResolvedProgram
    from graphtrain.config.schema import Program, TorchModel
    from graphtrain.models.attention.cache_layout import CachedLayer
    from graphtrain.models.attention.kv_cache import CacheRows
    from graphtrain.models.pipeline_stages import HeadLossFunction, Keys, LossFunction
    from graphtrain.models.protocol import LogitsReader
    from graphtrain.torch_frontend.model import OpenedModel
    from lowering.pipeline.schedules import Pipeline
    from lowering.trees import Tree
    from sharding_rules.arrays import ArraySpec
    from sharding_rules.pipeline import Stages


@dataclass(frozen=True)
class TorchLanguageModel(ModuleFacts):
    """Imported model with these settings; see LanguageModel."""

    settings: TorchModel

    def opened(self) -> OpenedModel:
        """Return the model's module without weights; it is built once per process.

        Raises:
            ImportedModelError: a version is unsupported, or the module cannot be built or traced.
        """
        # Before an import fails with an obscure error.
        check_versions(installed(), hf=self.settings.hf is not None)
        from graphtrain.torch_frontend.open_module import open_model

        return open_model(self.settings)

    def specs(self) -> Tree:
        return unflatten(self.opened().specs())

    def initialize(self, key: jax.Array) -> Tree:
        return self.opened().initialize(key)

    def forward(
        self, parameters: Tree, tokens: jax.Array, *, dropout_key: jax.Array | None = None
    ) -> tuple[jax.Array, LayerTerms]:
        return self.opened().forward(parameters, tokens, dropout_key)

    def trained_specs(self, program: Program) -> Tree:
        opened = self.opened()
        from graphtrain.torch_frontend import adapters

        return unflatten(adapters.trained_arrays(opened, program.adapter))

    def frozen_specs(self, program: ResolvedProgram) -> Tree | None:
        opened = self.opened()
        from graphtrain.torch_frontend import adapters

        frozen = adapters.frozen_arrays(opened, program)
        return unflatten(frozen) if frozen else None

    def lora_inputs(self, spec: ArraySpec) -> int:
        return spec.shape[-1]

    def apply_lora(
        self,
        program: Program,
        trained: Tree,
        frozen: Tree | None,
        key: jax.Array | None = None,
        layers: jax.Array | None = None,
    ) -> Tree:
        opened = self.opened()
        from graphtrain.torch_frontend import adapters

        return adapters.apply_lora(opened, program, trained, frozen, key, layers)

    def reference_parameters(self, program: Program, frozen: Tree | None) -> Tree:
        opened = self.opened()
        from graphtrain.torch_frontend import adapters

        return adapters.reference_parameters(opened, frozen)

    @property
    def layer_metrics(self) -> tuple[str, ...]:
        balance = self.opened().balance
        return () if balance is None else balance.metric_names

    def row_stages(self, stages: Stages) -> Stages:
        opened = self.opened()
        from graphtrain.torch_frontend import pipeline_parts

        return pipeline_parts.parts_of(opened).blocks.rows(stages)

    @property
    def has_like_layers(self) -> bool:
        opened = self.opened()
        from graphtrain.torch_frontend import pipeline_parts

        blocks = pipeline_parts.parts_of(opened).blocks
        return blocks.stack.period == 1 and not blocks.outside

    def pipeline_specs(self, specs: Tree, stages: Stages) -> Tree:
        opened = self.opened()
        from graphtrain.torch_frontend import pipeline_parts

        return pipeline_parts.to_stage_order(opened, specs, stages)

    def to_pipeline_layout(self, parameters: Tree, stages: Stages) -> Tree:
        opened = self.opened()
        from graphtrain.torch_frontend import pipeline_parts

        return pipeline_parts.to_stage_order(opened, parameters, stages)

    def pipeline(
        self,
        stages: Stages,
        score: LossFunction,
        keys: Keys | None,
        term_weight: jax.Array | float,
        tokens: jax.Array,
        score_head: HeadLossFunction | None = None,
    ) -> Pipeline:
        opened = self.opened()
        from graphtrain.torch_frontend import pipeline_parts

        return pipeline_parts.imported_pipeline(opened, stages, score, keys, tokens)

    def split_for_pipeline(self, parameters: Tree) -> Tree:
        opened = self.opened()
        from graphtrain.torch_frontend import pipeline_parts

        return pipeline_parts.parts_of(opened).split_parameters(parameters)

    def merge_gradients(self, gradients: Tree, parameters: Tree) -> Tree:
        opened = self.opened()
        from graphtrain.torch_frontend import pipeline_parts

        return pipeline_parts.parts_of(opened).merge_gradients(gradients, parameters)

    def cached_layers(self) -> dict[str, CachedLayer]:
        opened = self.opened()
        from graphtrain.torch_frontend import decode

        return decode.cached_layers(opened)

    def decode_step(
        self,
        parameters: Tree,
        kv_cache: Tree,
        tokens: jax.Array,
        rows: CacheRows,
        last: jax.Array | None = None,
        read: LogitsReader | None = None,
    ) -> tuple[Any, Tree]:
        opened = self.opened()
        from graphtrain.torch_frontend import decode

        return decode.decode_step(opened, parameters, kv_cache, tokens, rows, last, read)

    @property
    def has_dropout(self) -> bool:
        return True  # the module may have some

    def key_ingredients(self) -> dict[str, Any]:
        return key_ingredients(self.settings)
