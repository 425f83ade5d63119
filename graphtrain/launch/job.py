"""Description of a compile job and a run job, independent of the scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from graphtrain.config.schema import Config
from graphtrain.errors import LaunchError
from lowering.machine.target import Target

# Estimates of ours, which options of the job system override.
# The data loader, the copies of checkpoints, and the threads of XLA and NCCL of one device.
_CORES_PER_DEVICE = 8
_HOST_MEMORY = 4 << 30  # bytes for Python, XLA and the loaded programs
# A checkpoint is copied to host memory before it is written: the memory of all devices, and a
# quarter for the buffers of the writer.
_CHECKPOINT_COPIES = 1.25
# NCCL's user guide ("Runtime and MPI issues") suggests 1 GB for a container of several GPUs; more
# costs nothing until it is used.
_SHARED_MEMORY_PER_DEVICE = 1 << 30


@dataclass(frozen=True)
class Job:
    """A run and the compilation before it: commands and required hosts."""

    name: str
    job_directory: Path  # for scripts, logs and job ids
    arguments: tuple[str, ...]  # CONFIG and its options, the same for compile and run
    cache: Path  # directory of compiled programs
    hosts: int
    fallback: tuple[int, ...]  # smaller numbers of hosts that the run may have, descending
    gpus_per_host: int  # GPUs per host; 0 for CPUs and TPUs
    cores_per_host: int  # CPU cores that the run needs on each host
    memory_per_host: int  # bytes of host memory that the run needs on each host
    shared_memory_per_host: int  # bytes of /dev/shm among them
    is_exclusive: bool  # whether the run takes all devices of a host
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
            "on each host, with --coordinator, --processes and --rank (docs/guides/clusters.md)"
        )
    directory = Path(config.run.directory)
    devices = target.devices // target.processes
    uses_accelerators = target.platform != "cpu" and not target.runs_on_cpu
    return Job(
        name=directory.name or "run",
        job_directory=directory / "launch",
        arguments=tuple(arguments),
        cache=cache,
        hosts=target.processes,
        fallback=tuple(sorted(config.run.fallback, reverse=True)),
        gpus_per_host=target.devices // target.processes if target.is_gpu else 0,
        cores_per_host=_CORES_PER_DEVICE * devices if uses_accelerators else devices,
        memory_per_host=_HOST_MEMORY
        + (int(_CHECKPOINT_COPIES * devices * target.memory_bytes) if uses_accelerators else 0),
        shared_memory_per_host=_SHARED_MEMORY_PER_DEVICE * devices if uses_accelerators else 0,
        is_exclusive=uses_accelerators and devices == target.devices_per_host,
        workers=workers,
    )
