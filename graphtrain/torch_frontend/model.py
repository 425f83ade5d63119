"""Imported PyTorch models as pure functions on nested dictionaries of arrays.

The functions have the signatures of the native decoder's.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import math
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import torch
from jax.extend.core import Literal

from graphtrain.config.hf_config import read_config, with_vocab_size
from graphtrain.config.user_code import add_to_path
from graphtrain.errors import ImportedModelError, StrictFrontEndRequired
from graphtrain.models.attention.ring_order import positions
from graphtrain.models.batch_images import batch_images, with_images
from graphtrain.models.layer_terms import NO_TERMS, LayerTerms
from graphtrain.models.quantized_matmul import quantization_of
from graphtrain.models.vocab_padding import mask_padding
from graphtrain.torch_frontend import private_torch
from graphtrain.torch_frontend.adapted_parameter import cast_adapted, is_adapted
from graphtrain.torch_frontend.attention import feature_needing_native_attention
from graphtrain.torch_frontend.axes import NamedAxes, name_axes
from graphtrain.torch_frontend.blocks import (
    Stack,
    UnrolledBlocks,
    cut_after,
    find_stacks,
    list_lengths,
    unroll,
)
from graphtrain.torch_frontend.bridge import Tensor, TraceEnvironment, call_module
from graphtrain.torch_frontend.image_text import ImageInputs
from graphtrain.torch_frontend.joint import find_writes_through_views, trace_joint
from graphtrain.torch_frontend.load_balancing import LoadBalancing
from graphtrain.torch_frontend.meta_module import (
    ORTHOGONAL,
    InitOperation,
    MetaModule,
    build_on_meta,
)
from graphtrain.torch_frontend.random_values import RandomValue
from graphtrain.torch_frontend.recorded_modules import record_modules
from graphtrain.torch_frontend.scan_blocks import BlocksDiffer, Scan, ScanHooks, scanning_blocks
from graphtrain.torch_frontend.silent_failures import user_code_error
from graphtrain.torch_frontend.source import find_module_file, split_name
from graphtrain.torch_frontend.strict import StrictEnvironment, StrictGraph
from lowering.tracing.constrain import constrain, in_shard_map
from lowering.tracing.deferred_gradient import DeferredGradient, attach_reductions
from lowering.trees import Tree, flatten, unflatten
from sharding_rules.arrays import ArraySpec
from sharding_rules.errors import ShardingError

if TYPE_CHECKING:
    from graphtrain.config.schema import TorchModel

_TOKENS = (2, 4)  # (batch, seq) of the trace that checks which blocks are identical

_opened: dict[str, OpenedModel] = {}


def open_model(model: TorchModel) -> OpenedModel:
    """Return the opened model of these settings; each is built once per process.

    Raises:
        ImportedModelError: the module cannot be built or traced.
    """
    key = json.dumps(asdict(model), sort_keys=True)
    if key not in _opened:
        _opened[key] = open_uncached(model)
    return _opened[key]


def open_uncached(model: TorchModel) -> OpenedModel:
    """Build and open the model without the cache of open_model, so that the caller may change it.

    Raises:
        ImportedModelError: the module cannot be built or traced.
    """
    meta = build_on_meta(factory(model))
    _check_parameters(meta, allow_frozen=model.hf is not None)
    assert model.vocab is not None
    axes, balance = (
        name_axes(meta.module, model.vocab, model.axes),
        LoadBalancing.from_module(meta.module),
    )
    inputs = ImageInputs.of(model, meta.module)
    opened = OpenedModel(model, meta, (), axes, balance, inputs=inputs)
    if model.front_end == "strict":
        return _open_strict(opened, 'program.model.front_end = "strict"')
    if (
        model.front_end == "auto"
        and not model.images
        and (writes := find_writes_through_views(meta, _TOKENS, opened.call))
    ):
        return _open_strict(opened, writes[0])
    try:
        return _open_traced(opened)
    except StrictFrontEndRequired as error:
        if model.front_end == "trace" or model.images:
            raise
        return _open_strict(opened, error.reason)


def _open_strict(opened: OpenedModel, reason: str) -> OpenedModel:
    """Return the model for the strict front end, which traces the module as one graph."""
    if opened.balance is not None:
        raise ImportedModelError(
            "output_router_logits adds a load-balancing loss, which the strict front end (used "
            f"because {reason}) does not support; set it to false in program.model.overrides"
        )
    block_lists = tuple(
        UnrolledBlocks(name, count, "the strict front end traces a module as one graph")
        for name, count in list_lengths(find_stacks(opened.meta.module)).items()
    )
    opened = replace(opened, block_lists=block_lists, strict=reason)
    return replace(opened, untrained=opened.check())


def _open_traced(opened: OpenedModel) -> OpenedModel:
    """Return the model for the trace front end; stacks whose blocks differ are unrolled."""
    block_lists = find_stacks(opened.meta.module)
    while True:
        opened = replace(opened, block_lists=tuple(block_lists))
        try:
            return _without_idle_blocks(replace(opened, untrained=opened.check()))
        except BlocksDiffer as error:
            parts = [unroll(error.stack, error.reason)]
            if opened.inputs is not None and error.read is not None:
                parts = cut_after(error.stack, error.read, error.reason)
            block_lists = [
                part
                for block_list in block_lists
                for part in (parts if block_list is error.stack else [block_list])
            ]


def _without_idle_blocks(opened: OpenedModel) -> OpenedModel:
    """Leave out lists of blocks whose parameters get no gradient, as those of a vision tower.

    Their parameters are constants, each by its own name; stages and caches need not know of them.
    """
    names = opened.parameter_names_by_path()
    untrained = {name for path in opened.untrained for name in names[path]}
    trained = opened.meta.parameters().keys() - untrained
    used = tuple(
        blocks
        for blocks in opened.block_lists
        if any(name.startswith(f"{blocks.name}.") for name in trained)
    )
    opened = replace(opened, block_lists=used)
    paths = opened.parameter_names_by_path()
    constant = (path for path, inside in paths.items() if untrained.issuperset(inside))
    return replace(opened, untrained=frozenset(constant))


def factory(model: TorchModel) -> Callable[[], torch.nn.Module]:
    """Return a function that builds the module, with real weights unless a device is set.

    Raises:
        ImportedModelError: the config or the factory cannot be read or imported.
    """
    if model.hf is not None:
        # It keeps the functions of torch.nn.init that it finds, so never those of a recorder.
        importlib.import_module("transformers.initialization")
        from graphtrain.torch_frontend.transformers_model import from_config

        config = read_config(model.hf, model.overrides)
        if model.vocab_padding and model.vocab:
            config = with_vocab_size(config, model.vocab)
        return lambda: from_config(config, with_images=bool(model.images))
    assert model.torch is not None
    name, function = split_name(model.torch)
    error_prefix = f'torch = "{model.torch}": '
    try:
        build_module = getattr(_import_module(name), function, None)
    except Exception as error:
        raise user_code_error(f"{error_prefix}importing {name}", error) from error
    if not callable(build_module):
        raise ImportedModelError(f"{error_prefix}{name} has no function {function}")

    def call() -> torch.nn.Module:
        try:
            return build_module(**model.overrides)  # pyright: ignore[reportReturnType]  (build_on_meta checks it)
        except Exception as error:
            overrides_text = f" (overrides = {dict(model.overrides)})" if model.overrides else ""
            raise user_code_error(f"{error_prefix}{function}{overrides_text}", error) from error

    return call


def _import_module(name: str) -> Any:
    path = find_module_file(name)
    if not name.endswith(".py"):
        return importlib.import_module(name)
    stem = path.stem
    if (loaded := sys.modules.get(stem)) and getattr(loaded, "__file__", None) == str(path):
        return loaded
    add_to_path(Path.cwd())
    spec = importlib.util.spec_from_file_location(stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[stem] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[stem]  # as import does
        raise
    return module


def _check_parameters(meta: MetaModule, *, allow_frozen: bool) -> None:
    if not any(parameter.requires_grad for parameter in meta.parameters().values()):
        raise ImportedModelError(f"{type(meta.module).__name__} has no parameters to train")
    for name, parameter in meta.parameters().items():
        frozen = not parameter.requires_grad and not allow_frozen
        if frozen or not parameter.is_floating_point():
            raise ImportedModelError(
                f"parameter {name} does not require a gradient or is not floating point, but all "
                "parameters of an imported model are trained: register it as a buffer, or set "
                "requires_grad = True"
            )


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

    def check(self) -> frozenset[str]:
        """Trace the module once, to check that it can be traced and that stacked blocks agree.

        Returns:
            Paths of the arrays that get no gradient, such as an indexer of sparse attention.

        Raises:
            BlocksDiffer: blocks of a stack differ.
            ImportedModelError: the module cannot be traced.
        """
        arrays = {
            path: jax.ShapeDtypeStruct(spec.shape, spec.dtype)
            for path, spec in self.specs().items()
        }
        tokens, images = jax.ShapeDtypeStruct(_TOKENS, jnp.int32), self._image_shapes(_TOKENS[0])
        key = jax.eval_shape(lambda: jax.random.key(0))

        def total(
            arrays: dict[str, Any], tokens: jax.Array, images: jax.Array | None, key: jax.Array
        ) -> jax.Array:
            with with_images(images):
                return self._logits(self.cast_parameters(arrays), tokens, key, verify=True).sum()

        traced = jax.make_jaxpr(jax.grad(total))(arrays, tokens, images, key).jaxpr
        zeros = {
            out
            for equation in traced.eqns
            if equation.primitive.name == "broadcast_in_dim"
            for out in equation.outvars
            if isinstance(equation.invars[0], Literal) and equation.invars[0].val == 0
        }
        paths = sorted(arrays)  # the order of a dict's leaves
        return frozenset(
            path for path, out in zip(paths, traced.outvars, strict=True) if out in zeros
        )

    def _image_shapes(self, rows: int) -> jax.ShapeDtypeStruct | None:
        """Return shape and dtype of the images of so many rows; None if the model takes none."""
        if self.inputs is None:
            return None
        layout = self.inputs.layout
        shape = (rows, layout.images, layout.height, layout.width, 3)
        return jax.ShapeDtypeStruct(shape, jnp.uint8)

    def initialize(self, key: jax.Array) -> Tree:
        """Return new parameters, initialised as the module's constructor initialises its own.

        Raises:
            ImportedModelError: the initial values of a parameter are unknown.
        """
        stored = self.parameter_names_by_path()
        keys = jax.random.split(key, len(stored))
        parameters = self.meta.parameters()
        arrays = {}
        for (path, names), array_key in zip(sorted(stored.items()), keys, strict=True):
            shape = tuple(parameters[names[0]].shape)
            operations = [self._initializer(name) for name in names]
            if not self.is_stacked(path):
                arrays[path] = _initial_array(operations[0], shape, array_key)
                continue
            rows = jax.random.split(array_key, len(names))
            if all(
                _same_operations(row_operations, operations[0]) for row_operations in operations
            ):
                arrays[path] = jax.vmap(
                    lambda row, init=operations[0], s=shape: _initial_array(init, s, row)
                )(rows)
            else:
                row_arrays = [
                    _initial_array(init, shape, row)
                    for init, row in zip(operations, rows, strict=True)
                ]
                arrays[path] = jnp.stack(row_arrays)
        return unflatten(arrays)

    def _initializer(self, name: str) -> tuple[InitOperation, ...]:
        if operations := self.meta.initializers[name]:
            return operations
        raise ImportedModelError(
            f"the initial values of {name} are unknown: its constructor does not fill it by "
            "torch.nn.init or an in-place method of tensors; fill the parameter so, not a tensor "
            "that becomes one (for example by torch.nn.init.normal_), and the init graph can "
            "repeat it"
        )

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
            return self._logits(arrays, tokens, dropout_key), NO_TERMS
        self._check_balanced()
        balance, statistics = self.balance, []

        def run_blocks(scan: Scan) -> jax.Array:
            hidden = scan.run()
            statistics.extend(scan.router_statistics)
            return hidden

        hooks = ScanHooks(run_blocks=run_blocks, balance=balance)
        logits = self.finish_logits(self.run(arrays, tokens, dropout_key, hooks), tokens)
        return logits, balance.terms(statistics)

    def _check_balanced(self) -> None:
        """Refuse programs that would balance experts over fewer tokens than the module does."""
        module = self.meta.module
        outside = [inner for name, inner in module.named_modules() if not self.is_in_scan(name)]
        assert self.balance is not None
        if any(isinstance(inner, self.balance.router) for inner in outside):
            raise ImportedModelError(
                "output_router_logits adds a load-balancing loss, which requires that blocks "
                "with a router run in scans; `graphtrain plan` reports how these differ. Or set it "
                "to false in program.model.overrides"
            )
        if in_shard_map():
            raise ShardingError(
                'batch.gradient_reduction = "per_step" computes the loss of one replica\'s tokens '
                "at a time, but "
                "output_router_logits balances experts over the tokens of all replicas; use "
                'batch.gradient_reduction = "per_microbatch"'
            )

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

    def _logits(
        self,
        arrays: dict[str, jax.Array],
        tokens: jax.Array,
        key: jax.Array | None,
        verify: bool = False,
    ) -> jax.Array:
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
        self._check_length(tokens.shape[1])
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
                kwargs = environment.wrap(self._position_kwargs(tokens.shape[1]))
                if inputs is None or images is None:
                    return self._module_logits(Tensor(tokens, environment), kwargs)
                kwargs = inputs.keyword_arguments(
                    environment, tokens, images, tower_arguments, kwargs
                )
                return extract_logits(module(use_cache=False, **kwargs))

        out: Any = call_module(module, environment, unstacked, self.meta.buffers, key, run)
        if not environment.native_attention_calls and (
            feature := self._feature_needing_native_attention()
        ):
            advice = "call scaled_dot_product_attention with is_causal = True"
            if settings.hf is not None:
                advice = "use the native decoder (graphtrain convert hf-to-graphtrain)"
            raise ImportedModelError(
                f"{feature} requires graphtrain's attention, but {type(module).__name__} computes "
                f"its own or applies dropout to it; {advice}"
            )
        return out

    def finish_logits(self, out: Any, tokens: jax.Array) -> jax.Array:
        """Return the module's output for these tokens as float32 logits, placed by the rules.

        Raises:
            ImportedModelError: they are not (batch, seq, vocab).
        """
        self._check_logits(out, tokens.shape)
        return self._masked(out.jax())

    def _masked(self, logits: jax.Array) -> jax.Array:
        """Return logits in float32; those of rows that pad the vocabulary are never predicted."""
        masked = mask_padding(logits.astype(jnp.float32), self.settings.vocab_tokens)
        return constrain(masked, "batch", "seq", "vocab")

    def _strict_logits(
        self, arrays: dict[str, jax.Array], tokens: jax.Array, key: jax.Array | None
    ) -> jax.Array:
        if feature := self._feature_needing_native_attention():
            raise ImportedModelError(
                f"{feature} requires graphtrain's attention, but the strict front end (used "
                f"because {self.strict}) computes PyTorch's own; turn one of them off"
            )
        if quantization_of() is not None:
            raise ImportedModelError(
                "program.precision.compute: the strict front end (used because "
                f'{self.strict}) computes no product in fp8 or int8; set it to "bfloat16"'
            )
        self._check_length(tokens.shape[1])
        settings, training = self.settings, key is not None
        joint = trace_joint(self.meta, settings.dtype, tokens.shape, self.call, training=training)
        environment = StrictEnvironment(settings.dtype, settings.vocab)
        graph = StrictGraph(joint, self.meta.buffers, environment, self.embed, settings.remat)
        specs = self.specs()
        by_name = {
            names[0]: arrays[path]
            if specs[path].role == "constant"
            else arrays[path].astype(settings.dtype)
            for path, names in self.parameter_names_by_path().items()
        }
        out = graph.logits(by_name, tokens, jax.random.key(0) if key is None else key)
        return self._masked(out)

    def _feature_needing_native_attention(self) -> str | None:
        """Return the requested feature that only graphtrain's attention supports, or None."""
        forced = self.settings.attention == "flash"
        return feature_needing_native_attention() or (
            'program.model.attention = "flash"' if forced else None
        )

    def call(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the module's logits of token ids (batch, seq).

        Raises:
            ImportedModelError: they are not (batch, seq, vocab).
        """
        logits = self._module_logits(tokens, {})
        self._check_logits(logits, tuple(tokens.shape))
        return logits

    def _module_logits(self, tokens: torch.Tensor, position_kwargs: dict[str, Any]) -> torch.Tensor:
        """Return the module's logits of tokens; `position_kwargs` may be empty."""
        if self.settings.hf is not None:
            position_kwargs = {"use_cache": False} | position_kwargs
            return extract_logits(self.meta.module(input_ids=tokens, **position_kwargs))
        return extract_logits(self.meta.module(tokens, **position_kwargs))

    def _check_logits(self, logits: torch.Tensor, tokens: tuple[int, ...]) -> None:
        expected = (*tokens, self.settings.vocab)
        if tuple(logits.shape) != expected:
            raise ImportedModelError(
                f"the module returns logits of shape {tuple(logits.shape)} for tokens of shape "
                f"{tuple(tokens)}; with program.model.vocab = {expected[-1]} they should be "
                f"{expected}"
            )

    @property
    def embed(self) -> int:
        """Width of the residual stream; 0 if the module has no token embedding."""
        for name, parameter in self.meta.parameters().items():
            axes = self.axes[name].axes
            if set(axes) == {"vocab", "embed"}:
                return parameter.shape[axes.index("embed")]
        return 0

    def _position_kwargs(self, length: int) -> dict[str, jax.Array]:
        """Return position_ids if tokens are not at positions 0, 1, 2, ...; else nothing.

        Raises:
            ImportedModelError: the module does not accept position_ids.
        """
        feature = feature_needing_native_attention()
        if feature is None:
            return {}
        if "position_ids" not in inspect.signature(self.meta.module.forward).parameters:
            name = type(self.meta.module).__name__
            if getattr(self.meta.module, "_is_stateful", False):  # as transformers marks Mamba
                raise ImportedModelError(
                    f"{feature} is implemented for attention alone, but {name} carries a state "
                    "from token to token (a state space model or another recurrence)"
                )
            raise ImportedModelError(
                f"{feature} requires a module whose forward accepts position_ids, but that of "
                f"{name} does not"
            )
        position_ids = positions(length)
        return {"position_ids": position_ids if position_ids.ndim == 2 else position_ids[None]}

    def _check_length(self, length: int) -> None:
        """Refuse sequences longer than a table of positions, which JAX would read out of bounds."""
        for name, parameter in self.meta.parameters().items():
            if "positions" in self.axes[name].axes:
                rows = parameter.shape[self.axes[name].axes.index("positions")]
                if length > rows:
                    raise ImportedModelError(
                        f"sequences of {length} tokens are longer than {name}, which has {rows} "
                        "rows; lower program.batch.seq_len (program.serve.context_length)"
                    )


def extract_logits(returned: Any) -> torch.Tensor:
    """Return the logits in a module's output: the tensor, .logits, or the first of a tuple.

    Raises:
        ImportedModelError: the output contains none.
    """
    if isinstance(returned, torch.Tensor):
        return returned
    logits = getattr(returned, "logits", None)
    if logits is None and isinstance(returned, tuple | list) and returned:
        logits = returned[0]
    if not isinstance(logits, torch.Tensor):
        raise ImportedModelError(
            f"the module returns {type(returned).__name__}; it should return logits (batch, seq, "
            "vocab), a tuple that begins with them, or an object with .logits"
        )
    return logits


def _initial_array(
    operations: tuple[InitOperation, ...], shape: tuple[int, ...], key: jax.Array
) -> jax.Array:
    """Return a float32 array that the operations initialise."""
    environment = TraceEnvironment()
    tensor = Tensor(jnp.zeros(shape, jnp.float32), environment)
    with (
        environment.override_property(prng=key),
        environment,
        torch.device("jax"),
        torch.no_grad(),
    ):
        for operation in operations:
            if operation.method == "copy_":
                (values,) = operation.arguments
                if isinstance(values, RandomValue):
                    values = values.compute().jax()  # pyright: ignore[reportAttributeAccessIssue]
                array = jnp.asarray(values, jnp.float32)
                same_size = array.size == math.prod(shape)
                filled = array.reshape(shape) if same_size else jnp.broadcast_to(array, shape)
                private_torch.set_array(tensor, filled)
            elif operation.method == ORTHOGONAL:
                draw = jax.nn.initializers.orthogonal(*operation.arguments)
                private_torch.set_array(tensor, draw(environment.get_and_rotate_prng_key(), shape))
            else:
                operation.apply(tensor)
    return tensor.jax()


def _same_operations(first: tuple[InitOperation, ...], second: tuple[InitOperation, ...]) -> bool:
    return repr(first) == repr(second)
