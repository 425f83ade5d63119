"""The watchdog of one process, whose peers are played by the test."""

import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from graphtrain.config.schema import Watchdog as Settings
from graphtrain.run import agreement, watchdog
from lowering.errors import PeerLost
from lowering.xla import distributed
from lowering.xla.heartbeats import Heartbeats


def answer_without_peers(self: Heartbeats) -> None:
    """The service answers, while the other ranks publish nothing."""

    def answer() -> None:
        while not self._stopped:
            self.answered_at = time.monotonic()
            time.sleep(0.05)

    threading.Thread(target=answer, daemon=True).start()


@pytest.fixture
def two_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "count", lambda: 2)
    monkeypatch.setattr(distributed, "rank", lambda: 1)


def test_a_rank_that_is_lost_before_its_first_heartbeat_is_named(
    two_processes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    said, ended = [], threading.Event()

    def end(status: int) -> None:
        said.append(status)
        ended.set()
        threading.Event().wait()  # it does not return

    monkeypatch.setattr(Heartbeats, "start", answer_without_peers)
    monkeypatch.setattr(watchdog, "_AGREE_SECONDS", 0.0)
    os = SimpleNamespace(_exit=end, write=lambda file, text: said.append(text.decode()))
    monkeypatch.setattr(watchdog, "os", os)
    observer = watchdog.Watchdog(Settings(step_timeout=1.0), tmp_path)
    observer.start()
    assert ended.wait(20)
    observer.close()
    message, status = said
    assert message.startswith(
        "error: rank 0 no longer responds: no heartbeat for 1 s, last in its s"
    )
    assert status == 75
    assert "most recent call first" in (tmp_path / "stacks/rank-1.txt").read_text()


def test_the_loss_of_a_rank_does_not_wait_for_ranks_that_wait_for_it(
    two_processes, monkeypatch: pytest.MonkeyPatch
):
    def lose() -> None:
        raise PeerLost("rank 3 has ended")

    monkeypatch.setattr(distributed, "is_watched", threading.Event())
    monkeypatch.setattr(distributed, "all_gather_text", lambda word: pytest.fail("waits"))
    distributed.is_watched.set()
    with pytest.raises(PeerLost, match="rank 3 has ended"):
        agreement.on_all_ranks(lose)
