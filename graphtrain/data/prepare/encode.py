"""Chunks of text to chunks of tokens, in worker processes, in order."""

import collections
import itertools
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass

import numpy as np

from graphtrain.data.readers.corpus import Chunk, Corpus
from graphtrain.data.tokenizers.tokenizer import Tokenizer
from graphtrain.errors import DataError

_AHEAD = 3  # chunks in flight per worker; more only costs memory


@dataclass(frozen=True)
class Encoded:
    """The documents of a chunk as tokens, one after another; a document without text has none.

    Of each record there are equally many. Those of conversations come with the parts to learn.
    """

    chunk: Chunk
    tokens: np.ndarray
    sizes: np.ndarray  # tokens of each document
    learned: np.ndarray | None = None  # begin and end of parts in their document
    learned_sizes: np.ndarray | None = None  # numbers in `learned`, of each document


Encode = Callable[[Chunk], Encoded]  # what a worker does; it can be pickled


@dataclass(frozen=True)
class Encoder:
    """Texts to tokens."""

    tokenizer: Tokenizer
    corpus: Corpus
    append_eod: bool

    def __call__(self, chunk: Chunk) -> Encoded:
        documents = self.tokenizer.encode_batch(self.corpus.texts(chunk))
        if self.append_eod:
            assert self.tokenizer.eod is not None
            end = np.array([self.tokenizer.eod], np.int32)
            documents = [np.append(tokens, end) if len(tokens) else tokens for tokens in documents]
        sizes = np.array([len(tokens) for tokens in documents])
        return Encoded(chunk, np.concatenate(documents).astype(np.int32), sizes)


def encode_chunks(chunks: Iterable[Chunk], encoder: Encode, workers: int) -> Iterator[Encoded]:
    """Encode chunks in `workers` processes, or in this one if it is one; the order is kept.

    Raises:
        DataError: a line cannot be used, or a worker was killed.
    """
    if workers == 1:
        yield from map(encoder, chunks)
        return
    methods = multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
    context.set_forkserver_preload([__name__])  # imported once, not by each worker
    pool = ProcessPoolExecutor(workers, context, _set_encoder, (encoder,))
    try:
        yield from _in_order(pool, iter(chunks), _AHEAD * workers)
    except BrokenProcessPool:
        raise DataError(
            f"one of {workers} worker processes was killed, perhaps for want of memory; "
            "give fewer with --workers"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _in_order(pool: ProcessPoolExecutor, chunks: Iterator[Chunk], ahead: int) -> Iterator[Encoded]:
    """Results in the order of the chunks, of which no more than `ahead` are read in advance."""
    waiting: collections.deque[Future[Encoded]] = collections.deque()
    for chunk in itertools.islice(chunks, ahead):
        waiting.append(pool.submit(_encode, chunk))
    while waiting:
        encoded = waiting.popleft().result()
        waiting.extend(pool.submit(_encode, chunk) for chunk in itertools.islice(chunks, 1))
        yield encoded


_encoders: list[Encode] = []  # of a worker process: one, kept as it costs more than a chunk


def _set_encoder(encoder: Encode) -> None:
    _encoders[:] = [encoder]
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A killed parent cannot end its workers, and each would wait forever for another chunk."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _encode(chunk: Chunk) -> Encoded:
    return _encoders[0](chunk)
