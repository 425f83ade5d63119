"""Checks of the user's loss and optimizer where a program gives them parts of what they expect.

A pipeline with 1F1B gives a loss some of the positions, and ring attention gives it them in another
order. A pipeline over data, and gradients that are reduced once for each step, give it some of the
sequences. Uneven stages add rows of zeros to the arrays of an optimizer. Code that computes each
token, or each element, by itself is not affected. Others would train another model in silence, so
their results for parts of random arrays are compared.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from graphtrain.config.resolve import ResolvedProgram
from graphtrain.errors import ConfigError
from graphtrain.graphs.custom_optimizer import custom_optimizer
from graphtrain.models.head_gradient_support import defers_gradients

_SEQUENCES, _POSITIONS = 2, 8
_ROWS, _PADDING = 3, 1  # of an array of an optimizer
# Selections of (sequences, positions): every second one and all in another order, or one sequence.
_PARTS = {
    "positions": (np.s_[:, ::2], np.s_[:, ::-1]),
    "sequences": (np.s_[:1], np.s_[1:]),
}


def check_user_code_of_parts(program: ResolvedProgram) -> None:
    """Check that the user's loss and optimizer may be given parts, if the program does so.

    Raises:
        ConfigError: one of them computes something else of parts.
    """
    with jax.ensure_compile_time_eval():
        _check_loss(program)
        _check_optimizer(program)


def _check_loss(program: ResolvedProgram) -> None:
    loss, mesh = program.loss, program.mesh
    if (code := loss.user_code) is None or not isinstance(program.model.vocab, int):
        return
    causes = {}
    if program.stages is not None and program.pipeline.schedule == "1f1b":
        causes["positions"] = (
            'pipeline.schedule = "1f1b" computes the loss of parts of a sequence; use "circular" '
            'or "gpipe"'
        )
    if mesh.size(program.rules.activations.get("kv_seq", ())) > 1:
        causes["positions"] = (
            "ring attention has the positions of a sequence in another order; use "
            '"ulysses" instead of "context" in program.rules'
        )
    if program.stages is not None and mesh.size(program.rules.activations.get("batch", ())) > 1:
        causes["sequences"] = (
            "a pipeline computes the loss of each device's sequences; use a mesh without stage"
        )
    elif program.batch.padding_sequences:
        causes["sequences"] = (
            "batch.padding_sequences, which run.fallback may set, adds empty sequences; use 0, and "
            "a mesh that divides the batch"
        )
    elif defers_gradients(program):
        causes["sequences"] = (
            'batch.gradient_reduction = "per_step" computes the loss of each replica\'s sequences; '
            'use "per_microbatch"'
        )

    def compute(logits: np.ndarray, targets: np.ndarray) -> np.ndarray | None:
        losses = code.call(jnp.asarray(logits), jnp.asarray(targets), **loss.arguments)
        is_of_tokens = getattr(losses, "shape", None) == targets.shape
        return np.asarray(losses) if is_of_tokens else None

    for of, cause in causes.items():
        if not _is_of_tokens(compute, program.model.vocab, _PARTS[of]):
            raise ConfigError(
                f"{code}: the loss of a token depends on the other {of} that it is given, and "
                f"{cause}"
            )


def _is_of_tokens(
    compute: Callable[[np.ndarray, np.ndarray], np.ndarray | None],
    vocab: int,
    parts: tuple[Any, ...],
) -> bool:
    """Return whether the losses of parts are parts of the losses, of random logits and targets.

    A loss that returns something else is refused where it is traced.
    """
    random = np.random.default_rng(0)
    shape = _SEQUENCES, _POSITIONS
    logits = random.standard_normal((*shape, vocab)).astype(np.float32)
    targets = random.integers(0, min(vocab, 3), shape).astype(np.int32)  # they repeat
    targets[:, ::3] = random.integers(0, vocab, targets[:, ::3].shape)
    whole = compute(logits, targets)
    if whole is None:
        return True
    of_parts = [(compute(logits[part], targets[part]), whole[part]) for part in parts]
    return all(losses is None or _is_close(losses, of_whole) for losses, of_whole in of_parts)


def _check_optimizer(program: ResolvedProgram) -> None:
    optimizer = program.settings.optimizer
    code, stages = optimizer.user_code, program.stages
    if code is None or stages is None or not stages.padding_fraction:
        return
    random = np.random.default_rng(0)
    shape = _ROWS + _PADDING, 4, 8
    weights, *gradients = (random.standard_normal(shape).astype(np.float32) for _ in range(3))
    for array in (weights, *gradients):
        array[_ROWS:] = 0
    made = custom_optimizer(code, optimizer.arguments)
    try:
        padded, alone = (
            _updates(made, weights[:rows], gradients, rows) for rows in (_ROWS + _PADDING, _ROWS)
        )
    except Exception as error:
        raise code.error(error) from error
    if not all(_is_close(one[:_ROWS], two) for one, two in zip(padded, alone, strict=True)):
        raise ConfigError(
            f"{code}: the update of an element depends on others of its array, and stages of "
            f"{stages.rows_per_chunk} layers at most have rows of zeros beside the model's layers; "
            "use a number of layers that the stages divide, without pipeline.layers_per_stage"
        )


def _updates(made: Any, weights: np.ndarray, gradients: list[np.ndarray], rows: int) -> list[Any]:
    """Return the updates of some steps of an optimizer."""
    parameters, found = {"weight": jnp.asarray(weights)}, []
    state = made.init(parameters)
    for gradient in gradients:
        update, state = made.update({"weight": jnp.asarray(gradient[:rows])}, state, parameters)
        found.append(np.asarray(update["weight"]))
    return found


def _is_close(one: np.ndarray, other: np.ndarray) -> bool:
    return np.allclose(one, other, rtol=1e-4, atol=1e-6, equal_nan=True)
