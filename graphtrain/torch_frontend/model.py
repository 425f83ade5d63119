"""Imported PyTorch models as pure functions on nested dictionaries of arrays.

The functions have the signatures of the native decoder's.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import torch

from graphtrain.errors import ImportedModelError
from graphtrain.models.batch_images import batch_images
from graphtrain.models.layer_terms import NO_TERMS, LayerTerms
from graphtrain.models.vocab_padding import mask_padding
from graphtrain.torch_frontend.adapted_parameter import cast_adapted, is_adapted
from graphtrain.torch_frontend.attention import refuse_own_attention
from graphtrain.torch_frontend.axes import NamedAxes, embed_width
from graphtrain.torch_frontend.blocks import Stack, UnrolledBlocks
from graphtrain.torch_frontend.bridge import Tensor, TraceEnvironment
from graphtrain.torch_frontend.image_text import ImageInputs
from graphtrain.torch_frontend.initial_arrays import initial_arrays
from graphtrain.torch_frontend.load_balancing import LoadBalancing
from graphtrain.torch_frontend.meta_module import MetaModule
from graphtrain.torch_frontend.module_calls import (
    check_length,
    check_logits,
    extract_logits,
    module_logits,
    position_arguments,
)
from graphtrain.torch_frontend.recorded_modules import record_modules
from graphtrain.torch_frontend.scan import Scan, ScanHooks
from graphtrain.torch_frontend.scan_blocks import scanning_blocks
from graphtrain.torch_frontend.strict_logits import check_strict, strict_logits
from graphtrain.torch_frontend.traced_calls import call_module
from lowering.tracing.constrain import constrain
from lowering.tracing.deferred_gradient import DeferredGradient, attach_reductions
from lowering.trees import Tree, flatten, unflatten
from sharding_rules.arrays import ArraySpec

if TYPE_CHECKING:
    from graphtrain.config.schema import TorchModel


@dataclass(frozen=True, eq=False)  # hashed by identity, as a key of caches
class OpenedModel:
    """An imported module without weights, and the layout of its parameters as arrays."""

    settings: TorchModel
    meta: MetaModule
    block_lists: tuple[Stack | UnrolledBlocks, ...]  # the ModuleLists of blocks
    axes: dict[str, NamedAxes]  # array axes of every parameter, by name
    balance: LoadBalancing | None = None  # load-balancing loss of a mixture of experts
    strict: str = ""  # why the strict front end is used; empty: the module is traced by JAX
    untrained: frozenset[str] = frozenset()  # paths of arrays on which the logits do not depend
    inputs: ImageInputs | None = None  # with program.model.images

    @property
    def stacks(self) -> list[Stack]:
        """Lists of blocks that run as one scan."""
        return [blocks for blocks in self.block_lists if isinstance(blocks, Stack)]

    def parameter_names_by_path(self) -> dict[str, list[str]]:
        """Return the module's parameter names by the path of the array that stores them.

        An array of several names is stacked: each name is one row.
        """
        stacked_names = {
            stack.path(position, name): stack.parameter_names(position, name)
            for stack in self.stacks
            for position, names in enumerate(stack.parameters)
            for name in names
        }
        stacked = {name for names in stacked_names.values() for name in names}
        unstacked_names = [name for name in self.meta.parameters() if name not in stacked]
        return {name.replace(".", "/"): [name] for name in unstacked_names} | stacked_names

    def is_stacked(self, path: str) -> bool:
        """Return true if the array at this path stacks the parameters of several blocks."""
        return path.startswith(self._stack_prefixes)

    def is_in_scan(self, name: str) -> bool:
        """Return true for a module inside a block that a scan runs."""
        return any(
            name.startswith(f"{stack.name}.{number}.")
            for stack in self.stacks
            for number in stack.numbers
        )

    @cached_property
    def _stack_prefixes(self) -> tuple[str, ...]:
        """Prefixes of the paths of stacked parameters."""
        return tuple(
            f"{stack.module_path(position)}/"
            for stack in self.stacks
            for position in range(stack.period)
        )

    def specs(self) -> dict[str, ArraySpec]:
        """Return the spec of every parameter by path.

        Parameters are float32 whatever the dtype of the computation.

        Raises:
            ImportedModelError: program.model.axes names too many or too few axes for a parameter.
        """
        parameters = self.meta.parameters()
        specs = {}
        for path, names in self.parameter_names_by_path().items():
            shape, axes = tuple(parameters[names[0]].shape), self.axes[names[0]].axes
            if len(axes) != len(shape):
                raise ImportedModelError(
                    f"program.model.axes assigns axes {axes} to {names[0]} of shape {shape}; "
                    "name one axis for each dimension"
                )
            if self.is_stacked(path):
                shape, axes = (len(names), *shape), ("layers", *axes)
            # As in PyTorch, a parameter without a gradient is not updated, nor decayed.
            is_trained = parameters[names[0]].requires_grad and path not in self.untrained
            role = "parameter" if is_trained else "constant"
            specs[path] = ArraySpec(shape, axes, "float32", role)
        return specs

    def initialize(self, key: jax.Array) -> Tree:
        """Return new parameters, initialised as the module's constructor initialises its own.

        Raises:
            ImportedModelError: the initial values of a parameter are unknown.
        """
        names = self.parameter_names_by_path()
        return unflatten(initial_arrays(self.meta, names, self.is_stacked, key))

    @property
    def embed(self) -> int:
        """Width of the residual stream; 0 if the module has no token embedding."""
        return embed_width(self.meta.parameters(), self.axes)

    def forward(
        self, parameters: Tree, tokens: jax.Array, dropout_key: jax.Array | None
    ) -> tuple[jax.Array, LayerTerms]:
        """Return float32 logits, and the terms of the layers.

        Args:
            parameters: as from initialize.
            tokens: token ids, (batch, seq).
            dropout_key: None disables dropout.
        """
        arrays = self.cast_parameters(flatten(parameters))
        if self.balance is None:
            return self.logits(arrays, tokens, dropout_key), NO_TERMS
        self.balance.check(self.meta.module, self.is_in_scan)
        balance, statistics = self.balance, []

        def run_blocks(scan: Scan) -> jax.Array:
            hidden = scan.run()
            statistics.extend(scan.router_statistics)
            return hidden

        hooks = ScanHooks(run_blocks=run_blocks, balance=balance)
        logits = self.finish_logits(self.run(arrays, tokens, dropout_key, hooks), tokens)
        return logits, balance.terms(statistics)

    def cast_parameters(self, parameters: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """Cast parameters to the dtype of the computation, except token embeddings and LM heads.

        Gradients of embedding rows are summed in the dtype of the table, so it stays float32.
        Values that are not trained stay float32, as buffers do, and get no gradient.
        Stacked parameters with deferred gradients are cast inside the scan over the blocks.
        """
        specs, dtype = self.specs(), self.settings.dtype

        def cast(path: str, array: Any) -> Any:
            if is_adapted(array):
                return cast_adapted(array, dtype)
            if self.is_stacked(path) and isinstance(array, DeferredGradient):
                return array
            if specs[path].role == "constant":
                return jax.lax.stop_gradient(attach_reductions(array))
            array = attach_reductions(array)
            return array if "vocab" in specs[path].axes else array.astype(dtype)

        return {path: cast(path, array) for path, array in parameters.items()}

    def logits(
        self,
        arrays: dict[str, jax.Array],
        tokens: jax.Array,
        key: jax.Array | None,
        verify: bool = False,
    ) -> jax.Array:
        """Return the float32 logits of tokens; the arguments are those of `run`."""
        if self.strict:
            return self._strict_logits(arrays, tokens, key)
        return self.finish_logits(self.run(arrays, tokens, key, verify=verify), tokens)

    def run(
        self,
        arrays: dict[str, Any],
        tokens: jax.Array,
        key: jax.Array | None,
        through: ScanHooks | None = None,
        verify: bool = False,
    ) -> torch.Tensor:
        """Call the module and return its logits, in the dtype of the computation.

        Args:
            arrays: every parameter by path, as from cast_parameters; a ShapeDtypeStruct may replace
                one that does not affect the result.
            tokens: token ids, (batch, seq).
            key: for dropout; None disables dropout.
            through: what runs in place of the blocks; by default a scan over them.
            verify: whether to check that blocks of a stack compute the same.

        Raises:
            BlocksDiffer: blocks of a stack differ.
            ImportedModelError: the module cannot be traced, or the program requires graphtrain's
                attention and the module does not call it.
        """
        module, settings = self.meta.module, self.settings
        alone = bool(self.block_lists) and all(
            isinstance(blocks, Stack) and blocks.period == 1 for blocks in self.block_lists
        )
        unroll = 1 if alone else 2  # blocks in one iteration of a loop
        environment = TraceEnvironment(
            settings.dtype, settings.vocab, settings.remat, unroll, settings.attention
        )
        check_length(self.meta.parameters(), self.axes, tokens.shape[1])
        module.train(key is not None)
        unstacked = {
            names[0]: environment.array_or_zeros(arrays[path])
            for path, names in self.parameter_names_by_path().items()
            if not self.is_stacked(path)
        }
        inputs, images = self.inputs, batch_images()
        tower_arguments = inputs.tower_arguments(len(tokens)) if inputs else {}

        def run() -> torch.Tensor:
            with (
                scanning_blocks(
                    module, environment, self.block_lists, arrays, settings.remat, verify, through
                ),
                record_modules(module, self.block_lists, environment, tokens.shape),
                environment.module_names.follow(module),
            ):
                kwargs = environment.wrap(position_arguments(module, tokens.shape[1]))
                if inputs is None or images is None:
                    given = Tensor(tokens, environment)
                    return module_logits(module, given, kwargs, is_hf=settings.hf is not None)
                kwargs = inputs.keyword_arguments(
                    environment, tokens, images, tower_arguments, kwargs
                )
                return extract_logits(module(use_cache=False, **kwargs))

        out: Any = call_module(module, environment, unstacked, self.meta.buffers, key, run)
        if not environment.native_attention_calls:
            refuse_own_attention(module, settings.attention, is_hf=settings.hf is not None)
        return out

    def finish_logits(self, out: Any, tokens: jax.Array) -> jax.Array:
        """Return the module's output for these tokens as float32 logits, placed by the rules.

        Raises:
            ImportedModelError: they are not (batch, seq, vocab).
        """
        check_logits(out, tokens.shape, self.settings.vocab)
        return self._masked(out.jax())

    def _masked(self, logits: jax.Array) -> jax.Array:
        """Return logits in float32; those of rows that pad the vocabulary are never predicted."""
        masked = mask_padding(logits.astype(jnp.float32), self.settings.vocab_tokens)
        return constrain(masked, "batch", "seq", "vocab")

    def _strict_logits(
        self, arrays: dict[str, jax.Array], tokens: jax.Array, key: jax.Array | None
    ) -> jax.Array:
        check_strict(self.settings, self.strict)
        parameters, specs = self.meta.parameters(), self.specs()
        check_length(parameters, self.axes, tokens.shape[1])
        by_name = {
            names[0]: arrays[path]
            if specs[path].role == "constant"
            else arrays[path].astype(self.settings.dtype)
            for path, names in self.parameter_names_by_path().items()
        }
        out = strict_logits(self.meta, self.settings, self.call, by_name, tokens, key, self.embed)
        return self._masked(out)

    def call(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the module's logits of token ids (batch, seq).

        Raises:
            ImportedModelError: they are not (batch, seq, vocab).
        """
        logits = module_logits(self.meta.module, tokens, {}, is_hf=self.settings.hf is not None)
        check_logits(logits, tuple(tokens.shape), self.settings.vocab)
        return logits
