"""Training objectives of one microbatch: cross-entropy, or DPO over pairs of answers."""

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from graphtrain.config.resolve import ResolvedProgram
from graphtrain.graphs.deferred_reduction import Objective, replica_key, vary_tree
from graphtrain.graphs.loss_scale import loss_scale, scaled, unscaled
from graphtrain.graphs.open_model import open_language_model
from graphtrain.graphs.preference import answer_score, pair_count, pair_mask
from graphtrain.graphs.token_loss import weighted_loss
from graphtrain.models.ahead import TARGETS, WEIGHTS
from graphtrain.models.attention.segment_mask import isolate_documents
from graphtrain.models.batch_images import with_images
from graphtrain.models.chunk_losses import LossHead
from graphtrain.models.chunk_size import head_blocks, loss_chunk
from graphtrain.models.chunked_loss import chunked_cross_entropy
from graphtrain.models.layer_terms import LayerTerms
from graphtrain.models.loss import dpo_loss
from graphtrain.models.native import NativeModel
from lowering.tracing.recording import record, without_recording
from lowering.tracing.threefry import UNROLLED_THREEFRY
from lowering.trees import Tree


def metric_names(program: ResolvedProgram) -> tuple[str, ...]:
    """Return the names of the metrics that the loss and the layers of the model report."""
    of_loss = ("loss", "margin", "accuracy") if program.loss.kind == "dpo" else ("loss",)
    return (*of_loss, *open_language_model(program.model).layer_metrics)


def training_objective(
    program: ResolvedProgram, state: Tree, frozen: Tree | None, batch: Tree
) -> Objective:
    """Return the objective of one microbatch for the loss of a program.

    Args:
        program: Settings.
        state: Training state.
        frozen: Frozen weights, if any.
        batch: All microbatches (microbatches, batch, seq), for the number of targets or pairs.
    """
    make = preference_objective if program.loss.kind == "dpo" else cross_entropy_objective
    return make(program, state, frozen, batch)


def cross_entropy_objective(
    program: ResolvedProgram, state: Tree, frozen: Tree | None, batch: Tree
) -> Objective:
    """Return the objective of one microbatch; summed over microbatches it is that of the step.

    It is multiplied by the loss scale, if there is one; the metrics are not.

    Args:
        program: Settings.
        state: Training state.
        frozen: Frozen weights, if any.
        batch: All microbatches (microbatches, batch, seq), for the number of targets.
    """
    targets, scale = jnp.maximum(batch["weights"].sum(), 1.0), loss_scale(program, state)
    # Where the loss is computed, because chunks of it compute gradients in float16 there.
    total = targets if scale is None else targets / scale
    run = _forward_with(program, state, frozen, partial(token_losses, total=total))

    def objective(parameters: Tree, microbatch: Tree, index: Any) -> tuple[jax.Array, Tree]:
        (value, loss), added, metrics = run(parameters, microbatch, index)
        return value + scaled(added, scale), {"loss": unscaled(loss, scale), **metrics}

    return objective


def token_losses(
    program: ResolvedProgram,
    weights: Tree,
    batch: Tree,
    dropout_key: jax.Array | None = None,
    *,
    total: jax.Array | float = 1.0,
) -> tuple[tuple[jax.Array, jax.Array], LayerTerms]:
    """Return the objective and the sum of -log p(target), and the layers' terms.

    Args:
        program: Settings.
        weights: Parameters of the model.
        batch: One microbatch (batch, seq), with what with_targets_ahead adds in training.
        dropout_key: Random key; without it there is no dropout.
        total: Divisor of the objective, which includes the z-loss, and of the sum.
    """
    model = open_language_model(program.model)
    tokens, targets, counts = (batch[name] for name in ("tokens", "targets", "weights"))
    if isinstance(model, NativeModel) and TARGETS in batch:
        return losses_ahead(program, model, weights, batch, dropout_key, total)
    chunk = loss_chunk(program) if model.has_separate_head else None
    if chunk is None:
        out, terms = model.forward(weights, tokens, dropout_key=dropout_key)
        out = record("logits", out, "batch", "seq", "vocab")
        objective, loss = weighted_loss(program.loss, out, targets, counts)
        return (objective / total, loss / total), terms
    hidden, head, terms = model.head_inputs(weights, tokens, dropout_key=dropout_key)
    scored = loss_head(program, chunk)
    # Divide the weights, not the result: the chunks compute gradients already, and to scale those
    # later would read and write them once more.
    return chunked_cross_entropy(hidden, head, targets, counts / total, scored), terms


def loss_head(program: ResolvedProgram, chunk: int) -> LossHead:
    """Return the settings of the LM head and the loss, for chunks of so many positions."""
    settings = program.model
    return LossHead(
        chunk,
        settings.tie_word_embeddings,
        settings.final_logit_softcap,
        program.loss.z_loss,
        settings.vocab_tokens,
        head_blocks(program, chunk),
    )


def losses_ahead(
    program: ResolvedProgram,
    model: NativeModel,
    weights: Tree,
    batch: Tree,
    dropout_key: jax.Array | None,
    total: jax.Array | float,
) -> tuple[tuple[jax.Array, jax.Array], LayerTerms]:
    """Return what token_losses does, for a model that predicts the token after the next too.

    The objective includes its weighted loss, the sum does not; both have the same divisor.

    Source: DeepSeek-AI 2024, "DeepSeek-V3", section 2.2, https://arxiv.org/abs/2412.19437
    """
    targets, counts = batch["targets"], batch["weights"]
    chunk, weight = loss_chunk(program), model.settings.mtp_loss_weight
    assert weight is not None
    unnormed, head, terms = model.head_inputs(weights, batch["tokens"], dropout_key=dropout_key)
    hidden = unnormed.normed()

    def score(hidden: jax.Array, targets: jax.Array, counts: jax.Array) -> tuple[Any, Any]:
        if chunk is not None:
            scored = loss_head(program, chunk)
            return chunked_cross_entropy(hidden, head, targets, counts / total, scored)
        logits = model.logits_of(weights, hidden, head)
        return weighted_loss(program.loss, logits, targets, counts / total)

    ahead_key = None if dropout_key is None else jax.random.fold_in(dropout_key, 2)
    ahead, of_block = model.head_inputs_ahead(weights, hidden, targets, dropout_key=ahead_key)
    objective, loss = score(hidden, targets, counts)
    objective_ahead, loss_ahead = score(ahead, batch[TARGETS], batch[WEIGHTS])
    losses = {f"ahead/{name}": value for name, value in of_block.losses.items()}
    # Metrics of layers are means over microbatches; the loss is a sum over them.
    metrics = terms.metrics | {"mtp_loss": loss_ahead * program.batch.microbatches}
    return (objective + weight * objective_ahead, loss), LayerTerms(terms.losses | losses, metrics)


def answer_log_probs(
    program: ResolvedProgram, weights: Tree, batch: Tree, dropout_key: jax.Array | None = None
) -> tuple[jax.Array, LayerTerms]:
    """Return log p of each row's answer (batch,), and the layers' terms."""
    model = open_language_model(program.model)
    out, terms = model.forward(weights, batch["tokens"], dropout_key=dropout_key)
    out = record("logits", out, "batch", "seq", "vocab")
    return answer_score(out, batch)[0], terms


def preference_objective(
    program: ResolvedProgram, state: Tree, frozen: Tree | None, batch: Tree
) -> Objective:
    """Return DPO's objective of one microbatch: rows 2i are chosen answers, rows 2i + 1 rejected.

    It is multiplied by the loss scale, if there is one; the metrics are not.

    Args:
        program: Settings.
        state: Training state.
        frozen: Frozen weights, which include the reference model.
        batch: All microbatches (microbatches, batch, seq), for the number of pairs.
    """
    run = _forward_with(program, state, frozen, answer_log_probs)
    pairs = jnp.maximum(pair_count(batch["weights"]), 1.0)
    scale = loss_scale(program, state)

    def objective(parameters: Tree, microbatch: Tree, index: Any) -> tuple[jax.Array, Tree]:
        reference = reference_log_probs(program, frozen, microbatch)
        log_probs, added, of_layers = run(parameters, microbatch, index)
        sums = dpo_loss(log_probs - reference, pair_mask(microbatch["weights"]), program.loss)
        metrics = {name: total / pairs for name, total in sums.items()}
        return scaled(metrics["loss"] + added, scale), metrics | of_layers

    return objective


def _forward_with(
    program: ResolvedProgram, state: Tree, frozen: Tree | None, compute: Callable[..., Any]
) -> Callable[..., Any]:
    """Return a function that applies `compute` to a microbatch with the trained parameters.

    It returns the result of `compute`, and the layers' losses and metrics, divided by the number of
    microbatches.
    """
    key, adapter = step_key(program, state), program.adapter
    adapter_has_dropout = adapter is not None and bool(adapter.dropout)
    model = open_language_model(program.model)
    model_has_dropout = model.has_dropout

    def run(parameters: Tree, microbatch: Tree, index: Any) -> tuple[Any, jax.Array | float, Tree]:
        dropout_key = (
            replica_key(jax.random.fold_in(key, index))
            if adapter_has_dropout or model_has_dropout
            else None
        )
        weights = model.apply_lora(program.settings, parameters, vary_tree(frozen), dropout_key)
        model_dropout_key = dropout_key if model_has_dropout else None
        documents, images = microbatch.get("documents"), microbatch.get("images")
        with isolate_documents(documents), with_images(images):
            output, terms = compute(program, weights, microbatch, model_dropout_key)
        microbatches = program.batch.microbatches
        metrics = {name: value / microbatches for name, value in terms.metrics.items()}
        return output, sum(terms.losses.values()) / microbatches, metrics

    return run


def reference_log_probs(program: ResolvedProgram, frozen: Tree | None, batch: Tree) -> jax.Array:
    """Return log p of each row's answer (batch,) by the reference model.

    The reference model is the frozen weights alone, without LoRA.
    """
    with isolate_documents(batch.get("documents")), without_recording():
        model = open_language_model(program.model)
        reference = model.reference_parameters(program.settings, frozen)
        log_probs, _ = answer_log_probs(program, reference, batch)
    return jax.lax.stop_gradient(log_probs)


def step_key(program: ResolvedProgram, state: Tree) -> jax.Array:
    """Return the random key of the current step."""
    key = jax.random.wrap_key_data(state["key"], impl=key_implementation(program))
    return jax.random.fold_in(key, state["step"])


def key_implementation(program: ResolvedProgram) -> Hashable | None:
    """Return the random key implementation: JAX's default, unless the target requires another.

    On CPUs it is an unrolled Threefry, which is faster there.
    """
    target = program.target
    return UNROLLED_THREEFRY if target.platform == "cpu" else target.random_bits
