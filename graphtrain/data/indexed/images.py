"""Images of a dataset: PREFIX_images.bin and .idx.

The files are an indexed dataset too: its document i has the pixels of all images of document i of
PREFIX, as the image processor of a model resized them: (images, height, width, 3) uint8. In the
tokens of the document, each image stands as a number of placeholders.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from graphtrain.data.indexed.dataset import (
    DTYPES,
    WHOLE_INDEX,
    IndexedDataset,
    IndexShare,
    file_digests,
)
from graphtrain.data.indexed.writer import NOTHING_WRITTEN, IndexedWriter, WrittenCounts
from graphtrain.errors import DataError

PIXEL_DTYPE = DTYPES[1]  # uint8
_VALUES = 256  # of a pixel's channel
_SUFFIX = "_images"


@dataclass(frozen=True, kw_only=True)
class ImageSettings:
    """Size of the images of a dataset, their placeholders in its tokens, and their number."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012

    height: int  # in pixels, as that of every image
    width: int
    token: int  # id of the placeholder
    tokens: int  # placeholders of each image
    processor_digest: str
    count: int = 0  # images
    most: int = 0  # images of one document
    digests: dict[str, str] | None = None  # of the .bin and .idx of the images, by suffix

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of an image: height, width, channels."""
        return self.height, self.width, 3

    @property
    def nbytes(self) -> int:
        """Bytes of an image."""
        return self.height * self.width * 3

    @property
    def made(self) -> tuple[int, int, int, int, str]:
        """Properties that must be equal in datasets that are merged."""
        return self.height, self.width, self.token, self.tokens, self.processor_digest

    def of(self, prefix: str | Path) -> "ImageSettings":
        """Return a copy with the counts and digests of the written dataset."""
        counts = ImageFiles(IndexedDataset(prefix), self).counts
        return replace(
            self,
            count=int(counts.sum()),
            most=int(counts.max()),
            digests=file_digests(images_prefix(prefix)),
        )


def images_prefix(prefix: str | Path) -> str:
    """Return the path prefix of the images of a dataset."""
    return f"{prefix}{_SUFFIX}"


def is_images_prefix(prefix: Path) -> bool:
    """Return whether a path prefix is that of the images of a dataset beside it."""
    name = prefix.name.removesuffix(_SUFFIX)
    return name != prefix.name and prefix.with_name(f"{name}.idx").is_file()


def images_writer(prefix: str | Path, keep: WrittenCounts = NOTHING_WRITTEN) -> IndexedWriter:
    """Return the writer of the images of the dataset `prefix`."""
    return IndexedWriter(images_prefix(prefix), _VALUES, dtype=PIXEL_DTYPE, keep=keep)


class ImageFiles:
    """Images of a dataset, memory-mapped.

    Args:
        dataset: The dataset.
        settings: Size and placeholders of the images, from the description of the dataset.
        share: Share of the index of the images to check.

    Raises:
        DataError: the files are missing, damaged, or belong to another dataset.
    """

    def __init__(
        self, dataset: IndexedDataset, settings: ImageSettings, share: IndexShare = WHOLE_INDEX
    ) -> None:
        self.settings = settings
        self._pixels = IndexedDataset(
            images_prefix(dataset.prefix), share=share, one_sequence_each=True, allow_empty=True
        )
        if len(self._pixels) != len(dataset) or self._pixels.dtype != PIXEL_DTYPE:
            raise DataError(
                f"{self._pixels.prefix}.idx: contains the images of {len(self._pixels)} "
                f"documents, but {dataset.prefix} has {len(dataset)}; prepare both again"
            )
        # (documents,): images of each.
        self.counts, rest = np.divmod(np.diff(self._pixels.document_offsets), settings.nbytes)
        if rest.any():
            document = int(np.argmax(rest != 0))
            raise DataError(
                f"{self._pixels.prefix}.idx: document {document} has "
                f"{len(self._pixels.document(document))} bytes, which are not a number of images "
                f"of {settings.height} x {settings.width} pixels; prepare the dataset again"
            )

    def of(self, document: int) -> np.ndarray:
        """Return the images of a document: (images, height, width, 3) uint8."""
        return self._pixels.document(document).reshape(-1, *self.settings.shape)

    def check(self, dataset: IndexedDataset) -> None:
        """Check that every document of `dataset` has the placeholders of its images.

        Raises:
            DataError: the number of placeholders is another, or of images than the description's.
        """
        for document, count in enumerate(self.counts):
            placeholders = int((dataset.document(document) == self.settings.token).sum())
            if placeholders != count * self.settings.tokens:
                raise DataError(
                    f"{dataset.prefix}.bin: document {document} has {placeholders} placeholders of "
                    f"images, but its {count} images have {count * self.settings.tokens}; prepare "
                    "the dataset again"
                )
        if (total := int(self.counts.sum())) != self.settings.count:
            raise DataError(
                f"{dataset.prefix}.json: records {self.settings.count} images, but "
                f"{self._pixels.prefix}.bin has {total}; prepare the dataset again"
            )
