"""How the rows of a batch are made of a dataset: cut, fitted or padded."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from graphtrain.data.batches.document_packing import Longer, WholePacking
from graphtrain.data.batches.packing import Packing
from graphtrain.data.indexed.dataset import IndexedDataset
from graphtrain.data.indexed.description import read_description
from graphtrain.data.indexed.loss_spans import Learned
from graphtrain.errors import DataError

HowPacked = Literal["cut", "fit", "padded"]


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The shape of a row, and what fills it."""

    length: int
    vocab: int | None = None
    apart: bool = False
    packing: HowPacked | None = None  # None: text is cut; conversations fit, or else are padded
    longer: Longer = "refuse"
    pairs: bool | None = None  # whether documents must be pairs of answers; None: either will do

    def open(self, prefix: str | Path, seed: int | None = None) -> Packing | WholePacking:
        """The rows of a dataset, in an order of the seed or in its own.

        Raises:
            DataError: the dataset cannot be used, or not so.
        """
        dataset = IndexedDataset(prefix)
        description = read_description(prefix)
        conversations = description.conversations if description else None
        pairs = conversations is not None and conversations.pairs
        if self.pairs is not None and pairs != self.pairs:
            holds, kind = ("", "is for") if pairs else ("no ", "needs")
            raise DataError(
                f'{prefix}: holds {holds}pairs of answers, which loss.kind = "preference" {kind}; '
                "set program.loss.kind, or take other data (docs/instructions.md)"
            )
        packing = self.packing or self._usual(conversations is not None)
        if packing == "cut" and conversations is None:
            return Packing(dataset, self.length, seed=seed, vocab=self.vocab, apart=self.apart)
        if packing == "cut":
            raise DataError(
                f'{prefix}: run.data.packing = "cut" is for text, and these are conversations; '
                'choose "fit" or "padded", or leave it out'
            )
        return WholePacking(
            dataset,
            self.length,
            learned=Learned(dataset) if conversations else None,
            fit=packing == "fit",
            longer=self.longer,
            pairs=pairs,
            vocab=self.vocab,
            apart=self.apart,
        )

    def _usual(self, conversations: bool) -> HowPacked:
        if not conversations:
            return "cut"
        return "fit" if self.apart else "padded"
