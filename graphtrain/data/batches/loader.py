"""Batches for training, read ahead by Grain; batches for validation, once through."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from graphtrain.data.batches.blend import Blend, Part, blend_counts
from graphtrain.data.batches.document_packing import Longer
from graphtrain.data.batches.packing import Batch
from graphtrain.data.batches.rows import HowPacked, Rows
from graphtrain.errors import DataError
from graphtrain.importing import import_without

_THREADS = 4  # reading ahead
_AHEAD = 4  # batches held in memory
_NAMED = 20  # documents of a dataset that a message names


class Loader:
    """Batches without end; the batch of a step is a function of the data, the seed and the step.

    The stream does not depend on the number of data-parallel ranks: rank r of n yields rows
    r * sequences / n up to (r + 1) * sequences / n of each global batch. Each epoch of a dataset
    takes its documents, and then the sequences made of them, in another order. Of pairs of answers,
    rows 2i and 2i + 1 are the chosen and the rejected one of a pair, on every rank.

    Args:
        data: The prefix of a dataset, or the parts of a blend.
        sequences: In a global batch.
        length: Tokens of a sequence.
        seed: Of the order.
        vocab: Tokens of the model; without it, tokens are not compared with it.
        apart: Whether batches say which tokens are of one document.
        packing: How documents become sequences; None: as `Rows` chooses.
        longer: What becomes of documents that do not fit into a sequence, where they stay whole.
        pairs: Whether they must be pairs of answers; None: either will do.
        rank: Which part of each batch this loader yields.
        ranks: Parts in all.
        start_step: Of the first batch.

    Raises:
        DataError: a dataset cannot be used, or a token is outside the vocabulary.
        ValueError: ranks does not divide sequences or pairs, or rank is not one of ranks.
    """

    def __init__(
        self,
        data: str | Path | Sequence[Part],
        *,
        sequences: int,
        length: int,
        seed: int,
        vocab: int | None = None,
        apart: bool = False,
        packing: HowPacked | None = None,
        longer: Longer = "refuse",
        pairs: bool | None = None,
        rank: int = 0,
        ranks: int = 1,
        start_step: int = 0,
    ) -> None:
        if sequences % ranks or not 0 <= rank < ranks:
            raise ValueError(f"rank {rank} of {ranks} ranks, {sequences} sequences in a batch")
        alone = isinstance(data, str | Path)
        prefixes = [data] if alone else [part.dataset for part in data]
        rows = Rows(
            length=length, vocab=vocab, apart=apart, packing=packing, longer=longer, pairs=pairs
        )
        self._packings = [rows.open(prefix, seed) for prefix in prefixes]
        datasets = [packing.dataset for packing in self._packings]
        units = _units(self._packings, sequences)
        self._origin: dict[str, Any] = {
            "seed": seed,
            "sequences": sequences,
            "length": length,
            "documents": sum(map(len, datasets)),
            "tokens": sum(len(dataset.tokens) for dataset in datasets),
        }
        packed = [packing.identity for packing in self._packings]
        if set(packed) != {"cut"}:
            self._origin["packing"] = packed
        counts = [len(packing) for packing in self._packings]
        if alone:
            places = _alone(counts[0], seed)
        else:
            blend = Blend(blend_counts(data, counts))
            # With these, other sizes or shares are noticed; where the datasets are may change.
            self._origin["blend"] = [blend.counts.tolist(), counts]
            places = _blended(blend, counts, seed)
        if units % ranks:
            raise ValueError(f"{ranks} ranks, {units} pairs in a batch")
        # (units, 2): the dataset, and which of its own. Grain's batches of one overflow (0.2.18).
        one = places.map(lambda place: place[None])
        self._places = one if units == 1 else places.batch(units)
        mine = slice(rank * units // ranks, (rank + 1) * units // ranks)
        self._batches = self._places.map(lambda places: self._batch(places[mine]))
        self._start(start_step)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        batch = next(self._iterator)
        self._step += 1
        return batch

    def state(self) -> dict[str, Any]:
        """The position, as JSON: the next step, and what the order of the stream depends on."""
        return {"step": self._step, **self._origin}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a position that `state` returned, on any number of ranks.

        Raises:
            DataError: the position belongs to other data, another seed or shape of batch.
        """
        for name in {**self._origin, "blend": None, "packing": None}:
            was, value = state.get(name), self._origin.get(name)
            if was != value:
                prefixes = ", ".join(packing.dataset.prefix for packing in self._packings)
                raise DataError(
                    f"{prefixes}: cannot continue at step {state.get('step')}: {name} was {was} "
                    f"and is {value}; restore the setting or the dataset, or start from step 0"
                )
        self._iterator.close()
        self._start(state["step"])

    def documents(self, step: int) -> dict[str, np.ndarray]:
        """The numbers of the documents in the global batch of a step, ascending, by dataset."""
        touched: dict[str, list[np.ndarray]] = {}
        for owner, index in self._places[step]:
            packing = self._packings[owner]
            touched.setdefault(packing.dataset.prefix, []).append(packing.documents(int(index)))
        return {prefix: np.unique(np.concatenate(found)) for prefix, found in touched.items()}

    def describe(self, step: int) -> str:
        """The documents of a step, for a message."""
        parts = []
        for prefix, documents in self.documents(step).items():
            some = ", ".join(str(number) for number in documents[:_NAMED])
            more = len(documents) - _NAMED
            parts.append(f"documents {some}{f' and {more} more' if more > 0 else ''} of {prefix}")
        return "; ".join(parts)

    def close(self) -> None:
        """Stop reading ahead."""
        self._iterator.close()

    def _batch(self, places: np.ndarray) -> Batch:
        """Rows from the datasets they belong to, in the order of the places."""
        if len(self._packings) == 1:
            return self._packings[0].batch(places[:, 1])
        rows = [self._packings[owner].batch([index]) for owner, index in places]
        return {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}

    def _start(self, step: int) -> None:
        grain = _grain()
        self._step = step
        options = grain.ReadOptions(num_threads=_THREADS, prefetch_buffer_size=_AHEAD)
        self._iterator = iter(self._batches[step:].to_iter_dataset(options))
        self._iterator.start_prefetch()


def evaluation_batches(
    prefix: str | Path,
    *,
    sequences: int,
    length: int,
    vocab: int | None = None,
    apart: bool = False,
    packing: HowPacked | None = None,
    longer: Longer = "refuse",
    pairs: bool | None = None,
) -> Iterator[Batch]:
    """A dataset once through in its own order; every token but the first is a target once.

    Of conversations, only what is learned is a target, and rows are in the order of their packing.
    All batches have the same shape: the last sequence and the last batch are padded with weight 0.
    With documents apart, the first token of each is no target.

    Raises:
        DataError: the dataset cannot be used, or a token is outside the vocabulary.
    """
    rows = Rows(
        length=length, vocab=vocab, apart=apart, packing=packing, longer=longer, pairs=pairs
    )
    packed = rows.open(prefix)
    units = _units([packed], sequences)
    for first in range(0, len(packed), units):
        last = min(first + units, len(packed))
        yield packed.batch([*range(first, last), *[-1] * (first + units - last)])


def _units(packings: Sequence[Any], sequences: int) -> int:
    """How many sequences, or pairs of them, a batch holds."""
    rows = {packing.rows for packing in packings}
    prefixes = ", ".join(packing.dataset.prefix for packing in packings)
    if len(rows) > 1:
        raise DataError(f"{prefixes}: pairs of answers are blended only with others")
    (each,) = rows
    if sequences % each:
        raise DataError(
            f"{prefixes}: holds pairs of answers, and a batch of {sequences} sequences would part "
            "one; make batch.sequences, over microbatches, even"
        )
    return sequences // each


def _alone(count: int, seed: int, owner: int = 0) -> Any:
    """A Grain dataset: at each position, a dataset and the number of a sequence of it."""
    return (
        _grain()
        .MapDataset.range(count)
        .shuffle(seed % 2**32)  # Grain's limit
        .repeat()  # shuffled anew each time
        .map_with_index(lambda position, row: np.array([owner, position // count * count + row]))
    )


def _blended(blend: Blend, counts: Sequence[int], seed: int) -> Any:
    """The same, of several datasets."""
    streams = [_alone(count, seed, owner) for owner, count in enumerate(counts)]

    def at(position: int, _: int) -> np.ndarray:
        owner, number = blend.place(position)
        return streams[owner][number]

    return _grain().MapDataset.range(1).repeat().map_with_index(at)


def _grain() -> Any:
    """Grain, imported here as only training needs it; its handlers for Orbax, which takes twice as
    long to import as the rest, are not used."""
    return import_without("grain", "orbax.checkpoint")
