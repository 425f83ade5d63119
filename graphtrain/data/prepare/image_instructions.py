"""Conversion of conversations with images into indexed datasets, by the processor of a model."""

import dataclasses
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from graphtrain.data.indexed.description import ConversationSettings
from graphtrain.data.indexed.images import ImageSettings
from graphtrain.data.prepare import manifest
from graphtrain.data.prepare.chat_templates import TrainOn, find_template
from graphtrain.data.prepare.encode import ChunkEncoder, EncodedChunk
from graphtrain.data.prepare.image_messages import check_texts, read_image_conversation
from graphtrain.data.prepare.image_placeholders import repeat_placeholders, without_placeholders
from graphtrain.data.prepare.image_processor import FolderProcessor
from graphtrain.data.prepare.instructions import InstructionEncoder, InstructResult, begin_document
from graphtrain.data.prepare.text import Preparation, ProgressCallback
from graphtrain.data.readers.corpus import Chunk, Corpus
from graphtrain.data.readers.image_files import check_image_file, read_image
from graphtrain.data.readers.tables import TABLE_SUFFIXES
from graphtrain.data.tokenizers.open import load_tokenizer
from graphtrain.data.tokenizers.protocol import Tokenizer
from graphtrain.data.tokenizers.special_tokens import end_document
from graphtrain.errors import DataError
from graphtrain.files import content_digest
from lowering.machine import host

_GROUP_BYTES = 1 << 14  # of records that are encoded at a time, at most
_PIXEL_BYTES = 32 << 20  # of the images of these records; several chunks are in memory
_IMAGES_PER_WORKER = 500  # fewer take less time than starting a process


class _Survey(NamedTuple):
    first: tuple[Path, str]  # path of the first image, and place of its record
    digest: str  # of all images
    images: int
    densest: float  # images per byte of a record, at most


def instruct_images(
    inputs: Sequence[str | Path],
    output: str | Path,
    processor: str | Path,
    *,
    image_size: tuple[int, int] | None = None,
    template: str = "own",
    train_on: TrainOn = "answers",
    bos: bool | None = None,
    eod: str | None = None,
    replace: bool = False,
    workers: int | None = None,
    report: ProgressCallback = lambda stage, fraction: None,
    **corpus: Any,
) -> InstructResult:
    """Make datasets of conversations with images, as `instruct` does of text alone.

    Tokens and pixels are those of the processor of transformers. The pixels of the dataset PREFIX
    are stored in PREFIX_images.

    Args:
        inputs: JSON files of records; the paths of their images are relative to the file.
        output: Output directory.
        processor: Folder of the model: tokenizer, chat template and image processor.
        image_size: Height and width of every image, whatever its aspect ratio. None: what the
            processor makes of the first image, which it must make of all others.
        template: A name that `find_template` accepts.
        train_on: Train on all answers, on the last of each conversation, or on every token but
            placeholders of images.
        bos: Begin every document with the beginning-of-sequence token, once. None: as the
            processor does.
        eod: Text of the end-of-document token. None: the tokenizer's own.
        replace: Replace a dataset that was made from another request.
        workers: Worker processes. None: chosen by the number of images and of cores.
        report: Called with the current stage and its completed fraction.
        corpus: Other fields of `Corpus`.

    Raises:
        DataError: an input, an image, the processor or the output cannot be used.
    """
    files = Corpus.from_inputs(inputs, keys=(), **corpus)
    if tables := [path for path in files.paths if path.suffix in TABLE_SUFFIXES]:
        raise DataError(f"{tables[0]}: images are prepared from JSON records, not from tables")
    opened = FolderProcessor.open(Path(processor))
    tokenizer = load_tokenizer(opened.folder, eod)
    survey = _survey(files, report)
    size = image_size or _processed(opened, *survey.first).shape[:2]
    files = dataclasses.replace(files, group_bytes=_group_bytes(survey.densest, size))
    workers = workers or max(1, min(host.usable_cores(), survey.images // _IMAGES_PER_WORKER))
    encoder = ImageInstructionEncoder(
        InstructionEncoder(
            opened.template(tokenizer) if template == "own" else find_template(template, tokenizer),
            "messages",
            train_on,
            False,
            _begins(tokenizer, bos),
        ),
        opened,
        _image_settings(opened, tokenizer, size),
        image_size is not None,
    )
    encoder.prefix(tokenizer)  # raises if --bos is given and there is no such token
    identity = "messages", encoder.conversations.template_digest, train_on
    images = survey.digest, opened.digest, f"{size[0]} x {size[1]}", str(image_size is not None)
    request = manifest.PrepareRequest.from_corpus(
        files, opened.folder, bos, False, eod, identity, images
    )
    preparation = Preparation(Path(output), files, encoder, workers, report, replace)
    return InstructResult(**vars(preparation.run(request, opened.folder)))


@dataclass(frozen=True)
class ImageInstructionEncoder:
    """Conversations with images: each becomes one document."""

    instructions: InstructionEncoder
    processor: FolderProcessor
    images: ImageSettings
    resizes: bool  # every image to one size, before the processor; else it must make that size
    documents = 1
    append_eod = False  # the template ends the answers

    def prefix(self, tokenizer: Tokenizer) -> tuple[int, ...]:
        return self.instructions.prefix(tokenizer)

    @property
    def conversations(self) -> ConversationSettings:
        return self.instructions.conversations

    def encoder(self, tokenizer: Tokenizer, corpus: Corpus) -> ChunkEncoder:
        return ImageConversationEncoder(tokenizer, corpus, self)

    def save(self, directory: Path) -> tuple[str, ...]:
        return self.instructions.save(directory)


@dataclass(frozen=True)
class ImageConversationEncoder:
    """Encoder of conversations into tokens, a loss mask and pixels."""

    tokenizer: Tokenizer
    corpus: Corpus
    making: ImageInstructionEncoder

    def __call__(self, chunk: Chunk) -> EncodedChunk:
        documents, learned, pixels = [], [], []
        for place, record in self.corpus.records(chunk):
            tokens, spans, paths = self._document(record, place)
            documents.append(tokens if len(spans) else tokens[:0])
            learned.append(spans)
            paths = paths if len(spans) else ()
            images = [self._pixels(chunk.path.parent / path, place) for path in paths]
            pixels.append(np.concatenate([np.empty(0, np.uint8), *images]))
        return EncodedChunk(
            chunk,
            np.concatenate(documents).astype(np.int32),
            np.array(list(map(len, documents))),
            np.concatenate(learned),
            np.array(list(map(len, learned))),
            np.concatenate(pixels),
            np.array(list(map(len, pixels))),
        )

    def _document(self, record: Any, place: str) -> tuple[np.ndarray, np.ndarray, tuple[str, ...]]:
        """Return the tokens of a record, its spans to train on, and the paths of its images."""
        making, settings = self.making.instructions, self.making.images
        conversation, paths = read_image_conversation(record, place)
        rendered = making.template.render(conversation, making.train_on, place)
        check_texts(conversation, rendered.text, place)
        rendered = repeat_placeholders(
            rendered,
            self.making.processor.image_token,
            settings.tokens,
            len(paths),
            place,
        )
        (encoded,) = self.tokenizer.encode_with_offsets([rendered.text])
        spans = np.array(encoded.spans(rendered.spans), np.int32).reshape(-1)
        tokens, spans = begin_document(encoded.tokens, spans, making, self.tokenizer)
        is_trained = making.train_on == "all"
        tokens, spans = end_document(rendered.text, tokens, spans, self.tokenizer, is_trained)
        if (found := int((tokens == settings.token).sum())) != len(paths) * settings.tokens:
            raise DataError(
                f"{place}: the tokenizer makes {found} placeholders of its {len(paths)} images, "
                f"which have {settings.tokens} each"
            )
        if len(tokens) and tokens[-1] == settings.token:
            raise DataError(f"{place}: ends with an image, after which there is nothing to learn")
        return tokens, without_placeholders(spans, tokens, settings.token), paths

    def _pixels(self, path: Path, place: str) -> np.ndarray:
        """Return the pixels of an image, one after another."""
        size = self.making.images.shape[:2] if self.making.resizes else None
        pixels = _processed(self.making.processor, path, place, size)
        if pixels.shape != self.making.images.shape:
            height, width, _ = self.making.images.shape
            raise DataError(
                f"{place}: {path}: the image processor makes {pixels.shape[0]} x {pixels.shape[1]} "
                f"pixels (height x width) of it, and {height} x {width} of the first image; a "
                "dataset has images of one size: give --image-size HEIGHT WIDTH to resize every "
                "image to it, whatever its aspect ratio"
            )
        return pixels.reshape(-1)


def _processed(
    processor: FolderProcessor, path: Path, place: str, size: tuple[int, int] | None = None
) -> np.ndarray:
    """Return the pixels of the image of a record: (height, width, 3)."""
    image = read_image(path, place)
    try:
        return processor.pixels(image, size)
    except ValueError as error:  # as of transformers, for an aspect ratio above 200
        raise DataError(f"{place}: {path}: the image processor: {error}") from None


def _survey(corpus: Corpus, report: ProgressCallback) -> _Survey:
    """Read all records and the files of their images.

    Raises:
        DataError: a record is not a conversation, an image is missing, or there is none.
    """
    first, digest, total = None, hashlib.sha256(), max(corpus.nbytes, 1)
    images, densest = 0, 0.0
    for chunk in corpus.chunks():
        report("reading the images", min(chunk.bytes_read / total, 1.0))
        for record, (place, paths) in zip(chunk.records, _paths(corpus, chunk), strict=True):
            for path in paths:
                check_image_file(path, place)
                digest.update(content_digest(path).encode())
                first = first or (path, place)
            images += len(paths)
            densest = max(densest, len(paths) / len(record))
    if first is None:
        names = ", ".join(map(str, corpus.paths))
        raise DataError(
            f"{names}: no record has a part of type image in 'content'; give --tokenizer instead"
        )
    return _Survey(first, digest.hexdigest(), images, densest)


def _paths(corpus: Corpus, chunk: Chunk) -> Iterator[tuple[str, list[Path]]]:
    """Yield the place of each record, and the paths of its images."""
    for place, record in corpus.records(chunk):
        images = read_image_conversation(record, place).images
        yield place, [chunk.path.parent / path for path in images]


def _group_bytes(densest: float, size: tuple[int, int]) -> int:
    """Return the bytes of records of a chunk, whose images then have at most `_PIXEL_BYTES`.

    Args:
        densest: Images per byte of a record, at most.
        size: Height and width of an image.
    """
    pixel_bytes = densest * size[0] * size[1] * 3  # per byte of a record
    return max(1, min(_GROUP_BYTES, int(_PIXEL_BYTES / pixel_bytes)))


def _begins(tokenizer: Tokenizer, bos: bool | None) -> bool | None:
    """Return whether documents begin with BOS; None: as the template.

    The processors of transformers encode the text of the template as any text: with the BOS that
    the tokenizer puts before it, unless the template has written it.
    """
    return True if bos is None and tokenizer.prefix else bos


def _image_settings(
    processor: FolderProcessor, tokenizer: Tokenizer, size: tuple[int, int]
) -> ImageSettings:
    """Return the settings of images of a size, after a trial with one.

    Raises:
        DataError: the processor makes no images of this size, or the tokenizer has no placeholder.
    """
    from PIL import Image

    try:
        processor.pixels(Image.new("RGB", (size[1], size[0])), size)
    except ValueError as error:
        raise DataError(
            f"--image-size {size[0]} {size[1]}: the image processor of {processor.folder}: {error}"
        ) from None
    (encoded,) = tokenizer.encode_with_offsets([processor.image_token])
    if len(encoded.tokens) != 1:
        raise DataError(
            f"--processor {processor.folder}: its tokenizer has no token {processor.image_token}, "
            "the placeholder of an image"
        )
    return ImageSettings(
        height=size[0],
        width=size[1],
        token=int(encoded.tokens[0]),
        tokens=processor.tokens(*size),
        processor_digest=processor.digest,
    )
