"""The optimizer of a kind, or of the user, with its state as named arrays."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from graphtrain.config.schema import Optimizer
from graphtrain.errors import ConfigError
from graphtrain.graphs.adafactor import scale_by_adafactor
from graphtrain.graphs.custom_optimizer import custom_optimizer
from graphtrain.graphs.expert_bias import update_expert_biases
from graphtrain.graphs.muon import scale_by_muon
from graphtrain.graphs.schedule_free import schedule_free
from graphtrain.graphs.soap import scale_by_soap
from graphtrain.graphs.stored_moments import with_bfloat16_moments, with_int8_moments
from graphtrain.models.matrices import STACK_AXES, is_hidden_matrix
from graphtrain.models.optimizer_state import EMA, optimizer_arrays
from lowering.trees import Tree, flatten, path_suffixes, unflatten
from sharding_rules.arrays import ArraySpec


def make_optimizer(
    optimizer: Optimizer, parameters: Tree, dtype: str = "float32", bias_update_rate: float = 0.0
) -> optax.GradientTransformationExtraArgs:
    """Build the optimizer of a kind, or of the user, after clipping and before weight decay.

    Its updates are added to the parameters. The learning rate is an argument of `update`.

    Args:
        optimizer: Settings.
        parameters: ArraySpecs of the parameters, which determine what is decayed, and what is a
            matrix.
        dtype: Dtype in which the model computes, for Muon's products.
        bias_update_rate: Update of the biases by which routers balance their experts.

    Raises:
        ConfigError: the user's optimizer cannot be made, or Muon or SOAP has no matrices.

    Source: Loshchilov and Hutter 2019, https://arxiv.org/abs/1711.05101
    """
    transforms: dict[str, optax.GradientTransformation] = {}
    if optimizer.clip_norm:
        transforms["clip"] = _clip(optimizer.clip_norm)
    decays = jax.tree.map(
        lambda spec: (
            spec.role == "parameter" and (optimizer.decay_mask == "all" or _is_matrix(spec))
        ),
        parameters,
    )
    if optimizer.kind == "schedule_free":
        transforms["schedule_free"] = schedule_free(optimizer, decays)
    else:
        directions = _directions(optimizer, parameters, dtype)
        if optimizer.has_moment_dtype and optimizer.moment_dtype != "float32":
            directions = {
                name: _with_stored_moments(one, optimizer, parameters)
                for name, one in directions.items()
            }
        transforms |= directions
        if optimizer.weight_decay and optimizer.custom is None:
            transforms["decay"] = optax.add_decayed_weights(optimizer.weight_decay, decays)
        transforms["rate"] = _descend()
    roles = {spec.role for spec in jax.tree.leaves(parameters)}
    if "constant" in roles:
        transforms["constants"] = _keep_constants(parameters)
    if "buffer" in roles:
        transforms["expert_biases"] = update_expert_biases(parameters, bias_update_rate)
    if optimizer.ema_decay is not None:
        transforms[EMA] = _average(optimizer.ema_decay)
    return optax.named_chain(*transforms.items())


def _with_stored_moments(
    direction: optax.GradientTransformation, optimizer: Optimizer, parameters: Tree
) -> optax.GradientTransformation:
    if optimizer.moment_dtype == "int8":
        return with_int8_moments(direction, flatten(parameters))
    return with_bfloat16_moments(direction)


def _directions(
    optimizer: Optimizer, parameters: Tree, dtype: str
) -> dict[str, optax.GradientTransformation]:
    """Return what turns gradients into directions, by its name in the state."""
    if (code := optimizer.user_code) is not None:
        return {"custom": custom_optimizer(code, optimizer.arguments), "steps": _count_steps()}
    kind, beta1, beta2 = optimizer.kind, optimizer.beta1, optimizer.beta2
    if kind == "lion":
        return {"lion": optax.scale_by_lion(beta1, beta2)}
    if kind == "sgd":
        return _sgd(optimizer)
    if kind == "adafactor":
        return {"adafactor": scale_by_adafactor(flatten(parameters))}
    if kind in ("muon", "soap"):
        specs = flatten(parameters)
        if not any(map(is_hidden_matrix, specs.values())):
            raise ConfigError(
                f'program.optimizer.kind = "{kind}": the model has no matrix whose axes have '
                'names, apart from embeddings and the LM head; use kind = "adamw"'
            )
        if kind == "soap":
            return {"soap": scale_by_soap(optimizer, specs)}
        return {"muon": scale_by_muon(optimizer, specs, dtype)}
    return {"adam": optax.scale_by_adam(beta1, beta2, optimizer.epsilon)}


def _sgd(optimizer: Optimizer) -> dict[str, optax.GradientTransformation]:
    if (decay := optimizer.momentum_or_default) == 0:
        return {"steps": _count_steps()}
    return {"sgd": optax.trace(decay, optimizer.nesterov_or_default)}


def _descend() -> optax.GradientTransformationExtraArgs:
    """Build the multiplication by minus the learning rate, an argument of `update`."""

    def update(updates: Any, state: Any, params: Any = None, **given: Any) -> tuple[Any, Any]:
        return jax.tree.map(lambda update: -given["learning_rate"] * update, updates), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)


def _keep_constants(parameters: Tree) -> optax.GradientTransformation:
    """Build the removal of updates of arrays that no step changes, whatever the optimizer."""

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:  # optax's names
        kept = jax.tree.map(
            lambda update, spec: jnp.zeros_like(update) if spec.role == "constant" else update,
            updates,
            parameters,
        )
        return kept, state

    return optax.GradientTransformation(optax.init_empty_state, update)


def _average(decay: float) -> optax.GradientTransformation:
    """Build the exponential moving average of the weights after each update."""

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:  # optax's names
        new = optax.apply_updates(params, updates)
        return updates, jax.tree.map(lambda old, one: old + (1 - decay) * (one - old), state, new)

    return optax.GradientTransformation(lambda params: jax.tree.map(jnp.copy, params), update)


def _count_steps() -> optax.GradientTransformation:
    """Build a transformation that changes nothing; its state is there even if no other one is.

    An optimizer such as SGD has none, and a tree without arrays cannot be stored by name.
    """

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:  # optax's names
        return updates, state + 1

    return optax.GradientTransformation(lambda params: jnp.zeros((), jnp.int32), update)


def _clip(limit: float) -> optax.GradientTransformation:
    """Build optax.clip_by_global_norm as one multiplication of all gradients by the same number.

    Optax divides each gradient; XLA:CPU stores the quotients, one more array to write and read
    for each gradient.
    """

    def clip(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:  # optax's names
        factor = limit / jnp.maximum(optax.tree.norm(updates), limit)
        return jax.tree.map(lambda gradient: gradient * factor, updates), state

    return optax.GradientTransformation(optax.init_empty_state, clip)


def _is_matrix(spec: ArraySpec) -> bool:
    """Return whether an array is a matrix, so that weight decay applies to it.

    Norms and biases have one axis beside layers and experts, or are the bias of a matrix whose
    output has two axes, such as heads and head_dim.
    """
    axes = [axis for axis in spec.axes if axis not in STACK_AXES]
    return bool({"embed", "rank", "q_lora", "kv_lora"}.intersection(axes)) and len(axes) > 1


def pack(optimizer_state: Any) -> Tree:
    """Convert optimizer state to nested dicts, so that it is stored by name; drop empty states."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(optimizer_state)
    return unflatten({_path(keys): leaf for keys, leaf in leaves})


def unpack(packed: Tree, template: Any) -> Any:
    """Convert packed optimizer state back, to the structure of `template`."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(template)
    leaves_by_path = flatten(packed)
    return structure.unflatten([leaves_by_path[_path(keys)] for keys, _ in leaves])


def moment_specs(template: Any, parameters: Mapping[str, ArraySpec], optimizer: Optimizer) -> Tree:
    """Return the ArraySpecs of packed optimizer state; moments have their parameter's array axes.

    Args:
        template: Optimizer state, as shapes.
        parameters: ArraySpecs of the parameters, by path.
        optimizer: Settings.
    """
    known = {} if optimizer.custom else optimizer_arrays(parameters, optimizer)
    specs = {}
    for path, leaf in flatten(pack(template)).items():
        spec = known.get(path) or _like_parameter(path, leaf, parameters, optimizer)
        assert spec.shape == leaf.shape and spec.dtype == str(leaf.dtype), path
        specs[path] = spec
    return unflatten(specs)


def _like_parameter(
    path: str, leaf: Any, parameters: Mapping[str, ArraySpec], optimizer: Optimizer
) -> ArraySpec:
    """Return the spec of a counter, or of an array of the user's with the shape of a parameter."""
    parameter = next((parameters[tail] for tail in path_suffixes(path) if tail in parameters), None)
    fits = parameter is not None and parameter.shape == leaf.shape
    axes = parameter.axes if parameter is not None and fits else (None,) * len(leaf.shape)
    memory = "host" if fits and optimizer.offload_to_host else "device"
    return ArraySpec(leaf.shape, axes, str(leaf.dtype), "optimizer", memory)


def _path(keys: Any) -> str:
    return jax.tree_util.keystr(keys, simple=True, separator="/")
