"""Batches for training, read ahead by Grain; batches for validation, once through."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from graphtrain.data.indexed import IndexedDataset
from graphtrain.data.packing import Batch, Packing
from graphtrain.errors import DataError

_THREADS = 4  # reading ahead
_AHEAD = 4  # batches held in memory


class Loader:
    """Batches without end; the batch of a step is a function of the dataset, the seed and the step.

    The stream does not depend on the number of data-parallel ranks: rank r of n yields rows
    r * sequences / n up to (r + 1) * sequences / n of each global batch. Each epoch takes the
    documents, and then the sequences made of them, in another order.

    Raises:
        DataError: the dataset cannot be used, or a token is outside the vocabulary.
        ValueError: ranks does not divide sequences, or rank is not one of ranks.
    """

    def __init__(
        self,
        prefix: str | Path,
        *,
        sequences: int,
        length: int,
        seed: int,
        vocab: int | None = None,
        rank: int = 0,
        ranks: int = 1,
        start_step: int = 0,
    ) -> None:
        if sequences % ranks or not 0 <= rank < ranks:
            raise ValueError(f"rank {rank} of {ranks} ranks, {sequences} sequences in a batch")
        dataset = IndexedDataset(prefix)
        self._packing = Packing(dataset, length, seed=seed, vocab=vocab)
        self._origin = {
            "seed": seed,
            "sequences": sequences,
            "length": length,
            "documents": len(dataset),
            "tokens": len(dataset.tokens),
        }
        self._indices = _sequence_indices(len(self._packing), seed, sequences)
        mine = slice(rank * sequences // ranks, (rank + 1) * sequences // ranks)
        self._batches = self._indices.map(lambda indices: self._packing.batch(indices[mine]))
        self._start(start_step)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        batch = next(self._iterator)
        self._step += 1
        return batch

    def state(self) -> dict[str, int]:
        """The position, as JSON: the next step, and what the order of the stream depends on."""
        return {"step": self._step, **self._origin}

    def restore(self, state: dict[str, int]) -> None:
        """Continue from a position that `state` returned, on any number of ranks.

        Raises:
            DataError: the position belongs to another dataset, seed or shape of batch.
        """
        for name, value in self._origin.items():
            if state.get(name) != value:
                raise DataError(
                    f"{self._packing.dataset.prefix}: cannot continue at step {state.get('step')}: "
                    f"{name} was {state.get(name)} and is {value}; restore the setting or the "
                    "dataset, or start from step 0"
                )
        self._iterator.close()
        self._start(state["step"])

    def document_ids(self, step: int) -> np.ndarray:
        """The numbers of the documents in the global batch of a step, ascending."""
        touched = [self._packing.documents(int(index)) for index in self._indices[step]]
        return np.unique(np.concatenate(touched))

    def close(self) -> None:
        """Stop reading ahead."""
        self._iterator.close()

    def _start(self, step: int) -> None:
        import grain

        self._step = step
        options = grain.ReadOptions(num_threads=_THREADS, prefetch_buffer_size=_AHEAD)
        self._iterator = iter(self._batches[step:].to_iter_dataset(options))
        self._iterator.start_prefetch()


def evaluation_batches(
    prefix: str | Path, *, sequences: int, length: int, vocab: int | None = None
) -> Iterator[Batch]:
    """A dataset once through in its own order; every token but the first is a target once.

    All batches have the same shape: the last sequence and the last batch are padded with weight 0.

    Raises:
        DataError: the dataset cannot be used, or a token is outside the vocabulary.
    """
    packing = Packing(IndexedDataset(prefix), length, vocab=vocab)
    for first in range(0, len(packing), sequences):
        last = min(first + sequences, len(packing))
        yield packing.batch([*range(first, last), *[-1] * (first + sequences - last)])


def _sequence_indices(count: int, seed: int, sequences: int) -> Any:
    """A Grain dataset: at step s, the numbers of the sequences in its global batch."""
    import grain  # here, as it takes a quarter of a second and only training needs it

    return (
        grain.MapDataset.range(count)
        .shuffle(seed % 2**32)  # Grain's limit
        .repeat()  # shuffled anew each time
        .map_with_index(lambda position, row: position // count * count + row)
        .batch(sequences)
    )
