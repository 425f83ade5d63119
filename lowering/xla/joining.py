"""Joining of a distributed run: who this process is, and its connection to the others."""

from __future__ import annotations

import atexit
import ipaddress
import os
import socket
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

from lowering.errors import LoweringError, PeerLost
from lowering.machine import rendezvous
from lowering.machine.launchers import Membership, launched
from lowering.machine.rendezvous import Meeting
from lowering.machine.target import Target
from lowering.xla import distributed, private
from lowering.xla.lost_ranks import end_for_another_rank, end_without_peers

_CONNECT_TIMEOUT = 300  # seconds for JAX to connect processes that are all there
_SHUTDOWN_TIMEOUT = 120  # seconds that the first process to shut down waits for the last
# Services of JAX that live as long as this process.
_kept_services: list[Any] = []


def membership(
    environ: Mapping[str, str] = os.environ,
    *,
    coordinator: str | None = None,
    count: int | None = None,
    rank: int | None = None,
) -> Membership | None:
    """Return this process's membership in a distributed run; None for a single process.

    Explicit arguments take precedence. What they leave out is read from the variables of the
    launcher (`lowering.machine.launchers`).

    Args:
        environ: environment variables.
        coordinator: host:port of rank 0.
        count: number of processes.
        rank: rank of this process.

    Raises:
        LoweringError: a number is missing or out of range, or the launcher's variables contradict.
    """
    arguments = {"coordinator": coordinator, "processes": count, "rank": rank}
    if coordinator is not None and count is not None and rank is not None:
        if not 0 <= rank < count:
            raise LoweringError(
                f"rank {rank} is out of range: {count} processes have the ranks 0 to {count - 1}"
            )
        return Membership(rank, count, coordinator)
    is_partial = any(value is not None for value in arguments.values())
    if count is None and rank is None:
        found = launched(environ, coordinator)
        if found is not None or not is_partial:
            return found
    if is_partial:
        missing = ", ".join(name for name, value in arguments.items() if value is None)
        raise LoweringError(f"a distributed run also requires {missing}")
    return None


def check_process_count(target: Target, member: Membership | None) -> None:
    """Check that the number of processes is that of the target.

    Raises:
        LoweringError: it is not; the message says how many to start, and how.
    """
    count = member.count if member else 1
    if target.processes in (None, count):
        return
    raise LoweringError(
        f"{target} requires {target.processes} processes, one for each host, but this run has "
        f"{count}; start them with graphtrain launch slurm or srun, or pass each process the "
        "coordinator's address, the number of processes and its rank"
    )


def initialize(
    member: Membership,
    target: Target,
    *,
    join_timeout: float,
    silence: float = 60.0,
    fewer: Collection[int] = (),
    prepare: Callable[[int], None] = lambda count: None,
) -> int:
    """Join the other processes; call it before JAX's backend is initialized.

    Args:
        member: rank of this process.
        target: machine of the run.
        join_timeout: seconds for all processes to join.
        silence: seconds without a heartbeat after which a process is lost until all are connected.
        fewer: smaller numbers of processes with which the run can begin if not all join in time.
        prepare: called with the number of processes when all have joined, and before JAX connects
            them; it may take any time.

    Returns:
        The number of processes of the run.

    Raises:
        PeerLost: another process is lost, or did not join in time; the message names it.
        LoweringError: this process cannot join the others.
    """
    distributed.set_ranks_per_process(target.ranks_per_process)
    _silence_xla()
    address = member.coordinator or private.slurm_coordinator()
    bind = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS") or bind_address(address)
    # Slurm starts all processes or none, and JAX asks it for their number.
    sufficient = frozenset(fewer) if member.coordinator else frozenset[int]()
    meeting = Meeting(member.rank, member.count, address, bind, join_timeout, silence, sufficient)
    with rendezvous.joined(meeting, end_for_another_rank) as session:
        member = replace(member, rank=session.rank, count=session.count)
        session.prepare(lambda: prepare(member.count))
        if member.count == 1:
            return 1
        _connect(member, target, address)
    atexit.register(_keep_preemption_service)  # runs before JAX's own handler, which is older
    return member.count


def _connect(member: Membership, target: Target, address: str) -> None:
    """Let JAX connect this process to the others."""
    options: dict[str, Any] = {}
    if member.coordinator:
        options["coordinator_address"] = member.coordinator
    if member.rank == 0 and "JAX_COORDINATOR_BIND_ADDRESS" not in os.environ:
        options["coordinator_bind_address"] = bind_address(address)
    if target.is_gpu and target.processes:
        # All GPUs of the host. JAX's default is one GPU for each process.
        options["local_device_ids"] = list(range(target.devices // target.processes))
    try:
        private.initialize_distributed(
            end_without_peers,
            **options,
            num_processes=member.count,
            process_id=member.rank,
            cluster_detection_method="deactivate" if member.coordinator else "slurm",
            initialization_timeout=_CONNECT_TIMEOUT,
            heartbeat_timeout_seconds=distributed.HEARTBEAT_TIMEOUT,
            shutdown_timeout_seconds=_SHUTDOWN_TIMEOUT,
        )
    except RuntimeError as error:
        first = str(error).partition("\n")[0]
        is_late = first == "std::bad_cast" or first.startswith("DEADLINE_EXCEEDED")
        raise (PeerLost if is_late else LoweringError)(
            f"rank {member.rank} of {member.count} processes could not connect to the others at "
            f"{address}: {f'not all did within {_CONNECT_TIMEOUT} s' if is_late else first}; check "
            "that all processes can reach that address"
        ) from None


def _silence_xla() -> None:
    """Let XLA log nothing: it logs a lost process as errors, and the run says it in one line.

    Call it before JAX is imported, which reads the level. JAX sets "1" where none is set, and a
    process that was started by one with JAX inherits it, so this value is no wish of the user.
    """
    if os.environ.get("TF_CPP_MIN_LOG_LEVEL", "1") == "1":
        os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"


def _keep_preemption_service() -> None:
    """Let JAX disconnect this process without shutting its preemption service down first.

    A process that receives SIGTERM in the last second waits, in a thread of XLA that its exit
    joins, for the services of all processes: for three minutes, if one was shut down before
    (jaxlib 0.10.2, tsl/distributed_runtime/preemption/preemption_sync_manager.cc). The thread uses
    the client to the last, which therefore is kept too.
    """
    state = distributed.service_state()
    _kept_services.extend((state.preemption_sync_manager, state.client, state.service))
    state.preemption_sync_manager = None


def bind_address(coordinator: str) -> str | None:
    """Return the address on which rank 0 listens: that at which the others look for it.

    None for all interfaces, JAX's default: if the host's name has an address that this host does
    not have (behind a proxy, or not resolved yet), or a loopback address, as many hosts resolve
    their own name, at which no other host would find it.
    """
    host, _, port = coordinator.rpartition(":")
    name = host.strip("[]")
    if not name or not port:
        return None
    try:
        *_, (address, *_) = socket.getaddrinfo(name, 0, proto=socket.IPPROTO_TCP)[0]
        is_ipv6 = ":" in str(address)
        with socket.socket(socket.AF_INET6 if is_ipv6 else socket.AF_INET) as probe:
            probe.bind((address, 0))
    except OSError:
        return None
    if ipaddress.ip_address(address).is_loopback and name not in ("localhost", address):
        return None
    return f"[{address}]:{port}" if is_ipv6 else f"{address}:{port}"
