"""Branches and loops that depend on data, and what replaces them where a compiler has neither.

Neuron's compiler refuses conditionals, and loops whose number of iterations it does not know. The
conditionals of Ascend's graphs cannot read their rank, as collectives do. There, both branches are
computed; and on Neuron, a loop takes all of its iterations.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import TypeVar

import jax
import jax.numpy as jnp

from lowering.tracing.current_target import traced_target

Carry = TypeVar("Carry")
Operand = TypeVar("Operand")
Result = TypeVar("Result")


def compute_if(condition: jax.Array, compute: Callable[[], Carry], otherwise: Carry) -> Carry:
    """Return `compute()` if a scalar condition holds, else `otherwise`."""
    if _traces_for("neuron", "ascend"):
        return jax.tree.map(partial(jnp.where, condition), compute(), otherwise)
    return jax.lax.cond(condition, compute, lambda: otherwise)


def compute_in_turn(
    condition: jax.Array,
    compute: Callable[[Operand], Result],
    otherwise: Callable[[Operand], Result],
    operand: Operand,
    taken: tuple[int, int],
) -> Result:
    """Return `compute(operand)` in some iterations of a loop, `otherwise(operand)` in the others.

    Args:
        condition: A scalar that follows from the index of the iteration, equal on all devices.
        compute: A function, which may contain collectives.
        otherwise: A function without work.
        operand: Argument of both.
        taken: Number of iterations in which the condition holds, and of all. A plan counts the
            work of `compute` that often (lowering/hlo/collectives.py).
    """
    if _traces_for("neuron", "ascend"):
        return jax.tree.map(partial(jnp.where, condition), compute(operand), otherwise(operand))
    with stated_frequency(*taken):
        return jax.lax.cond(condition, compute, otherwise, operand)


def stated_frequency(times: int, of: int) -> AbstractContextManager[object]:
    """Return a scope that states how often the conditional in it takes the branch with the work.

    Args:
        times: Executions with the work.
        of: All executions, of which plans count that part (lowering/hlo/conditionals.py).
    """
    return jax.named_scope(f"taken_{times}_of_{of}")


def repeat_while(
    is_unfinished: Callable[[Carry], jax.Array],
    step: Callable[[jax.Array, Carry], Carry],
    carry: Carry,
    count: int,
) -> Carry:
    """Apply a step with indices 0, 1, ... until a carry is finished, at most `count` times.

    Args:
        is_unfinished: Returns whether a carry needs another step, a boolean scalar.
        step: Returns the next carry. It may be applied to one that is finished, and must then
            return an equivalent one.
        carry: First carry.
        count: Number of steps at most.
    """
    if _traces_for("neuron"):
        return jax.lax.fori_loop(0, count, step, carry)

    def continues(state: tuple[jax.Array, Carry]) -> jax.Array:
        index, carry = state
        return (index < count) & is_unfinished(carry)

    def next_state(state: tuple[jax.Array, Carry]) -> tuple[jax.Array, Carry]:
        index, carry = state
        return index + 1, step(index, carry)

    return jax.lax.while_loop(continues, next_state, (jnp.int32(0), carry))[1]


def _traces_for(*platforms: str) -> bool:
    target = traced_target()
    return target is not None and target.platform in platforms
