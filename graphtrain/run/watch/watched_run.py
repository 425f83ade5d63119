"""One run on the page: its files are read as they grow, and nothing is written."""

from __future__ import annotations

import hashlib
import json
import statistics
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graphtrain.cache import Cache
from graphtrain.checkpoints.listing import holds_run
from graphtrain.files import counted
from graphtrain.run.directory_lock import LEASE
from graphtrain.run.metrics import METRICS_NAME, parse_record
from graphtrain.run.spikes import NAME as SPIKES_NAME
from graphtrain.run.training_samples import SAMPLES_NAME
from graphtrain.run.watch.curves import Curves
from graphtrain.run.watch.facts import PlannedRun, checkpoint_facts, goodput_facts
from graphtrain.run.watch.followed_file import FollowedFile
from graphtrain.run.watch.records import parse_sample, parse_spike
from graphtrain.run.watch.slow_fact import SlowFact
from lowering.machine.leases import Lease

_SHOWN = 60  # last samples, and last spikes
_STEPS = 500  # last ones, whose median time is compared with the plan


@dataclass(frozen=True)
class Known:
    """State of a page that asks; the default has nothing."""

    curves: str = ""  # whose points it has
    sequence: int = 0  # of the last record in them
    facts: str = ""  # digest of the facts


class WatchedRun:
    """Reader of the files of a run, for any number of pages.

    Args:
        name: Name on the page.
        directory: Directory of the run, which need not exist yet.
        cache: Cache in which the record of the compiled step is looked up.
    """

    def __init__(self, name: str, directory: Path, cache: Cache) -> None:
        self.name, self._directory = name, directory
        self._lock = threading.Lock()
        self._lease = Lease(directory / LEASE)
        self._metrics = FollowedFile(directory / METRICS_NAME)
        self._samples = FollowedFile(directory / SAMPLES_NAME)
        self._spikes = FollowedFile(directory / SPIKES_NAME)
        self._plan = PlannedRun(directory, cache)
        self._checkpoints = SlowFact(lambda: checkpoint_facts(directory))
        self._goodput = SlowFact(lambda: goodput_facts(directory))
        self._generations: dict[FollowedFile, int] = {}
        self._number = time.time_ns()  # differs from that of a server before this one
        self._forget_metrics()
        self._last_samples: deque[Mapping[str, Any]] = deque(maxlen=_SHOWN)
        self._last_spikes: deque[Mapping[str, Any]] = deque(maxlen=_SHOWN)
        self._damaged_others = 0

    def answer(self, known: Known) -> dict[str, Any]:
        """Read what is new, and return what a page does not have yet, as JSON."""
        with self._lock:
            self._read_metrics()
            self._read_others()
            curves = f"{self._number}.{self._metrics.generation}.{self._curves.epoch}"
            is_continued = curves == known.curves
            points = self._curves.changed(known.sequence if is_continued else 0)
            answer: dict[str, Any] = {
                "curves": curves,
                "sequence": self._curves.sequence,
                "width": self._curves.width,
                "points": points,
                "is_behind": self._metrics.is_behind,
            }
            facts = self._facts()
            text = json.dumps(facts, allow_nan=False)
            digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
            if digest != known.facts:
                answer |= {"digest": digest, "facts": facts}
            return answer

    def _forget_metrics(self) -> None:
        self._curves = Curves()
        self._step_seconds: deque[float] = deque(maxlen=_STEPS)
        self._damaged, self._grew_at = 0, None

    def _read_metrics(self) -> None:
        lines = self._metrics.read()
        if self._was_replaced(self._metrics):
            self._forget_metrics()
        if lines:
            self._grew_at = time.time()
        for line in lines:
            record = parse_record(line)
            if record is None:
                self._damaged += 1
                continue
            self._curves.add(record)
            seconds = record.get("step_seconds")
            if seconds is not None:
                self._step_seconds.append(seconds)

    def _read_others(self) -> None:
        for file, kept, parse in (
            (self._samples, self._last_samples, parse_sample),
            (self._spikes, self._last_spikes, parse_spike),
        ):
            lines = file.read()
            if self._was_replaced(file):
                kept.clear()
            for line in lines:
                found = parse(line)
                if found is None:
                    self._damaged_others += 1
                else:
                    kept.append(found)

    def _was_replaced(self, file: FollowedFile) -> bool:
        before = self._generations.get(file, file.generation)
        self._generations[file] = file.generation
        return before != file.generation

    def _facts(self) -> dict[str, Any]:
        curves, goodput = self._curves, self._goodput.value()
        is_training = not self._is_free()
        plan = self._plan.facts(curves.last_step)
        return {
            "name": self.name,
            "directory": str(self._directory),
            "is_training": is_training,
            "state": self._state(is_training, goodput),
            "problems": self._problems(is_training),
            "step": curves.last_step,
            "latest": curves.latest,
            "not_finite": {
                name: curves.not_finite.get(name, 0) for name in ("loss", "validation_loss")
            },
            "grew_at": self._grew_at,
            "plan": plan,
            "measured": {
                "step_seconds": _median(self._step_seconds),
                "memory_bytes": curves.highest("memory_bytes"),
            },
            "checkpoints": self._checkpoints.value(),
            "goodput": goodput,
            "samples": list(self._last_samples),
            "spikes": list(self._last_spikes),
        }

    def _is_free(self) -> bool:
        try:
            return self._lease.is_free()
        except OSError:
            return True

    def _was_removed(self) -> bool:
        """Return whether the directory was there, and is no longer."""
        return bool(self._metrics.generation) and not self._directory.is_dir()

    def _state(self, is_training: bool, goodput: Mapping[str, Any]) -> str:
        if self._was_removed():
            return "removed"
        if is_training:
            return "training" if self._curves.last_step else "starting"
        if starts := goodput.get("processes"):
            return starts[-1]["outcome"]
        return "not running" if holds_run(self._directory) else "not started"

    def _problems(self, is_training: bool) -> list[str]:
        """Say what is wrong with the files of the run."""
        files = (self._metrics, self._samples, self._spikes)
        problems = [file.problem for file in files if file.problem]
        metrics = self._metrics
        if self._was_removed():
            problems.append(f"{self._directory} was removed or renamed while it was watched")
        elif not metrics.exists and not metrics.problem:
            problems.append(f"{METRICS_NAME} does not exist yet: no step was taken")
        if damaged := self._damaged + metrics.long_lines:
            problems.append(f"{METRICS_NAME}: left out {counted(damaged, 'damaged line')}")
        if damaged := self._damaged_others:
            problems.append(f"samples and spikes: left out {counted(damaged, 'damaged line')}")
        if metrics.is_behind:
            done = 1 - metrics.remaining / metrics.size
            problems.append(f"reading {METRICS_NAME}: {done:.0%}")
        elif metrics.remaining and not is_training:
            problems.append(
                f"{METRICS_NAME} ends with half a line, of a process that was killed or a disk "
                "that was full; it is left out"
            )
        return problems


def _median(values: deque[float]) -> float | None:
    return statistics.median(values) if values else None
