"""AdamW or the user's optimizer, with its state as named arrays."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from graphtrain.config.schema import Optimizer
from graphtrain.config.user_code import UserCode
from graphtrain.errors import ConfigError
from lowering.trees import Tree, flatten, path_suffixes, unflatten
from sharding_rules.arrays import ArraySpec


def make_optimizer(optimizer: Optimizer, parameters: Tree) -> optax.GradientTransformation:
    """Build clipping, Adam and decoupled weight decay, or clipping and the user's optimizer.

    The updates still have to be multiplied by minus the learning rate.

    Args:
        optimizer: Settings.
        parameters: ArraySpecs of the parameters, which determine what is decayed.

    Raises:
        ConfigError: the user's optimizer cannot be made.

    Source: Loshchilov and Hutter 2019, https://arxiv.org/abs/1711.05101
    """
    if (code := optimizer.user_code) is not None:
        transforms = {"custom": _custom(code, optimizer.arguments), "steps": _count_steps()}
    else:
        adam = optax.scale_by_adam(
            optimizer.beta1, optimizer.beta2, optimizer.epsilon, mu_dtype=optimizer.moment_dtype
        )
        transforms = {"adam": adam}
    if optimizer.clip_norm:
        transforms = {"clip": _clip(optimizer.clip_norm)} | transforms
    if optimizer.weight_decay and code is None:
        decays = jax.tree.map(
            lambda spec: optimizer.decay_mask == "all" or _is_matrix(spec), parameters
        )
        transforms["decay"] = optax.add_decayed_weights(optimizer.weight_decay, decays)
    return optax.named_chain(*transforms.items())


def _custom(code: UserCode, arguments: Mapping[str, Any]) -> optax.GradientTransformation:
    made = code.call(**arguments)
    if not callable(getattr(made, "init", None)) or not callable(getattr(made, "update", None)):
        raise ConfigError(
            f"{code} returned {type(made).__name__}, not an optax.GradientTransformation"
        )
    return made


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

    Norms and biases have one axis beside layers, or are the bias of a matrix whose output has two
    axes, such as heads and head_dim.
    """
    axes = [axis for axis in spec.axes if axis not in ("virtual_stages", "layers")]
    return ("embed" in axes or "rank" in axes) and len(axes) > 1


def pack(optimizer_state: Any) -> Tree:
    """Convert optimizer state to nested dicts, so that it is stored by name; drop empty states."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(optimizer_state)
    return unflatten({_path(keys): leaf for keys, leaf in leaves})


def unpack(packed: Tree, template: Any) -> Any:
    """Convert packed optimizer state back, to the structure of `template`."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(template)
    leaves_by_path = flatten(packed)
    return structure.unflatten([leaves_by_path[_path(keys)] for keys, _ in leaves])


def moment_specs(template: Any, parameters: Mapping[str, ArraySpec], offload: bool = False) -> Tree:
    """Return the ArraySpecs of packed optimizer state; moments have their parameter's array axes.

    Args:
        template: Optimizer state, as shapes.
        parameters: ArraySpecs of the parameters, by path.
        offload: Whether moments are stored in the host's memory.
    """
    specs = {}
    for path, leaf in flatten(pack(template)).items():
        parameter = next(
            (parameters[tail] for tail in path_suffixes(path) if tail in parameters), None
        )
        fits = parameter is not None and parameter.shape == leaf.shape
        axes = parameter.axes if parameter is not None and fits else (None,) * len(leaf.shape)
        memory = "host" if fits and offload else "device"
        specs[path] = ArraySpec(leaf.shape, axes, str(leaf.dtype), "optimizer", memory)
    return unflatten(specs)


def _path(keys: Any) -> str:
    return jax.tree_util.keystr(keys, simple=True, separator="/")
