"""Requests that two ranks answer together: threads in place of processes."""

import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest
from toy_engine import ToyEngine

from graphtrain.data.tokenizers.byte import ByteTokenizer
from graphtrain.errors import TrainingError
from graphtrain.run.evaluation import shared_requests
from graphtrain.run.evaluation.continuation_scores import ScoredText
from graphtrain.run.evaluation.shared_requests import Compute, answer_together, computation
from graphtrain.run.serving.engine_protocol import SamplingParameters
from graphtrain.run.serving.sequence import SequenceRequest
from lowering.xla import distributed

TEXTS = [ScoredText(tuple(b"a question: yes"), 11), ScoredText(tuple(b"a question: no"), 11)]
SEQUENCE = SequenceRequest(
    prompt=tuple(b"a"), sampling=SamplingParameters(temperature=0, max_tokens=3), stop=("x",)
)


class TwoRanks:
    """Two ranks, and the service that exchanges their messages."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._rank = threading.local()
        self._sent: dict[str, str] = {}
        self._changed = threading.Condition()
        self._words, self._barrier = ["", ""], threading.Barrier(2, timeout=5)
        self.engines = ToyEngine(), ToyEngine()
        monkeypatch.setattr(shared_requests, "_evaluations", itertools.repeat(0))
        for name, function in {
            "count": lambda: 2,
            "rank": lambda: self._rank.number,
            "send_text": self._send,
            "receive_text": self._receive,
            "forget_text": lambda key: None,
            "all_gather_text": self._gather,
        }.items():
            monkeypatch.setattr(distributed, name, function)

    def run(self, lead: Callable[[Compute], str]) -> list[Any]:
        """Return the result, or the error, of each rank."""
        results: list[Any] = [None, None]

        def act(rank: int) -> None:
            self._rank.number = rank
            compute = computation(self.engines[rank], ByteTokenizer())
            try:
                results[rank] = answer_together(lead, compute, str, lambda told: f"told {told}")
            except Exception as error:
                results[rank] = error

        threads = [threading.Thread(target=act, args=(rank,), daemon=True) for rank in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        return results

    def _send(self, key: str, word: str) -> None:
        with self._changed:
            self._sent[key] = word
            self._changed.notify_all()

    def _receive(self, key: str) -> str:
        with self._changed:
            assert self._changed.wait_for(lambda: key in self._sent, timeout=5)
            return self._sent[key]

    def _gather(self, word: str) -> list[str]:
        self._words[self._rank.number] = word
        self._barrier.wait()
        return list(self._words)


@pytest.fixture
def ranks(monkeypatch) -> TwoRanks:
    return TwoRanks(monkeypatch)


def test_all_ranks_make_the_same_calls_and_get_the_result(ranks: TwoRanks):
    def lead(compute: Compute) -> str:
        scores = dict(compute("score", TEXTS))
        assert list(compute("score", [])) == []
        ((text,),) = compute("generate", [SEQUENCE])
        return f"{len(scores)} {len(text.tokens)}"

    mine, told = ranks.run(lead)
    assert mine.startswith("2 ") and told == f"told {mine}"
    calls = [engine.calls for engine in ranks.engines]
    assert calls[0] == calls[1] != []


def test_an_error_of_rank_0_ends_the_others(ranks: TwoRanks):
    def lead(compute: Compute) -> str:
        list(compute("score", TEXTS))
        raise KeyError("no such metric")

    mine, other = ranks.run(lead)
    assert isinstance(mine, KeyError)
    assert isinstance(other, TrainingError) and str(other) == "rank 0: 'no such metric'"


def test_an_error_of_the_engine_is_raised_on_all(ranks: TwoRanks):
    for engine in ranks.engines:
        engine.failure = TrainingError("not finite")
    both = ranks.run(lambda compute: str(dict(compute("score", TEXTS))))
    assert [str(error) for error in both] == ["not finite", "not finite"]


def test_a_rank_that_gives_up_does_not_wait_for_those_in_a_collective(ranks: TwoRanks, monkeypatch):
    waited = []
    monkeypatch.setattr(
        distributed, "all_gather_text", lambda word: waited.append(word) or ["", ""]
    )

    def lead(compute: Compute) -> str:
        for _ in compute("score", TEXTS):
            raise OSError("disk full")
        return ""

    mine, _ = ranks.run(lead)
    assert isinstance(mine, OSError) and "disk full" not in waited
