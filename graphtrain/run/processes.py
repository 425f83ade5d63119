"""Connection of this process to the other processes of a run."""

from lowering.machine import host
from lowering.machine.target import Target
from lowering.xla import distributed


def join_run(
    target: Target,
    coordinator: str | None = None,
    count: int | None = None,
    rank: int | None = None,
) -> None:
    """Configure the memory of this process and connect it to the other processes of the run.

    Raises:
        LoweringError: the target requires another number of processes, or they do not connect.
    """
    member = distributed.membership(coordinator=coordinator, count=count, rank=rank)
    if target.runs_on_cpu:
        host.retain_freed_memory()
    distributed.check_process_count(target, member)
    if member is not None and member.count > 1:
        distributed.initialize(member, target)


def is_rank_zero() -> bool:
    """Return whether this process is rank 0, which reports for all processes of a run."""
    return distributed.rank() == 0
