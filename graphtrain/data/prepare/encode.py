"""Parallel tokenization: chunks of text to chunks of tokens, in worker processes, in order."""

import collections
import itertools
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass

import numpy as np

from graphtrain.data.readers.corpus import Chunk, Corpus
from graphtrain.data.tokenizers.protocol import Tokenizer
from graphtrain.errors import DataError
from lowering.machine.worker_processes import worker_context

_CHUNKS_PER_WORKER = 3  # chunks in flight per worker process; more uses memory without being faster


@dataclass(frozen=True)
class EncodedChunk:
    """Documents of a chunk as concatenated tokens; a document without text has no tokens.

    Every record has the same number of documents. Conversations also have a loss mask, and may have
    images.
    """

    chunk: Chunk
    tokens: np.ndarray
    sizes: np.ndarray  # tokens of each document
    loss_spans: np.ndarray | None = None  # spans to train on: begin and end in their document
    loss_span_sizes: np.ndarray | None = None  # values in `learned`, two per span, of each document
    pixels: np.ndarray | None = None  # uint8, of all images
    pixel_sizes: np.ndarray | None = None  # bytes of the images of each document


ChunkEncoder = Callable[[Chunk], EncodedChunk]  # called in worker processes; must be picklable


@dataclass(frozen=True)
class TextEncoder:
    """Encoder of the texts of a corpus."""

    tokenizer: Tokenizer
    corpus: Corpus
    append_eod: bool
    prefix: tuple[int, ...] = ()  # token ids that begin every document: BOS

    def __call__(self, chunk: Chunk) -> EncodedChunk:
        documents = self.tokenizer.encode_batch(self.corpus.texts(chunk))
        if self.prefix:
            begin = np.array(self.prefix, np.int32)
            documents = [
                tokens
                if not len(tokens) or begins_with(tokens, self.prefix)
                else np.concatenate([begin, tokens])
                for tokens in documents
            ]
        if self.append_eod:
            assert self.tokenizer.eod is not None
            end = np.array([self.tokenizer.eod], np.int32)
            documents = [np.append(tokens, end) if len(tokens) else tokens for tokens in documents]
        sizes = np.array([len(tokens) for tokens in documents])
        return EncodedChunk(chunk, np.concatenate(documents).astype(np.int32), sizes)


def begins_with(tokens: np.ndarray, prefix: tuple[int, ...]) -> bool:
    """Return True if a document begins with these token ids; with none, always."""
    return tuple(tokens[: len(prefix)].tolist()) == prefix


def encode_chunks(
    chunks: Iterable[Chunk], encoder: ChunkEncoder, workers: int
) -> Iterator[EncodedChunk]:
    """Yield encoded chunks in order, using `workers` processes, or this process if it is 1.

    Raises:
        DataError: a record cannot be used, or a worker process was killed.
    """
    if workers == 1:
        yield from map(encoder, chunks)
        return
    pool = ProcessPoolExecutor(workers, worker_context(__name__), _set_encoder, (encoder,))
    try:
        yield from ordered_results(
            lambda chunk: pool.submit(_encode, chunk).result,
            iter(chunks),
            _CHUNKS_PER_WORKER * workers,
        )
    except BrokenProcessPool:
        raise DataError(
            f"one of {workers} worker processes was killed, probably because memory ran out; use "
            "fewer with --workers"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def ordered_results(
    submit: Callable[[Chunk], Callable[[], EncodedChunk]],
    chunks: Iterator[Chunk],
    max_pending: int,
) -> Iterator[EncodedChunk]:
    """Yield results in the order of the chunks, reading at most `max_pending` chunks in advance.

    Args:
        submit: Starts to encode a chunk; returns the function that waits for the result.
        chunks: Chunks to encode.
        max_pending: Maximum number of chunks in flight.
    """
    pending: collections.deque[Callable[[], EncodedChunk]] = collections.deque()
    for chunk in itertools.islice(chunks, max_pending):
        pending.append(submit(chunk))
    while pending:
        encoded = pending.popleft()()
        pending.extend(map(submit, itertools.islice(chunks, 1)))
        yield encoded


_encoders: list[ChunkEncoder] = []  # in a worker process: one, sent once because it is large


def _set_encoder(encoder: ChunkEncoder) -> None:
    _encoders[:] = [encoder]
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    """Exit when the parent does: a killed parent leaves workers that wait forever for a chunk."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _encode(chunk: Chunk) -> EncodedChunk:
    return _encoders[0](chunk)
