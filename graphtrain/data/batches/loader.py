"""Training batches, prefetched by Grain."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from graphtrain.data.batches.blend import Blend, WeightedDataset, blend_counts
from graphtrain.data.batches.concat_packing import Batch
from graphtrain.data.batches.document_packing import Overlong
from graphtrain.data.batches.positions import number_in, step_and_sample
from graphtrain.data.batches.row_images import RowImages
from graphtrain.data.batches.row_selection import RowSelection, samples_per_batch
from graphtrain.data.batches.rows import (
    BATCHES_AHEAD,
    NO_STREAMS,
    Packing,
    PackingSettings,
    Streams,
)
from graphtrain.data.batches.sample_streams import blended_stream, import_grain, shuffled_stream
from graphtrain.data.batches.sources import NO_SOURCES, Sources
from graphtrain.data.indexed.dataset import WHOLE_INDEX, IndexShare
from graphtrain.errors import DataError

_PREFETCH_THREADS = 4  # prefetch threads
_PREFETCH_BATCHES = 4  # prefetched batches held in memory
_PADDING = np.array([0, -1])  # dataset and sequence of an empty row
_MAX_LISTED_DOCUMENTS = 20  # documents per dataset that a message lists


class Loader:
    """Infinite iterator of training batches, each a function of the data, the seed and the step.

    After `continue_from`, it is also one of the sequence at which another loader stopped.

    The global batches do not depend on which of their rows a loader reads: the loaders of several
    processes read different rows of the same batches. In every epoch of a dataset, the order
    of the documents and then the order of the sequences made from them are shuffled again. With
    preference pairs, rows 2i and 2i + 1 are the chosen and the rejected answer of one pair.

    Args:
        data: Path prefix of a dataset, or the parts of a blend.
        global_batch_size: Global batch size, in sequences.
        padding_sequences: Number of empty rows after those of the global batch, to fill the mesh.
        seq_len: Sequence length in tokens.
        seed: Seed of the shuffles.
        vocab: Vocabulary size of the model. None: token ids are not checked against it.
        isolate_documents: Isolate documents: batches contain segment ids (`documents`), so that
        attention
            does not cross document boundaries.
        packing: How documents become sequences. None: the default of `PackingSettings`.
        overlong: What to do with a document longer than a sequence, where documents are not cut.
        pairs: Require (True) or refuse (False) preference pairs. None: accept both.
        rows: Rows of the global batch to read and to yield, ascending. None: all.
        index_share: Part of the index of each dataset that this process checks.
        sources: Datasets of the user's code, by the reference that stands for a path prefix.
        streams: Blocks of datasets that are not on this machine, by path prefix.
        images: Images that the program takes with each row. None: none.
        start_step: Step of the first batch.

    Raises:
        DataError: a dataset cannot be used, or a token id is outside the vocabulary.
    """

    def __init__(
        self,
        data: str | Path | Sequence[WeightedDataset],
        *,
        global_batch_size: int,
        padding_sequences: int = 0,
        seq_len: int,
        seed: int,
        vocab: int | None = None,
        isolate_documents: bool = False,
        packing: Packing | None = None,
        overlong: Overlong = "error",
        pairs: bool | None = None,
        rows: np.ndarray | None = None,
        index_share: IndexShare = WHOLE_INDEX,
        sources: Sources = NO_SOURCES,
        streams: Streams = NO_STREAMS,
        images: RowImages | None = None,
        start_step: int = 0,
    ) -> None:
        is_single = isinstance(data, str | Path)
        prefixes = [data] if is_single else [weighted.dataset for weighted in data]
        settings = PackingSettings(
            length=seq_len,
            vocab=vocab,
            isolate_documents=isolate_documents,
            packing=packing,
            overlong=overlong,
            index_share=index_share,
            preference_pairs=pairs,
            sources=sources,
            streams=streams,
            images=images,
        )
        self._ahead = BATCHES_AHEAD if streams else 0
        self._lock = threading.Lock()  # Grain reads batches in several threads
        self._packings = [settings.open(prefix, seed) for prefix in prefixes]
        datasets = [packing.dataset for packing in self._packings]
        self._samples_per_batch = samples_per_batch(self._packings, global_batch_size)
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
            self._samples = shuffled_stream(counts[0], seed)
        else:
            blend = Blend(blend_counts(data, counts))
            # The state detects changed sizes or shares; the paths of the datasets may change.
            self._stream_identity["blend"] = [blend.counts.tolist(), counts]
            self._samples = blended_stream(blend, counts, seed)
        count = global_batch_size + padding_sequences
        selection = RowSelection(rows, count, self._packings[0].rows_per_index)
        self._batches = (
            import_grain()
            .MapDataset.range(1)
            .repeat()
            .map_with_index(lambda step, _: self._batch(step, selection))
        )
        self._origin = 0  # first sample of step 0, if all steps had this batch
        self._start(start_step)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        batch = next(self._iterator)
        self._step += 1
        return batch

    def state(self) -> dict[str, Any]:
        """Return the position as JSON: the next step, and all that determines the batch order.

        It names the next sample, a sequence or a pair, if it does not follow from the step: after
        another batch size or sequence length.
        """
        sample = self._first_sample(self._step)
        is_usual = sample == self._step * self._samples_per_batch
        return {"step": self._step, **({} if is_usual else {"sample": sample})} | (
            self._stream_identity
        )

    def state_after(self, step: int, *, at: int) -> dict[str, Any]:
        """Return a position in which the data after `step` steps comes at step `at`."""
        return {"step": at, "sample": self._first_sample(step)} | self._stream_identity

    def leave_out(self, state: dict[str, Any]) -> None:
        """Move on to a position of `state_after`, unless this one is beyond it already.

        Raises:
            DataError: the position belongs to different data or another seed.
        """
        names = ("global_batch_size", "seq_len")
        is_same_batch = all(state.get(name) == self._stream_identity[name] for name in names)
        if is_same_batch and number_in(state, "sample") <= self._first_sample(self._step):
            return
        self.continue_from(state)

    def restore(self, state: dict[str, Any]) -> None:
        """Resume from a position that `state` returned, on any number of ranks.

        Raises:
            DataError: the position belongs to different data, another seed or another batch shape.
        """
        self._check_stream(state)
        self._move_to(*step_and_sample(state, self._samples_per_batch))

    def continue_from(self, state: dict[str, Any]) -> None:
        """Continue where a loader with another batch size or sequence length stopped.

        With the same sequence length, the next sample is the one that it would have read. Otherwise
        the data is cut into other sequences, in another order, and the next sample is the first
        that begins after as many tokens; with one document per sequence, after as many documents.

        Raises:
            DataError: the position belongs to different data or another seed.
        """
        seq_len = self._stream_identity["seq_len"]
        # The periods of a blend by epochs follow from the numbers of sequences.
        recut = ("blend",) if state.get("seq_len") != seq_len else ()
        self._check_stream(state, other=("global_batch_size", "seq_len", *recut))
        size, length = (number_in(state, name) for name in ("global_batch_size", "seq_len"))
        step, sample = step_and_sample(state, size // self._packings[0].rows_per_index)
        if not any(packing.identity.startswith("pad") for packing in self._packings):
            sample = -(-sample * length // seq_len)
        self._move_to(step, sample)

    def _move_to(self, step: int, sample: int) -> None:
        self._iterator.close()
        self._origin = sample - step * self._samples_per_batch
        self._start(step)

    def _check_stream(self, state: dict[str, Any], other: Collection[str] = ()) -> None:
        """Check that a position is of this stream, except for some of what determines it."""
        for name in {**self._stream_identity, "blend": None, "packing": None}:
            saved, value = state.get(name), self._stream_identity.get(name)
            if saved != value and name not in other:
                prefixes = ", ".join(packing.dataset.prefix for packing in self._packings)
                raise DataError(
                    f"{prefixes}: cannot resume at step {state.get('step')}: {name} was {saved} "
                    f"and is now {value}; restore the setting or the dataset, or restart from "
                    "step 0"
                )

    def documents(self, step: int) -> dict[str, np.ndarray]:
        """Return the document indices in the global batch of a step, ascending, by dataset."""
        documents_by_prefix: dict[str, list[np.ndarray]] = {}
        for owner, index in self._samples_of(step, range(self._samples_per_batch)):
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

    def _first_sample(self, step: int) -> int:
        """Return the number of the first sample of a step, from the beginning of the stream."""
        return self._origin + step * self._samples_per_batch

    def _samples_of(self, step: int, numbers: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return (dataset, sequence) index pairs of some samples of the batch of a step.

        Padding after the last sample is of sequence -1 of the first dataset.
        """
        first, count = self._first_sample(step), self._samples_per_batch
        return np.stack(
            [
                self._samples[first + int(number)] if number < count else _PADDING
                for number in numbers
            ]
        )

    def _batch(self, step: int, selection: RowSelection) -> Batch:
        """Return the selected rows of the batch of a step; no other sample is read."""
        self._prefetch(step, selection)
        samples = self._samples_of(step, selection.samples)
        if len(self._packings) == 1:
            return selection.of(self._packings[0].batch(samples[:, 1]))
        rows = [self._packings[owner].batch([index]) for owner, index in samples]
        return selection.of({name: np.concatenate([row[name] for row in rows]) for name in rows[0]})

    def _prefetch(self, step: int, selection: RowSelection) -> None:
        """Begin to fetch the tokens of a step and of those after it, each once."""
        if not self._ahead:
            return
        with self._lock:  # until this step is asked for, whichever thread does it
            while self._prefetched <= step + self._ahead:
                samples = self._samples_of(self._prefetched, selection.samples)
                for owner, packing in enumerate(self._packings):
                    packing.prefetch(samples[samples[:, 0] == owner, 1])
                self._prefetched += 1

    def _start(self, step: int) -> None:
        grain = import_grain()
        self._step = self._prefetched = step
        options = grain.ReadOptions(
            num_threads=_PREFETCH_THREADS, prefetch_buffer_size=_PREFETCH_BATCHES
        )
        self._iterator = iter(self._batches[step:].to_iter_dataset(options))
        self._iterator.start_prefetch()
