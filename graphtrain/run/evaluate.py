"""Validation loss, computed by the compiled evaluation step."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import lowering
from graphtrain.cache import Cache
from graphtrain.checkpoints.checkpoint import restore_parameters
from graphtrain.checkpoints.layer_order import layer_order_of
from graphtrain.checkpoints.pruned import read_checkpoint
from graphtrain.checkpoints.steps import missing_checkpoint, saved_steps
from graphtrain.compile.html import html_facts
from graphtrain.config.phases import program_of_step
from graphtrain.config.resolve import ResolvedProgram
from graphtrain.config.schema import Config, Data, Program, Run, is_streamed
from graphtrain.data.batches.blend import blend_counts
from graphtrain.data.batches.evaluation_batches import evaluation_batches
from graphtrain.data.indexed.dataset import WHOLE_INDEX, IndexedDataset, IndexShare
from graphtrain.data.indexed.description import read_description
from graphtrain.errors import DataError
from graphtrain.models.lora.trainable import has_frozen_weights
from graphtrain.run.agreement import on_all_ranks
from graphtrain.run.batch_placement import BatchPlacement, index_share
from graphtrain.run.bigram_baseline import Bigram
from graphtrain.run.data_check import verify_whole
from graphtrain.run.data_sources import open_sources
from graphtrain.run.initial_weights import InitialWeights
from graphtrain.run.programs import LoadedPrograms
from graphtrain.run.streaming.open import open_streams
from graphtrain.run.trained_tokenizer import check_trained_tokenizer
from graphtrain.run.training_data import row_images
from lowering.machine.target import Target
from lowering.trees import Tree
from lowering.xla import distributed


@dataclass(frozen=True)
class Evaluation:
    """Result of the evaluation of a checkpoint on the entire validation set."""

    step: int  # of the checkpoint; 0 for initial weights
    validation_loss: float  # nats per token; per pair for preferences
    perplexity: float
    bigram_loss: float | None = None  # of a bigram model of the training data, if asked for

    def _repr_html_(self) -> str:
        return html_facts("evaluation", vars(self))


def validation_loss(
    evaluate: Any,
    weights: tuple[Tree, ...],
    batches: Iterable[dict[str, np.ndarray]],
    target: Target,
    *,
    should_stop: Callable[[int], bool] = lambda batch: False,
) -> float | None:
    """Return the mean loss in nats over all tokens of the loss mask; for preferences, over pairs.

    None if the evaluation was given up.

    Args:
        evaluate: The loaded evaluation step.
        weights: On the devices, sharded as the step requires: the trained parameters, then the
            frozen weights if there are any.
        batches: Batches of the step's shape; of each, the rows that `BatchPlacement` of the step
            names.
        target: The machine.
        should_stop: Called before each batch with its number; if true, the evaluation is given up.

    Raises:
        DataError: the loss mask of every batch is empty.
    """
    placement = BatchPlacement(evaluate.inputs("batch"), target)
    losses, targets = [], []
    for number, batch in enumerate(batches):
        if should_stop(number):
            return None
        metrics = evaluate(*weights, placement.to_devices(batch))["metrics"]
        losses.append(float(metrics["loss_sum"]))
        targets.append(float(metrics["targets"]))
    if not any(targets):
        raise _empty_loss_mask_error()
    return math.fsum(losses) / math.fsum(targets)


def check_validation(batches: Iterable[dict[str, np.ndarray]], program: Program) -> None:
    """Check before training that the loss mask of some validation example is not empty.

    Reads the validation set only up to the first such example.

    Raises:
        DataError: the validation set cannot be used, or its loss mask is empty.
    """
    # A pair of rows is one example; both must have a target.
    rows = 2 if program.loss.kind == "dpo" else 1
    for batch in batches:
        counts = (batch["weights"] != 0).any(-1)
        if counts.reshape(-1, rows).all(-1).any():
            return
    raise _empty_loss_mask_error()


def _empty_loss_mask_error() -> DataError:
    return DataError(
        "run.data.validation: no token of it counts in the loss, because no document has at least "
        "two tokens, or no answer fits into program.batch.seq_len; use other validation data"
    )


def validation_batches(
    data: Data,
    program: Program,
    vocab: int,
    limit: int | None,
    *,
    rows: np.ndarray | None = None,
    share: IndexShare = WHOLE_INDEX,
) -> Iterable[dict[str, np.ndarray]]:
    """Return the validation set in its stored order, in batches of the evaluation step's shape.

    Args:
        data: Settings of the data.
        program: Settings of the program.
        vocab: Vocabulary size against which token ids are checked.
        limit: Maximum number of global batches. None: all.
        rows: Rows of each batch to read, ascending. None: all.
        share: Part of the index that this process checks.

    Raises:
        DataError: there is no validation set, or it cannot be used.
    """
    if data.validation is None:
        raise DataError("run.data.validation is not set, so there is nothing to evaluate on")
    batch = program.batch
    return evaluation_batches(
        data.only(data.validation).local.train_datasets[0],
        batch_size=batch.microbatch_rows,
        seq_len=batch.seq_len,
        vocab=vocab,
        isolate_documents=not batch.cross_document_attention,
        packing=data.packing,
        overlong=data.overlong,
        pairs=program.loss.kind == "dpo",
        rows=rows,
        # The step evaluates one microbatch; the limit must not depend on how many there are.
        limit=None if limit is None else limit * batch.global_batch_size,
        index_share=share,
        sources=open_sources(data),
        streams=open_streams(data.only(data.validation)),
        images=row_images(program),
    )


def verify_data(run: Run, *, bigram: bool = False) -> None:
    """Verify the validation set on rank 0, for `checkpoint_loss`; for a bigram model, all data.

    Raises:
        DataError: there is no validation set, or a dataset is damaged.
    """
    data = run.data
    if data.validation is None:
        raise DataError("run.data.validation is not set, so there is nothing to evaluate on")
    if bigram and data.user_code:
        raise DataError("--bigram reads datasets of files, and run.data names code")
    if bigram and any(map(is_streamed, data.train_datasets)):
        raise DataError(
            "--bigram reads all of the training data, which is in an object store; download it "
            "with graphtrain data pull"
        )
    names = [data.validation, *(data.train_datasets if bigram else ())]
    on_all_ranks(lambda: verify_whole(data, names if distributed.rank() == 0 else []))


def checkpoint_loss(
    program: ResolvedProgram, run: Run, cache: Cache, *, compile_hint: str, step: int | None
) -> Evaluation:
    """Return the validation loss and perplexity of a checkpoint, the last one if `step` is None.

    For a run without checkpoints, evaluates the weights that it would start from, as step 0. The
    data is verified before, by `verify_data`.

    Raises:
        MissingProgram: the evaluation step is not in the cache.
        TrainingError: there is no such checkpoint.
        DataError: the validation set cannot be used, or was prepared with another tokenizer.
    """
    on_all_ranks(lambda: check_trained_tokenizer(run, step))
    directory = Path(run.directory) / "checkpoints"
    steps = saved_steps(directory)
    initial_weights = None
    if steps or not step:
        initial_weights = on_all_ranks(
            lambda: InitialWeights.open(program, run, resuming=bool(steps))
        )
    if (initial_weights is None or steps) and (
        not steps or (step is not None and step not in steps)
    ):
        raise missing_checkpoint(directory, steps)
    program = program_of_step(program, (steps[-1] if steps else 0) if step is None else step)
    evaluate = LoadedPrograms(program, cache, ["evaluate"], compile_hint)["evaluate"]
    with lowering.backend(program.target).forbid_tracing():
        described = evaluate.inputs("parameters")
        if steps:
            order = layer_order_of(program)
            step, parameters = read_checkpoint(
                directory,
                step,
                lambda step: restore_parameters(
                    directory, step or 0, described, order, program.settings
                ),
            )
        else:
            assert initial_weights is not None
            parameters = initial_weights.parameters(described)
        weights = (parameters,)
        if initial_weights is not None and has_frozen_weights(program.settings):
            frozen = initial_weights.frozen(evaluate.inputs("frozen"), described)
            weights = parameters, frozen
        rows = BatchPlacement(evaluate.inputs("batch"), program.target).rows
        batches = on_all_ranks(
            lambda: validation_batches(
                run.data,
                program.settings,
                program.model.vocab_tokens,
                None,
                rows=rows,
                share=index_share(),
            )
        )
        loss = validation_loss(evaluate, weights, batches, program.target)
    assert loss is not None  # no evaluation is given up here
    return Evaluation(step or 0, loss, perplexity(loss))


def perplexity(loss: float) -> float:
    """Return the perplexity for a mean loss in nats; infinity if it overflows a float."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def bigram_loss(config: Config) -> float:
    """Return the validation loss of a bigram model of the training data, with add-one smoothing.

    For a blend of datasets, bigrams are weighted as often as the blend reads their dataset. The
    data is verified before, by `verify_data`.

    Raises:
        DataError: a dataset cannot be used.
    """
    data, model = config.run.data, config.program.model
    prefixes = (
        [data.train] if isinstance(data.train, str) else [source.dataset for source in data.train]
    )
    # Not the vocabulary of the model: if it is padded, smoothing would assign probability to tokens
    # that never occur.
    descriptions = [read_description(prefix) for prefix in prefixes]
    vocab = max(description.vocab if description else model.vocab for description in descriptions)
    bigrams = [Bigram.count(IndexedDataset(prefix), vocab) for prefix in prefixes]
    if not isinstance(data.train, str):
        sizes = [int(bigram.pair_counts.sum()) for bigram in bigrams]
        bigrams = [Bigram.weighted_sum(bigrams, blend_counts(data.train, sizes))]
    return bigrams[0].loss(validation_batches(data, config.program, vocab, None))
