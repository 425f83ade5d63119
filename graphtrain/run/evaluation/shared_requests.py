"""Requests that several processes answer together: rank 0 decides, all of them compute.

The slots of the KV cache are sharded over the devices of all processes, so that each process makes
the same calls of the engine in the same order. Rank 0 alone reads the tasks, knows the answers so
far and computes metrics. Before it computes answers, it sends the requests to the other ranks.
"""

from __future__ import annotations

import base64
import itertools
import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any, Literal, TypeVar

from graphtrain.data.tokenizers.protocol import Tokenizer
from graphtrain.errors import TrainingError
from graphtrain.run.batch_generation import continue_all
from graphtrain.run.evaluation.continuation_scores import ScoredText
from graphtrain.run.evaluation.packed_scores import score_texts
from graphtrain.run.serving.engine_protocol import SamplingParameters
from graphtrain.run.serving.row_engine import RowEngine
from graphtrain.run.serving.sequence import SequenceRequest
from lowering.xla import distributed

T = TypeVar("T")
Kind = Literal["score", "generate"]
Asked = Sequence[ScoredText] | Sequence[SequenceRequest]
Compute = Callable[[Kind, Any], Iterator[Any]]  # yields the answers to requests

_KEY = "graphtrain/requests"
_evaluations = itertools.count()  # number of evaluations, equal on all processes


def computation(
    engine: RowEngine, tokenizer: Tokenizer, on_answer: Callable[[], None] = lambda: None
) -> Compute:
    """Return a function that yields the answers of an engine to requests, as they are computed.

    Args:
        engine: The model.
        tokenizer: Its tokenizer.
        on_answer: Called with each answer.
    """

    def compute(kind: Kind, asked: Any) -> Iterator[Any]:
        if kind == "score":
            answers: Iterator[Any] = score_texts(engine, asked)
        else:
            answers = continue_all(engine, tokenizer, asked, samples=1)
        for answer in answers:
            on_answer()
            yield answer

    return compute


def answer_together(
    lead: Callable[[Compute], T],
    compute: Compute,
    write: Callable[[T], str],
    read: Callable[[str], T],
) -> T:
    """Run `lead` on rank 0, compute on the other ranks what it asks for, and return its result.

    An error of one rank is raised on all of them.

    Args:
        lead: Called on rank 0 with a function to use in place of `compute`.
        compute: Computes answers; a call of it makes the same calls of the engine on all ranks.
        write: Returns what the other ranks are told of the result.
        read: Returns the result of the other ranks, made of that.

    Raises:
        TrainingError: another rank failed; the message names it.
    """
    if distributed.count() == 1:
        return lead(compute)
    requests = _SharedRequests(f"{_KEY}/{next(_evaluations)}", compute)
    result, failed = None, None
    try:
        if distributed.rank() == 0:
            result = requests.lead(lead, write)
        elif (told := requests.follow()) is not None:
            result = read(told)
    except Exception as error:
        if requests.is_interrupted:  # the others wait in a collective, and end with this process
            raise
        failed = error
    error_texts = distributed.all_gather_text(_text(failed))
    if distributed.rank() == 0:
        requests.forget()
    if failed is not None:
        raise failed
    for rank, error_text in enumerate(error_texts):
        if error_text:
            raise TrainingError(f"{distributed.names([rank])}: {error_text}")
    return result  # pyright: ignore[reportReturnType]


class _SharedRequests:
    """Requests of one evaluation, in the order in which rank 0 asks for them.

    Args:
        key: Where they are for the other ranks.
        compute: Computes answers.

    Attributes:
        is_interrupted: Whether this rank gave up answers that the others compute.
    """

    def __init__(self, key: str, compute: Compute) -> None:
        self._key, self._compute = key, compute
        self._numbers = itertools.count()
        self.is_interrupted = False

    def lead(self, lead: Callable[[Compute], T], write: Callable[[T], str]) -> T:
        """Run `lead`; send its requests to the other ranks, and at last what they are told."""
        try:
            result = lead(self._send_and_compute)
            told = write(result)
        except BaseException:
            self._send(["failed", None])
            raise
        self._send(["ended", told])
        return result

    def follow(self) -> str | None:
        """Compute what rank 0 asks for; return what it tells at last, None if it has failed."""
        while True:
            kind, asked = self._receive()
            if kind == "failed":  # it says why when the errors are exchanged
                return None
            if kind == "ended":
                return asked
            for _ in self._compute(kind, [_request(kind, fields) for fields in asked]):
                pass

    def forget(self) -> None:
        """Delete the requests, which all ranks have received."""
        distributed.forget_text(self._key)

    def _send_and_compute(self, kind: Kind, asked: Asked) -> Iterator[Any]:
        if not asked:
            return
        self._send([kind, [asdict(one) for one in asked]])
        self.is_interrupted = True  # unless the answers end, or their computation fails everywhere
        try:
            yield from self._compute(kind, asked)
        except Exception:
            self.is_interrupted = False
            raise
        self.is_interrupted = False

    def _send(self, message: Any) -> None:
        packed = base64.b64encode(zlib.compress(json.dumps(message).encode(), 1)).decode()
        distributed.send_text(f"{self._key}/{next(self._numbers)}", packed)

    def _receive(self) -> Any:
        packed = distributed.receive_text(f"{self._key}/{next(self._numbers)}")
        return json.loads(zlib.decompress(base64.b64decode(packed)))


def _request(kind: Kind, fields: dict[str, Any]) -> ScoredText | SequenceRequest:
    """Return a request that was sent."""
    if kind == "score":
        return ScoredText(tuple(fields["tokens"]), fields["begin"])
    return SequenceRequest(
        prompt=tuple(fields["prompt"]),
        sampling=SamplingParameters(**fields["sampling"]),
        stop=tuple(fields["stop"]),
    )


def _text(error: Exception | None) -> str:
    """Return the message of an error; "" if there is none."""
    return "" if error is None else str(error) or type(error).__name__
