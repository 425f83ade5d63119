"""What training minimises: cross-entropy, or DPO's loss of pairs of answers, of one microbatch."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from graphtrain.architecture import drops, forward, logits
from graphtrain.config.schema import Program
from graphtrain.deferred import Objective, key_here, own_here
from graphtrain.loss import cross_entropy, log_probabilities, preference
from graphtrain.models.adapters import combine, reference
from graphtrain.models.documents import apart
from lowering.target import Target
from lowering.trees import Tree


def metric_names(program: Program) -> tuple[str, ...]:
    """What the loss reports of a batch."""
    return ("loss", "margin", "accuracy") if program.loss.kind == "preference" else ("loss",)


def cross_entropy_objective(
    program: Program, state: Tree, frozen: Tree | None, batch: Tree
) -> Objective:
    """What training minimises, of one microbatch; the sum over microbatches is that of a step."""
    run, targets = _model(program, state, frozen), jnp.maximum(batch["weights"].sum(), 1.0)

    def objective(parameters: Tree, microbatch: Tree, index: Any) -> tuple[jax.Array, Tree]:
        out, added = run(parameters, microbatch, index)
        loss, squares = cross_entropy(out, microbatch["targets"], microbatch["weights"])
        value = (loss + program.loss.z_loss * squares) / targets + added
        return value, {"loss": loss / targets}

    return objective


def preference_objective(
    program: Program, state: Tree, frozen: Tree | None, batch: Tree
) -> Objective:
    """DPO's, of one microbatch, whose rows 2i and 2i + 1 are the better and the worse answer."""
    run, pairs = _model(program, state, frozen), jnp.maximum(count_pairs(batch["weights"]), 1.0)

    def objective(parameters: Tree, microbatch: Tree, index: Any) -> tuple[jax.Array, Tree]:
        before = reference_scores(program, frozen, microbatch)
        out, added = run(parameters, microbatch, index)
        after = log_probabilities(out, microbatch["targets"], microbatch["weights"])
        metrics = preference(after - before, is_pair(microbatch["weights"]), program.loss)
        metrics = {name: total / pairs for name, total in metrics.items()}
        return metrics["loss"] + added, metrics

    return objective


def _model(program: Program, state: Tree, frozen: Tree | None) -> Callable[..., Any]:
    """Logits of a microbatch with the parameters that are trained, and what layers add."""
    key, adapter = step_key(program, state), program.adapter
    in_adapter = adapter is not None and bool(adapter.dropout)
    in_model = drops(program.model)

    def run(parameters: Tree, microbatch: Tree, index: Any) -> tuple[jax.Array, Any]:
        dropout = key_here(jax.random.fold_in(key, index)) if in_adapter or in_model else None
        weights = combine(program, parameters, own_here(frozen), dropout)
        of_model = dropout if in_model else None
        with apart(microbatch.get("documents")):
            out, auxiliary = forward(
                program.model, weights, microbatch["tokens"], dropout_key=of_model
            )
        return out, sum(auxiliary.values()) / program.batch.microbatches

    return run


def reference_scores(program: Program, frozen: Tree | None, batch: Tree) -> jax.Array:
    """log p of every row's answer before training: of the frozen weights, without adapters."""
    with apart(batch.get("documents")):
        out = logits(program.model, reference(program, frozen), batch["tokens"])
    scores = log_probabilities(out, batch["targets"], batch["weights"])
    return jax.lax.stop_gradient(scores)


def is_pair(weights: jax.Array) -> jax.Array:
    """Of every pair of rows (..., batch, seq) whether both hold answers, 1.0 or 0.0."""
    answers = (weights != 0).any(-1)
    return answers.reshape(*answers.shape[:-1], -1, 2).all(-1).astype(jnp.float32)


def count_pairs(weights: jax.Array) -> jax.Array:
    return is_pair(weights).sum()


def step_key(program: Program, state: Tree) -> jax.Array:
    key = jax.random.wrap_key_data(state["key"], impl=random_bits(program))
    return jax.random.fold_in(key, state["step"])


def random_bits(program: Program) -> str | None:
    """How random bits are made: as JAX is set, unless the target cannot make them so."""
    return Target.parse(program.target).random_bits
