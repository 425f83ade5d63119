"""Optimizer of the user, checked while it is traced: what it returns must fit what it was given."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from graphtrain.config.user_code import UserCode
from graphtrain.errors import ConfigError


def custom_optimizer(
    code: UserCode, arguments: Mapping[str, Any]
) -> optax.GradientTransformationExtraArgs:
    """Build the optimizer of the user.

    Args:
        code: Function that returns an optax.GradientTransformation.
        arguments: Its arguments.

    Raises:
        ConfigError: it returns something else, or, while it is traced: updates of other shapes
            than the weights', a state that changes in shape or dtype, or an array without elements.
    """
    made = code.call(**arguments)
    if not callable(getattr(made, "init", None)) or not callable(getattr(made, "update", None)):
        raise ConfigError(
            f"{code} returned {type(made).__name__}, not an optax.GradientTransformation"
        )
    made = optax.with_extra_args_support(made)

    def init(params: Any) -> Any:  # optax's names
        state = made.init(params)
        for path, array in _leaves(state).items():
            if jnp.size(array) == 0:
                raise ConfigError(
                    f"{code}: its state has an array without elements ({path}), which a checkpoint "
                    "cannot store; leave it out"
                )
        return state

    def update(updates: Any, state: Any, params: Any = None, **given: Any) -> tuple[Any, Any]:
        new_updates, new_state = made.update(updates, state, params, **given)
        _check_like(code, "an update", updates, new_updates, dtypes=False)
        _check_like(code, "its state", state, new_state, dtypes=True)
        return new_updates, new_state

    return optax.GradientTransformationExtraArgs(init, update)


def _check_like(code: UserCode, what: str, before: Any, after: Any, *, dtypes: bool) -> None:
    """Check that a tree that an update returns has the structure and shapes of one that it takes.

    Raises:
        ConfigError: names the first array that does not fit.
    """
    taken, returned = _leaves(before), _leaves(after)
    if different := sorted(taken.keys() ^ returned.keys()):
        missing = "lacks" if different[0] in taken else "has, and did not have before,"
        raise ConfigError(f"{code}: {what} that it returns {missing} {different[0]}")
    for path, array in taken.items():
        old, new = (_describe(one, dtypes=dtypes) for one in (array, returned[path]))
        if old != new:
            raise ConfigError(
                f"{code}: {what} that it returns is {new}{f' for {path}' if path else ''}, and not "
                f"{old}"
            )


def _describe(array: Any, *, dtypes: bool) -> str:
    shape = "x".join(map(str, jnp.shape(array))) or "a scalar"
    return f"{shape} of {jnp.result_type(array)}" if dtypes else shape


def _leaves(tree: Any) -> dict[str, Any]:
    """Return the arrays of a tree by their paths."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(keys, simple=True, separator="/"): leaf for keys, leaf in leaves}
