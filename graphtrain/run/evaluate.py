"""Validation loss with a compiled evaluation step."""

import math
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

import lowering
from graphtrain.cache import Cache
from graphtrain.checkpoints.checkpoint import arrangement_of, restore_parameters, saved_steps
from graphtrain.config.schema import Config, Data, Program
from graphtrain.data.batches.blend import blend_counts
from graphtrain.data.batches.loader import evaluation_batches
from graphtrain.data.indexed.dataset import IndexedDataset
from graphtrain.data.indexed.description import read_description
from graphtrain.errors import DataError, TrainingError
from graphtrain.models.lora.trainable import has_frozen_weights
from graphtrain.run.bigram_baseline import Bigram
from graphtrain.run.initial_weights import Beginning
from graphtrain.run.programs import Programs
from lowering.machine.target import Target
from lowering.trees import Tree


def validation_loss(
    evaluate: Any,
    weights: tuple[Tree, ...],
    batches: Iterable[dict[str, np.ndarray]],
    target: Target,
) -> float:
    """Mean loss in nats over every target that counts; of preferences, over every pair.

    Args:
        evaluate: the loaded evaluation step.
        weights: on the devices, placed as the step asks: those that are trained, then those that
            are not, if there are any.
        batches: of the step's shape.
        target: the machine.

    Raises:
        DataError: nothing in the batches counts.
    """
    put, described = lowering.backend(target).put, evaluate.inputs("batch")
    losses, targets = [], []
    for batch in batches:
        metrics = evaluate(*weights, put(batch, described))["metrics"]
        losses.append(float(metrics["loss_sum"]))
        targets.append(float(metrics["targets"]))
    if not any(targets):
        raise _nothing_counts()
    return math.fsum(losses) / math.fsum(targets)


def check_validation(batches: Iterable[dict[str, np.ndarray]], program: Program) -> None:
    """Refuse a validation set before training; reads no further than to something that counts.

    Raises:
        DataError: it cannot be used, or nothing in it counts.
    """
    rows = 2 if program.loss.kind == "preference" else 1  # of which all must have a target
    for batch in batches:
        counts = (batch["weights"] != 0).any(-1)
        if counts.reshape(-1, rows).all(-1).any():
            return
    raise _nothing_counts()


def _nothing_counts() -> DataError:
    return DataError(
        "run.data.validation: nothing in it counts, since no document is of two tokens, or has "
        "an answer that fits into program.batch.length; take other data"
    )


def validation_batches(
    data: Data, program: Program, vocab: int, limit: int | None
) -> Iterable[dict[str, np.ndarray]]:
    """The validation set in its own order, in batches of the evaluation step's shape.

    Raises:
        DataError: there is no validation set.
    """
    if data.validation is None:
        raise DataError("run.data.validation is not set, so there is nothing to evaluate on")
    batch = program.batch
    batches = evaluation_batches(
        data.validation,
        batch_size=batch.sequences // batch.microbatches,
        seq_len=batch.length,
        vocab=vocab,
        isolate_documents=batch.documents == "apart",
        packing=data.packing,
        overlong=data.longer,
        pairs=program.loss.kind == "preference",
    )
    return islice(batches, limit)


def checkpoint_loss(
    config: Config, cache: Cache, *, remedy: str, step: int | None
) -> dict[str, float]:
    """Validation loss and perplexity of a checkpoint of a run, the last one if step is None.

    Of a run that has none yet, those of the weights it would start from, as step 0.

    Raises:
        MissingProgram: the evaluation step is not in the cache.
        TrainingError: there is no such checkpoint.
        DataError: there is no validation set.
    """
    run, program = config.run, config.program
    if run.data.validation is None:  # before anything is loaded
        raise DataError("run.data.validation is not set, so there is nothing to evaluate on")
    directory = Path(run.directory) / "checkpoints"
    steps = saved_steps(directory)
    beginning = None if step and not steps else Beginning.open(config, resumes=bool(steps))
    if (beginning is None or steps) and (not steps or (step is not None and step not in steps)):
        there = ", ".join(map(str, steps)) or "none"
        raise TrainingError(f"no such checkpoint in {directory}; there are: {there}")
    step = steps[-1] if steps and step is None else step or 0
    evaluate = Programs(program, cache, ["evaluate"], remedy)["evaluate"]
    target = Target.parse(program.target)
    with lowering.backend(target).forbid_tracing():
        described = evaluate.inputs("parameters")
        if steps:
            parameters = restore_parameters(directory, step, described, arrangement_of(program))
        else:
            assert beginning is not None
            parameters = beginning.parameters(described)
        weights = (parameters,)
        if beginning is not None and has_frozen_weights(program):
            weights = parameters, beginning.frozen(evaluate.inputs("frozen"))
        batches = validation_batches(run.data, program, program.model.vocab, None)
        loss = validation_loss(evaluate, weights, batches, target)
    return {"step": step, "validation_loss": loss, "perplexity": perplexity(loss)}


def perplexity(loss: float) -> float:
    """Of a mean loss in nats; infinite where it is more than a float can hold."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def bigram_loss(config: Config) -> float:
    """Loss of an add-one-smoothed bigram model of the training data, on the same targets.

    Of a blend, pairs count as often as the blend reads their dataset.

    Raises:
        DataError: there is no validation set, or a dataset cannot be used.
    """
    data, model = config.run.data, config.program.model
    prefixes = [data.train] if isinstance(data.train, str) else [one.dataset for one in data.train]
    # Not the model's vocabulary, which may be padded: every impossible token weakens the smoothing.
    descriptions = [read_description(prefix) for prefix in prefixes]
    vocab = max(one.vocab if one else model.vocab for one in descriptions)
    counted = [Bigram.count(IndexedDataset(prefix), vocab) for prefix in prefixes]
    if not isinstance(data.train, str):
        sizes = [int(one.pair_counts.sum()) for one in counted]
        counted = [Bigram.weighted_sum(counted, blend_counts(data.train, sizes))]
    return counted[0].loss(validation_batches(data, config.program, vocab, None))
