"""Validation loss with a compiled evaluation step."""

import math
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

import lowering
from graphtrain.beginning import Beginning
from graphtrain.cache import Cache
from graphtrain.checkpoint import restore_parameters, saved_steps
from graphtrain.config.schema import Batch, Config
from graphtrain.data.bigram import Bigram
from graphtrain.data.description import read_description
from graphtrain.data.indexed import IndexedDataset
from graphtrain.data.loader import evaluation_batches
from graphtrain.errors import DataError, TrainingError
from graphtrain.loading import Programs
from graphtrain.models.tuned import keeps_weights
from lowering.target import Target
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
    """
    put, described = lowering.backend(target).put, evaluate.inputs("batch")
    losses, targets = [], []
    for batch in batches:
        metrics = evaluate(*weights, put(batch, described))["metrics"]
        losses.append(float(metrics["loss_sum"]))
        targets.append(float(metrics["targets"]))
    return math.fsum(losses) / math.fsum(targets)


def validation_batches(
    prefix: str, batch: Batch, vocab: int, limit: int | None
) -> Iterable[dict[str, np.ndarray]]:
    """The validation set in its own order, in batches of the evaluation step's shape."""
    sequences = batch.sequences // batch.microbatches
    batches = evaluation_batches(
        prefix,
        sequences=sequences,
        length=batch.length,
        vocab=vocab,
        apart=batch.documents == "apart",
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
    prefix = _validation_set(config)
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
            parameters = restore_parameters(directory, step, described)
        else:
            assert beginning is not None
            parameters = beginning.parameters(described)
        weights = (parameters,)
        if beginning is not None and keeps_weights(program):
            weights = parameters, beginning.frozen(evaluate.inputs("frozen"))
        batches = validation_batches(prefix, program.batch, program.model.vocab, None)
        loss = validation_loss(evaluate, weights, batches, target)
    return {"step": step, "validation_loss": loss, "perplexity": math.exp(loss)}


def bigram_loss(config: Config) -> float:
    """Loss of an add-one-smoothed bigram model of the training set, on the same targets.

    Raises:
        DataError: there is no validation set, or the training set is a blend.
    """
    if not isinstance(config.run.data.train, str):
        raise DataError("run.data.train is a blend; a bigram model is counted in one dataset")
    dataset = IndexedDataset(config.run.data.train)
    # Not the model's vocabulary, which may be padded: every impossible token weakens the smoothing.
    description = read_description(config.run.data.train)
    vocab = description.vocab if description else config.program.model.vocab
    batches = validation_batches(_validation_set(config), config.program.batch, vocab, None)
    return Bigram.count(dataset, vocab).loss(batches)


def _validation_set(config: Config) -> str:
    if config.run.data.validation is None:
        raise DataError("run.data.validation is not set, so there is nothing to evaluate on")
    return config.run.data.validation
