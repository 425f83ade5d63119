"""Training batches, prefetched by Grain, and validation batches over one pass of a dataset."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from graphtrain.data.batches.blend import Blend, WeightedDataset, blend_counts
from graphtrain.data.batches.concat_packing import Batch
from graphtrain.data.batches.document_packing import Overlong
from graphtrain.data.batches.rows import Packing, PackingSettings
from graphtrain.errors import DataError
from lowering.machine import startup

_PREFETCH_THREADS = 4  # prefetch threads
_PREFETCH_BATCHES = 4  # prefetched batches held in memory
_MAX_LISTED_DOCUMENTS = 20  # documents per dataset that a message lists


class Loader:
    """Infinite iterator of training batches, each a function of the data, the seed and the step.

    The global batches do not depend on the number of data-parallel ranks: rank r of n yields rows
    r * sequences / n up to (r + 1) * sequences / n of each. In every epoch of a dataset, the order
    of the documents and then the order of the sequences made from them are shuffled again. With
    preference pairs, rows 2i and 2i + 1 are the chosen and the rejected answer of one pair, on
    every rank.

    Args:
        data: Path prefix of a dataset, or the parts of a blend.
        global_batch_size: Global batch size, in sequences.
        seq_len: Sequence length in tokens.
        seed: Seed of the shuffles.
        vocab: Vocabulary size of the model. None: token ids are not checked against it.
        isolate_documents: Isolate documents: batches contain segment ids (`documents`), so that
        attention
            does not cross document boundaries.
        packing: How documents become sequences. None: the default of `PackingSettings`.
        overlong: What to do with a document longer than a sequence, where documents are not cut.
        pairs: Require (True) or refuse (False) preference pairs. None: accept both.
        rank: Data-parallel rank whose rows this loader yields.
        ranks: Number of data-parallel ranks.
        start_step: Step of the first batch.

    Raises:
        DataError: a dataset cannot be used, or a token id is outside the vocabulary.
        ValueError: ranks does not divide the sequences or the pairs of a batch, or rank is not
            below ranks.
    """

    def __init__(
        self,
        data: str | Path | Sequence[WeightedDataset],
        *,
        global_batch_size: int,
        seq_len: int,
        seed: int,
        vocab: int | None = None,
        isolate_documents: bool = False,
        packing: Packing | None = None,
        overlong: Overlong = "error",
        pairs: bool | None = None,
        rank: int = 0,
        ranks: int = 1,
        start_step: int = 0,
    ) -> None:
        if global_batch_size % ranks or not 0 <= rank < ranks:
            raise ValueError(
                f"rank = {rank}, ranks = {ranks}, batch size = {global_batch_size}: rank must "
                "be from 0 to ranks - 1, and ranks must divide the batch size"
            )
        is_single = isinstance(data, str | Path)
        prefixes = [data] if is_single else [weighted.dataset for weighted in data]
        rows = PackingSettings(
            length=seq_len,
            vocab=vocab,
            isolate_documents=isolate_documents,
            packing=packing,
            overlong=overlong,
            preference_pairs=pairs,
        )
        self._packings = [rows.open(prefix, seed) for prefix in prefixes]
        datasets = [packing.dataset for packing in self._packings]
        samples_per_batch = _samples_per_batch(self._packings, global_batch_size)
        self._stream_identity: dict[str, Any] = {
            "seed": seed,
            "global_batch_size": global_batch_size,
            "seq_len": seq_len,
            "documents": sum(map(len, datasets)),
            "tokens": sum(len(dataset.tokens) for dataset in datasets),
        }
        packed = [packing.identity for packing in self._packings]
        if set(packed) != {"concat"}:
            self._stream_identity["packing"] = packed
        counts = [len(packing) for packing in self._packings]
        if is_single:
            samples = _shuffled_stream(counts[0], seed)
        else:
            blend = Blend(blend_counts(data, counts))
            # The state detects changed sizes or shares; the paths of the datasets may change.
            self._stream_identity["blend"] = [blend.counts.tolist(), counts]
            samples = _blended_stream(blend, counts, seed)
        if samples_per_batch % ranks:
            raise ValueError(
                f"ranks = {ranks} does not divide the {samples_per_batch} preference pairs "
                "of a batch"
            )
        # (samples_per_batch, 2): index of the dataset, index of the sequence in it. Grain's
        # `batch(1)` overflows (0.2.18), hence the map.
        unbatched = samples.map(lambda sample: sample[None])
        self._sample_indices = (
            unbatched if samples_per_batch == 1 else samples.batch(samples_per_batch)
        )
        rank_slice = slice(
            rank * samples_per_batch // ranks, (rank + 1) * samples_per_batch // ranks
        )
        self._batches = self._sample_indices.map(lambda samples: self._batch(samples[rank_slice]))
        self._start(start_step)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        batch = next(self._iterator)
        self._step += 1
        return batch

    def state(self) -> dict[str, Any]:
        """Return the position as JSON: the next step, and all that determines the batch order."""
        return {"step": self._step, **self._stream_identity}

    def restore(self, state: dict[str, Any]) -> None:
        """Resume from a position that `state` returned, on any number of ranks.

        Raises:
            DataError: the position belongs to different data, another seed or another batch shape.
        """
        for name in {**self._stream_identity, "blend": None, "packing": None}:
            saved, value = state.get(name), self._stream_identity.get(name)
            if saved != value:
                prefixes = ", ".join(packing.dataset.prefix for packing in self._packings)
                raise DataError(
                    f"{prefixes}: cannot resume at step {state.get('step')}: {name} was {saved} "
                    f"and is now {value}; restore the setting or the dataset, or restart from "
                    "step 0"
                )
        self._iterator.close()
        self._start(state["step"])

    def documents(self, step: int) -> dict[str, np.ndarray]:
        """Return the document indices in the global batch of a step, ascending, by dataset."""
        documents_by_prefix: dict[str, list[np.ndarray]] = {}
        for owner, index in self._sample_indices[step]:
            packing = self._packings[owner]
            documents_by_prefix.setdefault(packing.dataset.prefix, []).append(
                packing.documents(int(index))
            )
        return {
            prefix: np.unique(np.concatenate(arrays))
            for prefix, arrays in documents_by_prefix.items()
        }

    def describe(self, step: int) -> str:
        """Describe the documents of a step for a message."""
        descriptions = []
        for prefix, documents in self.documents(step).items():
            listed = ", ".join(str(document) for document in documents[:_MAX_LISTED_DOCUMENTS])
            omitted = len(documents) - _MAX_LISTED_DOCUMENTS
            descriptions.append(
                f"documents {listed}{f' and {omitted} more' if omitted > 0 else ''} of {prefix}"
            )
        return "; ".join(descriptions)

    def close(self) -> None:
        """Stop prefetching."""
        self._iterator.close()

    def _batch(self, samples: np.ndarray) -> Batch:
        """Return the rows at (dataset, sequence) index pairs, in the order of `samples`."""
        if len(self._packings) == 1:
            return self._packings[0].batch(samples[:, 1])
        rows = [self._packings[owner].batch([index]) for owner, index in samples]
        return {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}

    def _start(self, step: int) -> None:
        grain = _grain()
        self._step = step
        options = grain.ReadOptions(
            num_threads=_PREFETCH_THREADS, prefetch_buffer_size=_PREFETCH_BATCHES
        )
        self._iterator = iter(self._batches[step:].to_iter_dataset(options))
        self._iterator.start_prefetch()


def evaluation_batches(
    prefix: str | Path,
    *,
    batch_size: int,
    seq_len: int,
    vocab: int | None = None,
    isolate_documents: bool = False,
    packing: Packing | None = None,
    overlong: Overlong = "error",
    pairs: bool | None = None,
) -> Iterator[Batch]:
    """Yield the batches of one pass over a dataset, unshuffled.

    In text, every token but the first is a target once. In conversations, only tokens in the loss
    mask are targets, and rows come in packing order. All batches have the same shape: the last
    sequence and the last batch are padded with weight 0. With `isolate_documents`, the
    first token of each document is not a target.

    The arguments are those of `Loader`.

    Raises:
        DataError: the dataset cannot be used, or a token id is outside the vocabulary.
    """
    rows = PackingSettings(
        length=seq_len,
        vocab=vocab,
        isolate_documents=isolate_documents,
        packing=packing,
        overlong=overlong,
        preference_pairs=pairs,
    )
    packed = rows.open(prefix)
    samples_per_batch = _samples_per_batch([packed], batch_size)
    for first in range(0, len(packed), samples_per_batch):
        last = min(first + samples_per_batch, len(packed))
        yield packed.batch([*range(first, last), *[-1] * (first + samples_per_batch - last)])


def _samples_per_batch(packings: Sequence[Any], sequences: int) -> int:
    """Return the number of sequences, or of preference pairs, in a batch."""
    rows = {packing.rows_per_index for packing in packings}
    prefixes = ", ".join(packing.dataset.prefix for packing in packings)
    if len(rows) > 1:
        raise DataError(
            f"{prefixes}: a blend cannot mix preference pairs with other data; use datasets of "
            "one kind"
        )
    (rows_per_sample,) = rows
    if sequences % rows_per_sample:
        raise DataError(
            f"{prefixes}: contains preference pairs of two sequences each, which do not fit into "
            f"a batch of {sequences} sequences; make batch.global_batch_size / batch.microbatches "
            "even"
        )
    return sequences // rows_per_sample


def _shuffled_stream(count: int, seed: int, owner: int = 0) -> Any:
    """Return an infinite Grain dataset of (owner, sequence index) for one dataset, shuffled."""
    return (
        _grain()
        .MapDataset.range(count)
        .shuffle(seed % 2**32)  # Grain's limit
        .repeat()  # reshuffles in each repetition
        .map_with_index(lambda position, row: np.array([owner, position // count * count + row]))
    )


def _blended_stream(blend: Blend, counts: Sequence[int], seed: int) -> Any:
    """Return an infinite Grain dataset of (owner, sequence index) for a blend."""
    streams = [_shuffled_stream(count, seed, owner) for owner, count in enumerate(counts)]

    def sample_at(position: int, _: int) -> np.ndarray:
        owner, index = blend.locate(position)
        return streams[owner][index]

    return _grain().MapDataset.range(1).repeat().map_with_index(sample_at)


def _grain() -> Any:
    """Import Grain without Orbax.

    Only training needs Grain. Its Orbax handlers are unused, and importing Orbax takes twice as
    long as the rest of Grain.
    """
    return startup.import_without("grain", "orbax.checkpoint")
