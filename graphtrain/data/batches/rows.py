"""Choice of a packing: concatenated and cut, best-fit, or one padded document per row."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from graphtrain.data.batches.concat_packing import ConcatPacking
from graphtrain.data.batches.document_packing import DocumentPacking, Overlong
from graphtrain.data.batches.row_images import RowImages, check_images
from graphtrain.data.batches.sources import SourceDataset, SourceMasks, Sources
from graphtrain.data.indexed.dataset import WHOLE_INDEX, IndexedDataset, IndexShare
from graphtrain.data.indexed.description import DatasetDescription, read_description
from graphtrain.data.indexed.images import ImageFiles
from graphtrain.data.indexed.loss_spans import LossSpans
from graphtrain.data.indexed.streamed_tokens import Blocks
from graphtrain.errors import DataError

Packing = Literal["concat", "best_fit", "pad"]
Streams = Mapping[str, Blocks]  # by path prefix
NO_STREAMS: Streams = MappingProxyType({})
BATCHES_AHEAD = 8  # batches after the current one whose tokens are fetched, of a streamed dataset


@dataclass(frozen=True, kw_only=True)
class PackingSettings:
    """Settings by which a dataset becomes rows of one length."""

    length: int
    length_name: str = "batch.seq_len"  # in messages
    vocab: int | None = None
    isolate_documents: bool = False
    # None: "concat" for text; for conversations "best_fit" if isolated, else "pad".
    packing: Packing | None = None
    overlong: Overlong = "error"
    index_share: IndexShare = WHOLE_INDEX  # part of the index that this process checks
    preference_pairs: bool | None = None  # require or refuse preference pairs; None: accept both
    sources: Sources = field(default_factory=dict)  # datasets of the user's code
    streams: Streams = field(default_factory=dict)  # blocks of datasets that are elsewhere
    images: RowImages | None = None  # that the program takes; None: none

    def open(self, prefix: str | Path, seed: int | None = None) -> ConcatPacking | DocumentPacking:
        """Open a dataset as rows, shuffled by the seed; without a seed, in the order on disk.

        Raises:
            DataError: the dataset cannot be used, or not with these settings.
        """
        is_source = str(prefix) in self.sources
        description = None if is_source else read_description(prefix)
        image_settings = description.images if description else None
        check_images(str(prefix), image_settings, self.images)
        dataset, masks, pairs = (
            self._open_source(str(prefix)) if is_source else self._open_files(prefix, description)
        )
        if self.preference_pairs is not None and pairs != self.preference_pairs:
            quantifier, kind = ("", "require") if pairs else ("no ", "are required by")
            raise DataError(
                f"{prefix}: contains {quantifier}preference pairs, which {kind} "
                'program.loss.kind = "dpo"; change this setting or the dataset '
                "(docs/guides/instructions.md)"
            )
        packing = self.packing or self._default_packing(masks is not None)
        if packing == "concat" and masks is None:
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
                'contains conversations; set it to "best_fit" or "pad", or omit it'
            )
        images = None
        if image_settings is not None:
            assert isinstance(dataset, IndexedDataset), "sources have no images"
            images = ImageFiles(dataset, image_settings, self.index_share)
        return DocumentPacking(
            dataset,
            self.length,
            loss_spans=masks,
            fit=packing == "best_fit",
            overlong=self.overlong,
            pairs=pairs,
            vocab=self.vocab,
            isolate_documents=self.isolate_documents,
            length_name=self.length_name,
            images=images,
            images_per_row=self.images.images if self.images else 0,
        )

    def _open_files(
        self, prefix: str | Path, description: DatasetDescription | None
    ) -> tuple[IndexedDataset, LossSpans | None, bool]:
        """Return the dataset of files, its loss mask, and whether it has preference pairs."""
        # Without a description, Megatron-LM may have written the dataset.
        dataset = IndexedDataset(
            prefix,
            share=self.index_share,
            one_sequence_each=description is not None,
            blocks=self.streams.get(str(prefix)),
        )
        conversations = description.conversations if description else None
        if conversations is None:
            return dataset, None, False
        return dataset, LossSpans(dataset, self.index_share), conversations.pairs

    def _open_source(self, reference: str) -> tuple[SourceDataset, SourceMasks | None, bool]:
        """Return the same of a dataset of the user's code, which has no preference pairs."""
        dataset = SourceDataset(reference, self.sources[reference])
        return dataset, SourceMasks(dataset) if dataset.has_mask else None, False

    def _default_packing(self, conversations: bool) -> Packing:
        if not conversations:
            return "concat"
        return "best_fit" if self.isolate_documents else "pad"
