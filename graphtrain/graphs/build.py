"""Graphs of a program as pure functions: init, train and evaluate.

A training state is {"parameters", "optimizer", "step", "key"}, all named arrays; parameters are the
trained ones. Frozen weights, the base of an adapter or DPO's reference model, are an input of their
own, "frozen". Values that change often but not the code, such as the learning rate, are inputs.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax

from graphtrain.config.resolve import ResolvedProgram
from graphtrain.config.schema import TorchModel, is_imported
from graphtrain.graphs.checksums import checksum_graph, copy_graph
from graphtrain.graphs.deferred_reduction import accumulate_then_reduce, can_defer
from graphtrain.graphs.dump import ArrayDump
from graphtrain.graphs.expert_bias import without_loads
from graphtrain.graphs.gathered_updates import gather_layers
from graphtrain.graphs.gradient_sums import GradientSums, written_in_place
from graphtrain.graphs.group_norms import group_norm_names, group_norms
from graphtrain.graphs.loss_scale import (
    initial_scale,
    loss_scale,
    scale_metrics,
    scale_specs,
    unless_overflow,
    unscaled,
)
from graphtrain.graphs.names import CHECKSUMS, COPY_STATE, DUMP, EVALUATE_AVERAGED
from graphtrain.graphs.objectives import (
    answer_log_probs,
    key_implementation,
    metric_names,
    reference_log_probs,
    step_key,
    token_losses,
    training_objective,
)
from graphtrain.graphs.open_model import open_language_model
from graphtrain.graphs.optimizer import make_optimizer, moment_specs, pack, unpack
from graphtrain.graphs.pipelined import pipelined_gradients, pipelined_loss
from graphtrain.graphs.preference import pair_count, pair_mask
from graphtrain.graphs.schedule_free import gradient_point
from graphtrain.graphs.serving import serving_graph
from graphtrain.graphs.spikes import limit_specs, spike_metrics, unless_spike
from graphtrain.graphs.targets_ahead import with_targets_ahead
from graphtrain.graphs.user_code_of_parts import check_user_code_of_parts
from graphtrain.graphs.weight_specs import frozen_specs, trained_specs
from graphtrain.models.attention.ring_order import to_ring_order
from graphtrain.models.attention.segment_mask import isolate_documents
from graphtrain.models.batch_images import with_images
from graphtrain.models.compute_dtype import check_compute_dtype
from graphtrain.models.head_gradient import use_head_first
from graphtrain.models.head_gradient_support import reduces_head_first
from graphtrain.models.lora.trainable import LORA_A
from graphtrain.models.loss import dpo_loss
from graphtrain.models.mlp_block_count import mlp_block_count
from graphtrain.models.mlp_blocks import use_mlp_blocks
from graphtrain.models.mlp_gradients import use_mlp_weights_first
from graphtrain.models.mlp_support import computes_weights_first
from graphtrain.models.optimizer_state import EMA
from graphtrain.models.optimizer_support import check_optimizer
from graphtrain.models.quantized_matmul import quantize_products
from graphtrain.models.updated_weights import gathered_by_layer
from lowering.graph import Graph
from lowering.tracing.constrain import constrain_tree, to_device_memory
from lowering.trees import Tree, flatten, unflatten
from sharding_rules.arrays import ArraySpec

_SCALAR = ArraySpec((), (), "float32", "activation")


def build_graph(program: ResolvedProgram, name: str) -> Graph:
    """Build a graph of `names.graphs_for`.

    Raises:
        LoweringError: the target does not compute in the model's dtype, or not the optimizer.
        ConfigError: the program gives parts of arrays to the user's loss or optimizer, and these
            compute something else of parts.
    """
    if (graph := serving_graph(program, name)) is not None:
        return graph
    check_compute_dtype(program)
    if name == "train":
        check_optimizer(program)
    if name in ("train", "evaluate"):
        check_user_code_of_parts(program)
    makers = {
        "init": _init,
        "train": _train,
        "evaluate": _evaluate,
        EVALUATE_AVERAGED: _evaluate_averaged,
        DUMP: _dump,
        COPY_STATE: _copy_state,
        CHECKSUMS: _checksums,
    }
    return makers[name](program)


def _copy_state(program: ResolvedProgram) -> Graph:
    return copy_graph(state_specs_of(program))


def _checksums(program: ResolvedProgram) -> Graph:
    return checksum_graph(state_specs_of(program), program.rules, program.mesh)


def _init(program: ResolvedProgram) -> Graph:
    stages = program.stages

    def init(seed: jax.Array) -> Tree:
        weights_key, dropout_key = jax.random.split(
            jax.random.key(seed, impl=key_implementation(program))
        )
        parameters = _initialise(program, weights_key)
        if stages is not None:
            model = open_language_model(program.model)
            parameters = model.to_pipeline_layout(parameters, stages)
        return {
            "state": {
                "parameters": parameters,
                "optimizer": pack(_optimizer(program).init(parameters)),
                "step": jnp.zeros((), jnp.int32),
                "key": jax.random.key_data(dropout_key),
                **initial_scale(program),
            }
        }

    seed = ArraySpec((), (), "uint32", "activation")
    outputs = {"state": state_specs_of(program)}
    return Graph("init", init, {"seed": seed}, outputs, runs_once=True)


def _initialise(program: ResolvedProgram, key: jax.Array) -> Tree:
    """Return newly initialized trainable parameters.

    LoRA factors are initialized as in PEFT, so that their product is zero. Arrays that are trained
    in full beside LoRA are zeros until the run loads its initial weights.

    Source: PEFT's LoraLayer.reset_lora_parameters, https://github.com/huggingface/peft
    """
    if program.adapter is None:
        return open_language_model(program.model).initialize(key)
    model = open_language_model(program.model)
    specs = flatten(model.trained_specs(program.settings))

    def initial_value(path: str, index: int) -> jax.Array:
        spec = specs[path]
        if not path.endswith(f"/{LORA_A}"):
            return jnp.zeros(spec.shape)
        bound = model.lora_inputs(spec) ** -0.5  # Kaiming uniform with a = sqrt(5)
        array_key = jax.random.fold_in(key, index)
        return jax.random.uniform(array_key, spec.shape, minval=-bound, maxval=bound)

    return unflatten({path: initial_value(path, index) for index, path in enumerate(sorted(specs))})


def _dump(program: ResolvedProgram) -> Graph:
    """Return the training step that also returns the arrays of program.dump."""
    train = _train(program)
    dump = ArrayDump.of(program, train.inputs)
    outputs = {**train.outputs, "arrays": dump.outputs}
    step = _train(program, dump).step
    return replace(train, name=DUMP, step=step, outputs=outputs, facts={DUMP: dump.facts})


def _train(program: ResolvedProgram, dump: ArrayDump | None = None) -> Graph:
    optimizer = _optimizer(program)
    specs = trained_specs(program)
    template = jax.eval_shape(optimizer.init, _shapes(specs))
    state_specs, frozen_input = state_specs_of(program), _frozen_input(program)
    norms = group_norm_names(program.optimizer, specs)
    names = *metric_names(program), *norms, "grad_norm", "targets"
    by_layer = gathered_by_layer(program, flatten(specs))

    def step(
        state: Tree,
        frozen: Tree | None,
        batch: Tree,
        learning_rate: jax.Array,
        limits: Tree | None = None,
    ) -> Tree:
        point, arrays = _at_gradient_point(program, state, state_specs), {}
        if dump is None:
            gradients, metrics = accumulate_gradients(program, point, batch, frozen)
        else:
            with quantize_products(program.settings.precision):
                gradients, metrics, arrays = dump.gradients(point, batch, frozen)
            arrays = {"arrays": arrays}
        # Update in the sharding of the optimizer state (ZeRO-1); only the result is resharded.
        gradients = constrain_tree(gradients, specs, "optimizer")
        parameters = constrain_tree(state["parameters"], specs, "optimizer")
        moments = to_device_memory(state["optimizer"], state_specs["optimizer"])
        loads, gradients = gradients, without_loads(gradients, specs)
        updates, optimizer_state = optimizer.update(
            gradients,
            unpack(moments, template),
            parameters,
            learning_rate=learning_rate,
            loads=loads,
        )
        new_state = {
            "parameters": optax.apply_updates(parameters, updates),
            "optimizer": pack(optimizer_state),
            "step": state["step"] + 1,
            "key": state["key"],
        }
        metrics = {
            **metrics,
            **group_norms(program.optimizer, parameters, updates),
            "grad_norm": optax.tree.norm(gradients),
            "targets": batch["weights"].sum(),
        }
        before = {**state, "parameters": parameters, "optimizer": moments}
        outputs = unless_overflow(program, before, {"state": new_state, "metrics": metrics})
        outputs = unless_spike(before, outputs, limits)
        weights = gather_layers(state["parameters"], outputs["state"]["parameters"], by_layer)
        return {**outputs, "state": {**outputs["state"], "parameters": weights}, **arrays}

    limits = limit_specs(program)
    return Graph(
        "train",
        _with_inputs(step, has_frozen=bool(frozen_input), has_limits=bool(limits)),
        {
            "state": state_specs,
            **frozen_input,
            "batch": _batch(program, train=True),
            "learning_rate": _SCALAR,
            **limits,
        },
        {
            "state": state_specs,
            "metrics": dict.fromkeys(
                (*names, *scale_metrics(program), *spike_metrics(program)), _SCALAR
            ),
        },
        donated=("state",),
    )


def _with_inputs(step: Callable[..., Tree], *, has_frozen: bool, has_limits: bool) -> Any:
    """Return a training step with exactly the inputs of its program.

    Input names of a compiled program are the function's parameters, so that "frozen" must not be
    one of them if all weights are trained.
    """

    def train(state: Tree, frozen: Tree, batch: Tree, learning_rate: jax.Array) -> Tree:
        return step(state, frozen, batch, learning_rate)

    def train_all(state: Tree, batch: Tree, learning_rate: jax.Array) -> Tree:
        return step(state, None, batch, learning_rate)

    def train_all_within(state: Tree, batch: Tree, learning_rate: jax.Array, limits: Tree) -> Tree:
        return step(state, None, batch, learning_rate, limits)

    if has_limits:
        return step if has_frozen else train_all_within
    return train if has_frozen else train_all


def _at_gradient_point(program: ResolvedProgram, state: Tree, specs: Tree) -> Tree:
    """Return the state with the weights at which the gradient is taken."""
    if program.optimizer.kind != "schedule_free":
        return state
    parameters = constrain_tree(state["parameters"], specs["parameters"], "optimizer")
    part = state["optimizer"]["schedule_free"]["z"]
    z = to_device_memory(part, specs["optimizer"]["schedule_free"]["z"])
    at = gradient_point(program.optimizer, parameters, z)
    # Where ZeRO splits z further than the weights, gather once and not in each pass of a layer.
    return state | {"parameters": constrain_tree(at, specs["parameters"], "parameter")}


def accumulate_gradients(
    program: ResolvedProgram, state: Tree, batch: Tree, frozen: Tree | None = None
) -> tuple[Tree, Tree]:
    """Return gradients and metrics of all microbatches; each target, or pair, weighs the same.

    Args:
        program: Settings.
        state: Training state.
        batch: Arrays (microbatches, batch, seq).
        frozen: Frozen weights, if any.
    """
    blocks = use_mlp_blocks(mlp_block_count(program))
    mlp_first = use_mlp_weights_first(computes_weights_first(program))
    head_first = use_head_first(reduces_head_first(program))
    with quantize_products(program.settings.precision), blocks, mlp_first, head_first:
        gradients, metrics = _scaled_gradients(program, state, batch, frozen)
    return unscaled(gradients, loss_scale(program, state)), metrics


def _scaled_gradients(
    program: ResolvedProgram, state: Tree, batch: Tree, frozen: Tree | None
) -> tuple[Tree, Tree]:
    """Return gradients, multiplied by the loss scale if there is one, and metrics."""
    batch = to_ring_order(with_targets_ahead(program, batch))
    microbatches = program.batch.microbatches
    parameters, specs = state["parameters"], trained_specs(program)
    if (stages := program.stages) is not None:
        key = step_key(program, state)
        gradients, metrics = pipelined_gradients(program, stages, state, frozen, batch, key)
        return constrain_tree(gradients, specs, "optimizer"), metrics
    objective = training_objective(program, state, frozen, batch)
    if program.batch.gradient_reduction == "per_step" and can_defer():
        return accumulate_then_reduce(objective, parameters, specs, batch, microbatches)

    sums = GradientSums(specs, "optimizer", written_in_place(program, specs))

    if microbatches == 1:
        only = jax.tree.map(lambda array: array[0], batch)
        return sums.first(lambda parameters: objective(parameters, only, 0), parameters)

    def add(earlier: Any, indexed: tuple[Tree, jax.Array]) -> tuple[Any, None]:
        return sums.add(lambda weights: objective(weights, *indexed), parameters, earlier), None

    zeros = constrain_tree(jax.tree.map(jnp.zeros_like, parameters), specs, "optimizer")
    zero_metrics = {name: jnp.zeros(()) for name in metric_names(program)}
    total, _ = jax.lax.scan(add, (zeros, zero_metrics), (batch, jnp.arange(microbatches)))
    return total


def _evaluate(program: ResolvedProgram) -> Graph:
    stages = program.stages

    def loss_of(parameters: Tree, frozen: Tree | None, batch: Tree) -> tuple[jax.Array, jax.Array]:
        """Return the sum of the loss and the number of targets; for DPO, the number of pairs."""
        batch = to_ring_order(batch)
        weights = batch["weights"]
        if stages is not None:
            count = pair_count(weights) if program.loss.kind == "dpo" else weights.sum()
            return pipelined_loss(program, stages, parameters, frozen, batch), count
        model = open_language_model(program.model)
        combined = model.apply_lora(program.settings, parameters, frozen)
        with isolate_documents(batch.get("documents")), with_images(batch.get("images")):
            if program.loss.kind == "cross_entropy":
                return token_losses(program, combined, batch)[0][1], weights.sum()
            log_probs, _ = answer_log_probs(program, combined, batch)
        log_ratio = log_probs - reference_log_probs(program, frozen, batch)
        return dpo_loss(log_ratio, pair_mask(weights), program.loss)["loss"], pair_count(weights)

    def evaluate(parameters: Tree, frozen: Tree | None, batch: Tree) -> Tree:
        loss, targets = loss_of(parameters, frozen, batch)
        return {"metrics": {"loss_sum": loss, "targets": targets}}

    def evaluate_all(parameters: Tree, batch: Tree) -> Tree:
        return evaluate(parameters, None, batch)

    frozen_input = _frozen_input(program)
    return Graph(
        "evaluate",
        evaluate if frozen_input else evaluate_all,
        {
            "parameters": trained_specs(program),
            **frozen_input,
            "batch": _batch(program, train=False),
        },
        {"metrics": {"loss_sum": _SCALAR, "targets": _SCALAR}},
    )


def _evaluate_averaged(program: ResolvedProgram) -> Graph:
    """Build the evaluation of the moving average, which is sharded as optimizer state is."""
    plain, specs = _evaluate(program), trained_specs(program)
    average = {"optimizer": {EMA: state_specs_of(program)["optimizer"][EMA]}}

    def parameters(state: Tree) -> Tree:
        stored = to_device_memory(state["optimizer"][EMA], average["optimizer"][EMA])
        return constrain_tree(stored, specs, "parameter")

    def evaluate(state: Tree, frozen: Tree, batch: Tree) -> Tree:
        return plain.step(parameters(state), frozen, batch)

    def evaluate_all(state: Tree, batch: Tree) -> Tree:
        return plain.step(parameters(state), batch)

    inputs = {name: specs for name, specs in plain.inputs.items() if name != "parameters"}
    return Graph(
        EVALUATE_AVERAGED,
        evaluate if "frozen" in inputs else evaluate_all,
        {"state": average, **inputs},
        plain.outputs,
    )


def _frozen_input(program: ResolvedProgram) -> dict[str, Tree]:
    """Return the input of frozen weights; there is none if all weights are trained."""
    specs = frozen_specs(program)
    return {} if specs is None else {"frozen": specs}


def state_specs_of(program: ResolvedProgram) -> Tree:
    """Return the ArraySpecs of the training state."""
    parameters = trained_specs(program)
    template = jax.eval_shape(_optimizer(program).init, _shapes(parameters))
    return {
        "parameters": parameters,
        "optimizer": moment_specs(template, flatten(parameters), program.optimizer),
        "step": ArraySpec((), (), "int32", "optimizer"),
        "key": ArraySpec(_key_shape(program), (None,), "uint32", "optimizer"),
        **scale_specs(program),
    }


def _key_shape(program: ResolvedProgram) -> tuple[int, ...]:
    key = jax.eval_shape(
        lambda: jax.random.key_data(jax.random.key(0, impl=key_implementation(program)))
    )
    return key.shape


def _optimizer(program: ResolvedProgram) -> optax.GradientTransformationExtraArgs:
    model, specs = program.settings.model, trained_specs(program)
    mixture = None if is_imported(model) else model.moe
    rate = (mixture and mixture.bias_update_rate) or 0.0
    return make_optimizer(program.optimizer, specs, program.model.dtype, rate)


def _shapes(specs: Tree) -> Tree:
    return jax.tree.map(lambda spec: jax.ShapeDtypeStruct(spec.shape, spec.dtype), specs)


def _batch(program: ResolvedProgram, *, train: bool) -> Tree:
    """Return the ArraySpecs of a batch: one microbatch, with a leading axis of them in training."""
    batch = program.batch
    shape: tuple[int, ...] = (batch.microbatch_rows, batch.seq_len)
    axes: tuple[str, ...] = ("batch", "seq")
    if train:
        shape, axes = (batch.microbatches, *shape), ("microbatch", *axes)
    dtypes = {"tokens": "int32", "targets": "int32", "weights": "float32"}
    if not batch.cross_document_attention:
        dtypes["documents"] = "int32"
    specs = {name: ArraySpec(shape, axes, dtype, "activation") for name, dtype in dtypes.items()}
    return specs | _image_spec(program, shape[:-1], axes[:-1])


def _image_spec(
    program: ResolvedProgram, shape: tuple[int, ...], axes: tuple[str, ...]
) -> dict[str, ArraySpec]:
    """Return the spec of a batch's images; none if the model takes none."""
    model = program.settings.model
    if not (isinstance(model, TorchModel) and model.images):
        return {}
    assert model.image_size is not None
    shape = (*shape, model.images, *model.image_size, 3)
    return {"images": ArraySpec(shape, (*axes, *(None,) * 4), "uint8", "activation")}
