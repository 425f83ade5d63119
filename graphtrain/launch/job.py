"""What a scheduler is asked for, whatever scheduler it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from graphtrain.config.schema import Config
from graphtrain.errors import LaunchError
from lowering.machine.target import Target


@dataclass(frozen=True)
class Job:
    """A run and the programs it needs, as commands and hosts."""

    name: str
    directory: Path  # of scripts, logs and the numbers of the jobs
    arguments: tuple[str, ...]  # CONFIG and its options, the same for compile and run
    hosts: int
    cards: int  # of each host; 0 for CPUs and TPUs
    workers: int  # compile jobs that share the cache

    def command(self, python: str, verb: str, *more: str) -> list[str]:
        """A graphtrain command as words."""
        return [python, "-m", "graphtrain", verb, *self.arguments, *more]


def job(config: Config, arguments: Sequence[str], workers: int) -> Job:
    """The job of a run.

    Raises:
        LaunchError: the number of hosts does not follow from the target.
    """
    target = Target.parse(config.program.target)
    if target.processes is None:
        raise LaunchError(
            f"{target}: the hosts of a TPU slice are what its scheduler says; start graphtrain run "
            "on each of them, with --coordinator, --processes and --rank (docs/clusters.md)"
        )
    directory = Path(config.run.directory)
    return Job(
        name=directory.name or "run",
        directory=directory / "launch",
        arguments=tuple(arguments),
        hosts=target.processes,
        cards=target.devices // target.processes if target.is_gpu else 0,
        workers=workers,
    )
