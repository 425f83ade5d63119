"""Heartbeats of the processes of a run, exchanged through JAX's distributed service.

A thread publishes what this process does and reads what the others do. It alone calls the service,
which may block when another process is stopped; all other threads read its last results.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from lowering.xla import private

_PREFIX = "graphtrain/heartbeats"
_VERDICT = "verdict"  # the key beside those of the ranks
_PROCESSES_PER_SECOND = 64  # more processes publish less often, to limit the load of rank 0


@dataclass
class Heartbeat:
    """Last message of another process, and when this process first saw it."""

    text: str
    changed_at: float  # time.monotonic() of this process, so that clocks need not agree


@dataclass
class Heartbeats:
    """Exchange of heartbeats with all processes of the run. Attributes are those of other ranks."""

    interval: float  # seconds between heartbeats
    rank: int
    count: int
    peers: dict[int, Heartbeat] = field(default_factory=dict)  # by rank
    answered_at: float = field(default_factory=time.monotonic)  # last answer of the service
    verdict: str | None = None  # why the run ends, equal on all ranks
    _text: str = ""
    _proposed: str | None = None
    _beats: int = 0
    _wake: threading.Event = field(default_factory=threading.Event)
    _stopped: bool = False
    _thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread; a single process has no peers and needs none."""
        self.interval = max(self.interval, self.count / _PROCESSES_PER_SECOND)
        if self.count > 1:
            self._thread = threading.Thread(target=self._run, name="heartbeats", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Publish that this process has left, then no more."""
        self._stopped = True
        self.leave()
        if self._thread is not None:
            self._thread.join(timeout=5)

    def publish(self, text: str) -> None:
        """Set what the next heartbeats contain."""
        self._text = text

    def extend(self, seconds: float) -> None:
        """Do not count some of the seconds that have passed, in which this process did not run."""
        now = time.monotonic()
        self.answered_at = min(now, self.answered_at + seconds)
        for heartbeat in self.peers.values():
            heartbeat.changed_at = min(now, heartbeat.changed_at + seconds)

    def propose(self, verdict: str, timeout: float) -> str:
        """End the run for a reason; return the reason of the rank that was first.

        If the service does not answer in time, the reason of this rank stands.
        """
        if self.count == 1:
            return verdict
        self._proposed = verdict
        self._wake.set()
        deadline = time.monotonic() + timeout
        while self.verdict is None and time.monotonic() < deadline:
            time.sleep(0.05)
        return self.verdict or verdict

    def leave(self) -> None:
        """Tell rank 0, which runs the service, that this process needs it no longer."""
        self._text = "left"
        self._wake.set()

    def wait_until_left(self, ranks: list[int], timeout: float) -> None:
        """Wait until ranks have left, or the time is over."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if all(rank in self.peers and _is_left(self.peers[rank].text) for rank in ranks):
                return
            self._wake.set()
            time.sleep(0.05)

    def _run(self) -> None:
        client = private.distributed_state().client
        while True:
            stopped = self._stopped
            # An error is the loss of the service: answered_at tells how long ago.
            with contextlib.suppress(RuntimeError):
                self._exchange(client)
                self.answered_at = time.monotonic()
            if stopped:
                return
            self._wake.wait(self.interval)
            self._wake.clear()

    def _exchange(self, client: Any) -> None:
        self._beats += 1
        own_key = f"{_PREFIX}/{self.rank}"
        client.key_value_set(own_key, f"{self._beats} {self._text}", allow_overwrite=True)
        if self._proposed is not None:
            with contextlib.suppress(RuntimeError):  # another rank was first
                client.key_value_set(f"{_PREFIX}/{_VERDICT}", self._proposed)
        for key, text in client.key_value_dir_get(_PREFIX):
            name = key.rpartition("/")[2]
            if name == _VERDICT:
                self.verdict = text
            elif int(name) != self.rank:
                self._note(int(name), text)

    def _note(self, rank: int, text: str) -> None:
        known = self.peers.get(rank)
        if known is None or known.text != text:
            self.peers[rank] = Heartbeat(text, time.monotonic())


def content(heartbeat: Heartbeat) -> Any:
    """Return what a process published: decoded JSON, or None if it has left."""
    text = heartbeat.text.partition(" ")[2]
    return None if text in ("", "left") else json.loads(text)


def _is_left(text: str) -> bool:
    return text.endswith(" left")
