"""Description of a compile job and a run job, independent of the scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from graphtrain.config.schema import Config
from graphtrain.errors import LaunchError
from lowering.machine.target import Target


@dataclass(frozen=True)
class Job:
    """A run and the compilation before it: commands and required hosts."""

    name: str
    job_directory: Path  # for scripts, logs and job ids
    arguments: tuple[str, ...]  # CONFIG and its options, the same for compile and run
    cache: Path  # directory of compiled programs
    hosts: int
    gpus_per_host: int  # GPUs per host; 0 for CPUs and TPUs
    workers: int  # compile jobs that share the cache

    def command(self, python: str, verb: str, *more: str) -> list[str]:
        """Return the command line of `graphtrain verb` with the arguments of the job."""
        return [python, "-m", "graphtrain", verb, *self.arguments, *more]


def make_job(config: Config, arguments: Sequence[str], cache: Path, workers: int) -> Job:
    """Return the job for a run.

    Raises:
        LaunchError: the target does not determine the number of hosts.
    """
    target = Target.parse(config.program.target)
    if target.processes is None:
        raise LaunchError(
            f"{target}: the scheduler of the TPU slice determines its hosts; start graphtrain run "
            "on each host, with --coordinator, --processes and --rank (docs/clusters.md)"
        )
    directory = Path(config.run.directory)
    return Job(
        name=directory.name or "run",
        job_directory=directory / "launch",
        arguments=tuple(arguments),
        cache=cache,
        hosts=target.processes,
        gpus_per_host=target.devices // target.processes if target.is_gpu else 0,
        workers=workers,
    )
