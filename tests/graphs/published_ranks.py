"""Whether predictions order the strategies of a source as its measurements do."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations, groupby
from typing import Any

from published_fit import Fits, Prediction, achieved_of
from rank_correlation import spearman

_FEWEST = 3  # strategies, of which an order says something


@dataclass(frozen=True)
class Strategies:
    """Device-seconds per token of a source's strategies for one model, machine and length."""

    title: str
    published: tuple[float, ...]
    predicted: tuple[float, ...]

    @property
    def correlation(self) -> float | None:
        """Spearman's rank correlation; None for two strategies, whose order is right or wrong."""
        if len(self.published) < _FEWEST:
            return None
        return spearman(self.published, self.predicted)

    @property
    def pairs(self) -> tuple[int, int]:
        """Number of pairs in the right order, and of all; equal predictions are not right."""
        pairs = list(combinations(zip(self.published, self.predicted, strict=True), 2))
        right = sum((one[0] - two[0]) * (one[1] - two[1]) > 0 for one, two in pairs)
        return right, len(pairs)


def strategies_by_source(predictions: Sequence[Prediction], fitted: Fits) -> list[Strategies]:
    """Return the sources that list several strategies for one model, held out or not.

    The same strategy on other numbers of devices is one: the mean of its rows.
    """
    found = []
    for workload, rows in _grouped(predictions, _workload):
        means = [
            (
                statistics.mean(_per_token(one, one.published) for one in same),
                statistics.mean(
                    _per_token(one, one.seconds(achieved_of(one, fitted))) for one in same
                ),
            )
            for _, same in _grouped(rows, _strategy)
        ]
        if len(means) > 1:
            published, predicted = zip(*means, strict=True)
            found.append(Strategies(", ".join(map(str, workload[:4])), published, predicted))
    return found


def _grouped(
    rows: Sequence[Prediction], key: Callable[[Prediction], tuple[Any, ...]]
) -> list[tuple[tuple[Any, ...], list[Prediction]]]:
    return [(name, list(rows)) for name, rows in groupby(sorted(rows, key=key), key)]


def _workload(one: Prediction) -> tuple[Any, ...]:
    """Return what strategies are compared for: source, sizes of the model, machine and length."""
    model = one.program.model
    source = one.source.partition(";")[0].partition(" (")[0]
    sizes = f"{model.layers} layers of {model.embed}"
    shape = (model.kv_heads, model.mlp, model.vocab, str(model.moe))
    return source, sizes, one.machine, f"{one.program.batch.seq_len} tokens", *shape


def _strategy(one: Prediction) -> tuple[Any, ...]:
    """Return what is chosen for a workload, other than the number of devices."""
    program = one.program
    mesh, batch = program.mesh.axes, program.batch
    split = tuple(mesh.get(axis, 1) for axis in ("tensor", "stage", "context", "expert"))
    replicas = mesh.get("data", 1) * mesh.get("fsdp", 1) * batch.microbatches
    return (
        *split,
        "fsdp" in mesh,
        program.pipeline.virtual_stages,
        batch.global_batch_size / replicas,
        program.model.remat,
        str(program.settings.precision),
        one.kernel,
        one.is_serial,
    )


def _per_token(one: Prediction, seconds: float) -> float:
    """Return the device-seconds of a token."""
    return seconds * one.program.target.devices / one.program.batch.tokens
