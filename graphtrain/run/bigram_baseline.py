"""Bigram model: a baseline loss that a trained language model should beat."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from graphtrain.data.batches.concat_packing import Batch
from graphtrain.data.indexed.dataset import IndexedDataset
from graphtrain.errors import DataError

_CHUNK = 1 << 22  # tokens counted at a time


@dataclass(frozen=True)
class Bigram:
    """Counts of the token pairs that occur; memory grows with these, not with vocab squared."""

    vocab: int
    pairs: np.ndarray  # first * vocab + second, ascending
    pair_counts: np.ndarray
    first_counts: np.ndarray  # occurrences of each token as the first of a pair

    @classmethod
    def count(cls, dataset: IndexedDataset, vocab: int) -> "Bigram":
        """Count the pairs of a dataset whose documents are concatenated in their order on disk.

        Raises:
            DataError: a token is outside the vocabulary.
        """
        pairs, counts = np.empty(0, np.int64), np.empty(0, np.int64)
        for first in range(0, len(dataset.tokens) - 1, _CHUNK):
            tokens = dataset.tokens[first : first + _CHUNK + 1].astype(np.int64)
            if tokens.max() >= vocab:
                raise DataError(
                    f"{dataset.prefix}: contains token {tokens.max()}, but vocab = {vocab}"
                )
            chunk_pairs, chunk_counts = np.unique(
                tokens[:-1] * vocab + tokens[1:], return_counts=True
            )
            pairs, counts = _sum_counts(pairs, counts, chunk_pairs, chunk_counts)
        first_counts = np.bincount(pairs // vocab, counts, minlength=vocab).astype(np.int64)
        return cls(vocab, pairs, counts, first_counts)

    @classmethod
    def weighted_sum(cls, models: Sequence["Bigram"], shares: np.ndarray) -> "Bigram":
        """Combine models so that each contributes its share of the pairs.

        Args:
            models: Models of datasets, all with the same vocabulary.
            shares: Relative weights of the models. The total number of pairs is unchanged.
        """
        total = sum(model.pair_counts.sum() for model in models)
        pairs, counts = np.empty(0, np.int64), np.empty(0, np.float64)
        for model, share in zip(models, shares / shares.sum(), strict=True):
            scale = share * total / model.pair_counts.sum()
            pairs, counts = _sum_counts(pairs, counts, model.pairs, model.pair_counts * scale)
        first_counts = np.bincount(pairs // models[0].vocab, counts, minlength=models[0].vocab)
        return cls(models[0].vocab, pairs, counts, first_counts)

    def probabilities(self, tokens: np.ndarray, targets: np.ndarray) -> np.ndarray:
        """Return the probability of each target after its token, with add-one smoothing.

        Source: Jurafsky and Martin, "Speech and Language Processing", section 3.6.1 (Laplace)
        """
        pair_ids = tokens.astype(np.int64) * self.vocab + targets
        indices = np.minimum(np.searchsorted(self.pairs, pair_ids), len(self.pairs) - 1)
        counts = np.where(self.pairs[indices] == pair_ids, self.pair_counts[indices], 0)
        return (counts + 1) / (self.first_counts[tokens] + self.vocab)

    def loss(self, batches: Iterable[Batch]) -> float:
        """Return the weighted mean negative log-likelihood of the targets, in nats per token."""
        total = weight = 0.0
        for batch in batches:
            logarithms = np.log(self.probabilities(batch["tokens"], batch["targets"]))
            total -= float((logarithms * batch["weights"]).sum())
            weight += float(batch["weights"].sum())
        return total / weight


def _sum_counts(
    pairs: np.ndarray, counts: np.ndarray, more: np.ndarray, more_counts: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the sum of two sparse tables of counts."""
    merged, places = np.unique(np.concatenate([pairs, more]), return_inverse=True)
    summed = np.bincount(places, np.concatenate([counts, more_counts]), len(merged))
    return merged, summed.astype(counts.dtype)
