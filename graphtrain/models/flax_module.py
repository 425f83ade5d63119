"""Flax module of the user as a LanguageModel. Flax is imported by the functions that trace."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from graphtrain.errors import ConfigError
from graphtrain.models.layer_terms import NO_TERMS, LayerTerms
from graphtrain.models.protocol import ModuleFacts
from sharding_rules.arrays import ArraySpec
from sharding_rules.errors import ShardingError

if TYPE_CHECKING:
    import jax

    from graphtrain.config.resolve import ResolvedProgram
    from graphtrain.config.schema import FlaxModel, Program
    from graphtrain.models.attention.kv_cache import CacheRows
    from graphtrain.models.protocol import LogitsReader
    from lowering.trees import Tree

Keys = tuple[Any, ...]  # of a parameter in its module: attributes and indices


@dataclass(frozen=True)
class FlaxLanguageModel(ModuleFacts):
    """Module with these settings; see LanguageModel.

    Pipelines, generation and dropout are not supported.
    """

    settings: FlaxModel

    def specs(self) -> Tree:
        from lowering.trees import unflatten

        _, parameters = self._abstract()
        specs = {_path(keys): self._spec(_path(keys), one) for keys, one in parameters.items()}
        return unflatten(specs)

    def initialize(self, key: jax.Array) -> Tree:
        import jax.numpy as jnp

        from lowering.trees import unflatten

        _, parameters = self._split(self._build(key))
        values = {_path(keys): one.get_value() for keys, one in parameters.items()}
        return unflatten({path: value.astype(jnp.float32) for path, value in values.items()})

    def forward(
        self, parameters: Tree, tokens: jax.Array, *, dropout_key: jax.Array | None = None
    ) -> tuple[jax.Array, LayerTerms]:
        import jax.numpy as jnp
        from flax import nnx

        from lowering.trees import flatten

        structure, abstract = self._abstract()
        values = flatten(parameters)
        state = {keys: one.replace(values[_path(keys)]) for keys, one in abstract.items()}
        module = nnx.merge(structure, nnx.from_flat_state(state))
        try:
            logits = module(tokens)
        except Exception as error:
            raise self.settings.user_code.error(error) from error
        expected = (*tokens.shape, self.settings.vocab)
        if getattr(logits, "shape", None) != expected:
            returned = getattr(logits, "shape", type(logits).__name__)
            raise ConfigError(
                f"{self.settings.user_code}: the module returned {returned}; it must return logits "
                f"of shape {expected}"
            )
        return logits.astype(jnp.float32), NO_TERMS

    def _build(self, key: jax.Array) -> Any:
        """Return the module with new parameters."""
        import jax.numpy as jnp
        from flax import nnx

        settings = self.settings
        module = settings.user_code.call(
            vocab=settings.vocab,
            dtype=jnp.dtype(settings.dtype),
            rngs=nnx.Rngs(key),
            **settings.arguments,
        )
        if not isinstance(module, nnx.Module):
            kind = type(module).__name__
            raise ConfigError(f"{settings.user_code} returned {kind}, not a flax.nnx.Module")
        return module

    def _abstract(self) -> tuple[Any, dict[Keys, Any]]:
        """Return the structure of the module and its parameters as shapes."""
        import jax
        from flax import nnx

        return self._split(nnx.eval_shape(lambda: self._build(jax.random.key(0))))

    def _split(self, module: Any) -> tuple[Any, dict[Keys, Any]]:
        from flax import nnx

        structure, parameters, others = nnx.split(module, nnx.Param, ...)
        for keys, other in nnx.to_flat_state(others):
            raise ConfigError(
                f"{self.settings.user_code}: {_path(keys)} is a {type(other).__name__}; only "
                "parameters are supported, no dropout or batch statistics"
            )
        return structure, dict(nnx.to_flat_state(parameters))

    def _spec(self, path: str, parameter: Any) -> ArraySpec:
        array, axes = parameter.get_value(), parameter.get_metadata().get("axes")
        if axes is None and len(array.shape) > 1:
            raise ShardingError(
                f"{self.settings.user_code}: {path} has shape {array.shape} and no axes; name "
                'them, for example nnx.Param(..., axes=("embed", "mlp"))'
            )
        return ArraySpec(array.shape, tuple(axes or (None,) * len(array.shape)), "float32")

    # Weights are trained in full: the configuration refuses adapters and DPO

    def trained_specs(self, program: Program) -> Tree:
        return self.specs()

    def frozen_specs(self, program: ResolvedProgram) -> None:
        return None

    def apply_lora(
        self,
        program: Program,
        trained: Tree,
        frozen: Tree | None,
        key: jax.Array | None = None,
        layers: jax.Array | None = None,
    ) -> Tree:
        return trained

    def lora_inputs(self, spec: ArraySpec) -> NoReturn:
        raise AssertionError("program.adapter")

    def reference_parameters(self, program: Program, frozen: Tree | None) -> NoReturn:
        raise AssertionError('program.loss.kind = "dpo"')

    # Not supported

    def row_stages(self, stages: Any) -> NoReturn:
        raise self._no_pipeline()

    @property
    def has_like_layers(self) -> NoReturn:
        raise self._no_pipeline()

    def pipeline_specs(self, specs: Tree, stages: Any) -> NoReturn:
        raise self._no_pipeline()

    def to_pipeline_layout(self, parameters: Tree, stages: Any) -> NoReturn:
        raise self._no_pipeline()

    def pipeline(
        self,
        stages: Any,
        score: Any,
        keys: Any,
        term_weight: Any,
        tokens: jax.Array,
        score_head: Any = None,
    ) -> NoReturn:
        raise self._no_pipeline()

    def split_for_pipeline(self, parameters: Tree) -> NoReturn:
        raise self._no_pipeline()

    def merge_gradients(self, gradients: Tree, parameters: Tree) -> NoReturn:
        raise self._no_pipeline()

    def _no_pipeline(self) -> ShardingError:
        return ShardingError("program.model.flax has no pipeline stages; set mesh.stage = 1")

    def cached_layers(self) -> NoReturn:
        raise self._no_generation()

    def decode_step(
        self,
        parameters: Tree,
        kv_cache: Tree,
        tokens: jax.Array,
        rows: CacheRows,
        last: jax.Array | None = None,
        read: LogitsReader | None = None,
    ) -> NoReturn:
        raise self._no_generation()

    def _no_generation(self) -> ConfigError:
        return ConfigError("program.model.flax has no KV cache, which graphtrain generate needs")

    # Facts

    @property
    def has_dropout(self) -> bool:
        return False

    def key_ingredients(self) -> dict[str, Any]:
        return asdict(self.settings) | {"flax": self.settings.user_code.key_ingredients()}


def _path(keys: Keys) -> str:
    return "/".join(map(str, keys))
