"""Processes that compute for this one, as a group that a backend registers."""

from pathlib import Path

from lowering.machine import rank_processes


class Group:
    """Ranks of one engine."""

    def not_running(self) -> dict[int, str]:
        return {}

    def write_stacks(self, directory: Path) -> None: ...

    def kill(self) -> None:
        rank_processes.groups.remove(self)


def test_every_group_is_killed(monkeypatch):
    monkeypatch.setattr(rank_processes, "groups", [Group(), Group(), Group()])
    rank_processes.kill()
    assert rank_processes.groups == []
