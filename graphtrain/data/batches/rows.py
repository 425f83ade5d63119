"""Choice of a packing: concatenated and cut, best-fit, or one padded document per row."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from graphtrain.data.batches.concat_packing import ConcatPacking
from graphtrain.data.batches.document_packing import DocumentPacking, Overlong
from graphtrain.data.indexed.dataset import WHOLE_INDEX, IndexedDataset, IndexShare
from graphtrain.data.indexed.description import read_description
from graphtrain.data.indexed.loss_spans import LossSpans
from graphtrain.errors import DataError

Packing = Literal["concat", "best_fit", "pad"]


@dataclass(frozen=True, kw_only=True)
class PackingSettings:
    """Settings by which a dataset becomes rows of one length."""

    length: int
    vocab: int | None = None
    isolate_documents: bool = False
    # None: "concat" for text; for conversations "best_fit" if isolated, else "pad".
    packing: Packing | None = None
    overlong: Overlong = "error"
    index_share: IndexShare = WHOLE_INDEX  # part of the index that this process checks
    preference_pairs: bool | None = None  # require or refuse preference pairs; None: accept both

    def open(self, prefix: str | Path, seed: int | None = None) -> ConcatPacking | DocumentPacking:
        """Open a dataset as rows, shuffled by the seed; without a seed, in the order on disk.

        Raises:
            DataError: the dataset cannot be used, or not with these settings.
        """
        description = read_description(prefix)
        # Without a description, Megatron-LM may have written the dataset.
        dataset = IndexedDataset(
            prefix, share=self.index_share, one_sequence_each=description is not None
        )
        conversations = description.conversations if description else None
        pairs = conversations is not None and conversations.pairs
        if self.preference_pairs is not None and pairs != self.preference_pairs:
            quantifier, kind = ("", "require") if pairs else ("no ", "are required by")
            raise DataError(
                f"{prefix}: contains {quantifier}preference pairs, which {kind} "
                'program.loss.kind = "dpo"; change this setting or the dataset '
                "(docs/guides/instructions.md)"
            )
        packing = self.packing or self._default_packing(conversations is not None)
        if packing == "concat" and conversations is None:
            return ConcatPacking(
                dataset,
                self.length,
                seed=seed,
                vocab=self.vocab,
                isolate_documents=self.isolate_documents,
            )
        if packing == "concat":
            raise DataError(
                f'{prefix}: run.data.packing = "concat" supports only text, but this dataset '
                "contains "
                'conversations; set it to "best_fit" or "pad", or omit it'
            )
        return DocumentPacking(
            dataset,
            self.length,
            loss_spans=LossSpans(dataset, self.index_share) if conversations else None,
            fit=packing == "best_fit",
            overlong=self.overlong,
            pairs=pairs,
            vocab=self.vocab,
            isolate_documents=self.isolate_documents,
        )

    def _default_packing(self, conversations: bool) -> Packing:
        if not conversations:
            return "concat"
        return "best_fit" if self.isolate_documents else "pad"
