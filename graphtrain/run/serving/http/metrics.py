"""Metrics of a server as Prometheus reads them."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from graphtrain.run.serving.sequence import Usage
from graphtrain.run.serving.worker import Worker

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)

_COUNTERS = {
    "prompt_tokens": "Prompt tokens that were computed.",
    "cached_tokens": "Prompt tokens whose KV cache was reused (prefix caching).",
    "generated_tokens": "Generated tokens.",
    "finished": "Sequences that finished.",
    "cancelled": "Sequences that were cancelled, for example because the client left.",
    "failed": "Sequences that failed.",
}
_GAUGES = {
    "waiting": "Sequences that wait for a slot.",
    "prefilling": "Sequences whose prompt is processed.",
    "active": "Sequences that are generated.",
}


class ServerMetrics:
    """Counters and times of one server.

    Args:
        worker: Thread of the engine, whose statistics are read when metrics are asked for.
    """

    def __init__(self, worker: Worker) -> None:
        registry = self._registry = CollectorRegistry()
        registry.register(_SchedulerMetrics(worker))
        self.requests = Counter(
            "graphtrain_requests", "Requests.", ["path", "status"], registry=registry
        )
        self._queue = Histogram(
            "graphtrain_queue_seconds", "Time until a slot.", buckets=_SECONDS, registry=registry
        )
        self._first_token = Histogram(
            "graphtrain_time_to_first_token_seconds",
            "Time to first token (TTFT).",
            buckets=_SECONDS,
            registry=registry,
        )
        self._per_token = Histogram(
            "graphtrain_time_per_output_token_seconds",
            "Mean time per output token (TPOT) of a sequence, after the first.",
            buckets=_TOKEN_SECONDS,
            registry=registry,
        )
        self._total = Histogram(
            "graphtrain_sequence_seconds",
            "Time from the request to the end of a sequence.",
            buckets=_SECONDS,
            registry=registry,
        )

    def observe(self, usage: Usage) -> None:
        """Add a sequence that ended."""
        self._queue.observe(usage.queue_seconds)
        self._first_token.observe(usage.first_token_seconds)
        self._total.observe(usage.seconds)
        if usage.generated_tokens > 1:
            seconds = usage.seconds - usage.first_token_seconds
            self._per_token.observe(seconds / (usage.generated_tokens - 1))

    def text(self) -> bytes:
        return generate_latest(self._registry)


class _SchedulerMetrics(Collector):
    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def collect(self) -> Iterator[Metric]:
        statistics, model = self._worker.statistics, self._worker.model
        for name, help_text in _GAUGES.items():
            value = getattr(statistics, name)
            yield GaugeMetricFamily(f"graphtrain_sequences_{name}", help_text, value)
        for name, help_text in _COUNTERS.items():
            prefix = "graphtrain_" if name.endswith("tokens") else "graphtrain_sequences_"
            yield CounterMetricFamily(prefix + name, help_text, getattr(statistics, name))
        slots = 0 if model is None else model.engine.slots
        yield GaugeMetricFamily("graphtrain_slots", "Slots of the engine.", slots)
