"""Connection of this process to the other processes of a run."""

from collections.abc import Callable, Collection

from graphtrain.config.schema import Watchdog
from graphtrain.run.stalls import max_silence
from lowering.machine import host
from lowering.machine.target import Target
from lowering.xla import distributed, joining


def join_run(
    target: Target,
    limits: Watchdog,
    coordinator: str | None = None,
    count: int | None = None,
    rank: int | None = None,
    prepare: Callable[[int], None] = lambda count: None,
    fewer: Collection[int] = (),
) -> int:
    """Configure the memory of this process and connect it to the other processes of the run.

    The processes first meet, so that each is observed while it prepares its programs, and named if
    it is lost.

    Args:
        target: machine of the run.
        limits: how long to wait for processes that have not joined, or are silent.
        coordinator: host:port of rank 0; like the other two, None to read it from the environment.
        count: number of processes.
        rank: rank of this process.
        prepare: fetches or compiles the programs; called on every rank with the number of
            processes, however long it takes.
        fewer: smaller numbers of processes with which the run can begin if not all join in time.

    Returns:
        The number of processes of the run.

    Raises:
        PeerLost: another process is lost, or did not join in time.
        LoweringError: the target requires another number of processes, or they do not connect.
    """
    member = joining.membership(coordinator=coordinator, count=count, rank=rank)
    if target.runs_on_cpu:
        host.retain_freed_memory()
    joining.check_process_count(target, member)
    if member is None or member.count == 1:
        prepare(1)
        return 1
    return joining.initialize(
        member,
        target,
        join_timeout=limits.join_timeout,
        silence=max_silence(limits),
        fewer=fewer,
        prepare=prepare,
    )


def expected_rank(
    coordinator: str | None = None, count: int | None = None, rank: int | None = None
) -> int:
    """Return the rank that this process will have once it has joined the run.

    Raises:
        LoweringError: only some of the arguments of `join_run` are given, or they contradict.
    """
    member = joining.membership(coordinator=coordinator, count=count, rank=rank)
    return 0 if member is None else member.rank


def expected_count(
    coordinator: str | None = None, count: int | None = None, rank: int | None = None
) -> int:
    """Return the number of processes that the run will have, one for each host.

    Raises:
        LoweringError: only some of the arguments of `join_run` are given, or they contradict.
    """
    member = joining.membership(coordinator=coordinator, count=count, rank=rank)
    return 1 if member is None else member.count


def is_rank_zero() -> bool:
    """Return whether this process is rank 0, which reports for all processes of a run."""
    return distributed.rank() == 0
