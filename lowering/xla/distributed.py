"""Processes of a distributed run: rank, count, and exchange of short messages.

Messages go through the key-value store of JAX's distributed service; nothing is traced or compiled.
"""

from __future__ import annotations

import atexit
import contextlib
import ipaddress
import itertools
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NoReturn

from lowering.errors import LoweringError, PeerLost
from lowering.machine import rendezvous
from lowering.machine.launchers import Membership, launched
from lowering.machine.rendezvous import Meeting
from lowering.machine.target import Target
from lowering.xla import private

_CONNECT_TIMEOUT = 300  # seconds for JAX to connect processes that are all there
_EXCHANGE_TIMEOUT = 600  # timeout in seconds for the slowest process to reach an exchange
# Seconds without a heartbeat after which JAX considers a process dead. Longer than the silence that
# graphtrain.run.watchdog accepts, which can name the rank and what it did.
_HEARTBEAT_TIMEOUT = 120
_ERROR_EXIT_TIMEOUT = 5  # seconds that rank 0 waits for the other ranks when all end with an error
_SHUTDOWN_TIMEOUT = 120  # seconds that the first process to shut down waits for the last
_WATCHDOG_START = 10  # seconds from the connection of all processes to the start of the watchdog
_WATCHDOG_TIME = 60  # seconds that a watchdog has to end this process when a connection is lost
_SINGLE_PROCESS = SimpleNamespace(
    process_id=0, num_processes=1, client=None, coordinator_address=None,
    preemption_sync_manager=None,
)  # fmt: skip
_PIECE = 1 << 20  # characters of one message of the service, whose gRPC takes 4 MB
_MAX_NAMES = 8  # processes that a message names
_ranks_per_process = 1  # rank processes that each process of the run starts, as on Ascend
_rounds = itertools.count()  # number of exchanges, equal on all processes; makes keys unique


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
    global _ranks_per_process
    _ranks_per_process = target.ranks_per_process
    _silence_xla()
    address = member.coordinator or private.slurm_coordinator()
    bind = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS") or bind_address(address)
    # Slurm starts all processes or none, and JAX asks it for their number.
    sufficient = frozenset(fewer) if member.coordinator else frozenset[int]()
    meeting = Meeting(member.rank, member.count, address, bind, join_timeout, silence, sufficient)
    with rendezvous.joined(meeting, _end_for_another_rank) as session:
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
            _end_without_peers,
            **options,
            num_processes=member.count,
            process_id=member.rank,
            cluster_detection_method="deactivate" if member.coordinator else "slurm",
            initialization_timeout=_CONNECT_TIMEOUT,
            heartbeat_timeout_seconds=_HEARTBEAT_TIMEOUT,
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
    state = _state()
    _kept_services.extend((state.preemption_sync_manager, state.client, state.service))
    state.preemption_sync_manager = None


_kept_services: list[Any] = []


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


def rank() -> int:
    """Return the rank of this process; 0 for a single process."""
    return _state().process_id or 0


def count() -> int:
    """Return the number of processes."""
    return _state().num_processes or 1


def names(ranks: Sequence[int]) -> str:
    """Name processes in a message, by their ranks: "rank 1", "ranks 0, 2".

    Where each starts several rank processes, ranks are those: "process 1 (ranks 2 to 3)".
    """
    each, more = _ranks_per_process, ", ..." if len(ranks) > _MAX_NAMES else ""
    if each == 1:
        noun = "rank" if len(ranks) == 1 else "ranks"
        return f"{noun} {', '.join(map(str, ranks[:_MAX_NAMES]))}{more}"
    words = [f"process {r} (ranks {r * each} to {r * each + each - 1})" for r in ranks[:_MAX_NAMES]]
    return f"{', '.join(words)}{more}"


def first_host() -> str:
    """Return the name or address of the host of rank 0."""
    address = _state().coordinator_address if count() > 1 else None
    return address.rpartition(":")[0].strip("[]") if address else "127.0.0.1"


def own_address() -> str:
    """Return the name or address at which the other processes of the run reach this one."""
    if rank() == 0:
        return first_host()
    target = first_host()
    family, *_, peer = socket.getaddrinfo(target, 9, proto=socket.IPPROTO_UDP)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(peer)  # sends nothing; the system chooses the interface
        return str(probe.getsockname()[0])


def wait_for_all(name: str) -> None:
    """Wait, on any thread, until every process has called this with a name; use each name once.

    Raises:
        PeerLost: a process did not in time, or the processes are no longer connected.
    """
    if count() == 1:
        return
    try:
        _state().client.wait_at_barrier(name, _EXCHANGE_TIMEOUT * 1000)
    except RuntimeError as error:
        first = str(error).partition("\n")[0]
        raise PeerLost(f"{names([rank()])} lost the other ranks at {name}: {first}") from None


def all_gather_text(word: str) -> list[str]:
    """Send `word` to all processes; return the words of all, by rank. All processes synchronize.

    Each process makes a constant number of calls, however many processes there are.

    Raises:
        LoweringError: a process did not reach this exchange in time.
    """
    if count() == 1:
        return [word]
    client, number = _state().client, next(_rounds)
    directory = f"graphtrain/words/{number}/"
    client.key_value_set(f"{directory}{rank()}", word)
    try:
        client.wait_at_barrier(directory, _EXCHANGE_TIMEOUT * 1000)
        words = dict(client.key_value_dir_get(directory))
    except RuntimeError as error:
        first = str(error).partition("\n")[0]
        raise LoweringError(
            f"{names([rank()])} timed out waiting for {_missing(client, directory)}: {first}"
        ) from None
    if rank() == 0 and number:  # all have read the words of the exchange before this one
        client.key_value_delete(f"graphtrain/words/{number - 1}/")
    return [words[f"{directory}{peer}"] for peer in range(count())]


def send_text(key: str, word: str) -> None:
    """Keep a word at a key, for `receive_text` of other processes; each key is used once."""
    pieces = [word[at : at + _PIECE] for at in range(0, len(word), _PIECE)]
    client = _state().client
    for number, piece in enumerate(pieces):
        client.key_value_set(f"{key}/{number}", piece)
    client.key_value_set(f"{key}/count", str(len(pieces)))


def receive_text(key: str) -> str:
    """Return the word that another process sends with a key; wait as long as that takes.

    Raises:
        PeerLost: the processes are no longer connected.
    """
    client = _state().client
    while True:
        try:
            count = int(client.blocking_key_value_get(f"{key}/count", _EXCHANGE_TIMEOUT * 1000))
            pieces = [client.key_value_try_get(f"{key}/{number}") for number in range(count)]
            return "".join(pieces)
        except RuntimeError as error:
            first = str(error).partition("\n")[0]
            if not first.startswith("DEADLINE_EXCEEDED"):
                raise PeerLost(
                    f"{names([rank()])} lost the connection to rank 0: {first}"
                ) from None


def forget_text(key: str) -> None:
    """Delete the words below a key, which all processes have received."""
    _state().client.key_value_delete(f"{key}/")


def _missing(client: Any, directory: str) -> str:
    """Name the ranks that have not sent a word; "the other ranks" if the service does not say."""
    sent = set()
    with contextlib.suppress(RuntimeError):
        sent = {key.rpartition("/")[2] for key, _ in client.key_value_dir_get(directory)}
    missing = [peer for peer in range(count()) if str(peer) not in sent]
    if not sent or not missing:
        return "the other ranks"
    return names(missing)


class StopAgreement:
    """Agreement of all processes to stop at the same place because one of them received SIGTERM."""

    def __init__(self) -> None:
        self._polls = itertools.count()
        self._manager: Any = None

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """Hide JAX's preemption service from Orbax, which would ask it with numbers of its own.

        The service compares the number of each question with the agreed one for equality. Numbers
        of two kinds could pass it by, and the signal would be lost.
        """
        state = _state()
        self._manager, state.preemption_sync_manager = state.preemption_sync_manager, None
        try:
            yield
        finally:
            state.preemption_sync_manager = self._manager

    def is_reached(self) -> bool:
        """Return whether all processes stop here; each asks at the same places of the run."""
        poll = next(self._polls)
        return self._manager is not None and self._manager.reached_sync_point(poll)


def _end_for_another_rank(reason: LoweringError) -> NoReturn:
    """End this process because another rank is lost, or has ended with an error of its own."""
    if isinstance(reason, PeerLost):
        _end_of_lost_rank(str(reason))
    with contextlib.suppress(OSError):
        os.write(2, f"error: {reason}\n".encode())
    os._exit(reason.exit_status)


def _end_of_lost_rank(message: str) -> NoReturn:
    """End this process, whose main thread waits for a rank that is lost, with a message."""
    with contextlib.suppress(OSError):
        os.write(2, f"error: {message}; start the run again\n".encode())
    os._exit(PeerLost.exit_status)


def _end_without_peers() -> None:
    """End this process because the service of the run, or another process, is lost.

    Called on a thread of XLA. A watchdog of the run, which knows more, has some seconds to start,
    to say which rank is lost, and to end the process.
    """
    connection_lost.set()
    if is_watched.wait(_WATCHDOG_START):
        time.sleep(_WATCHDOG_TIME)
    if _own_status:  # of an error that this process has reported while others ended, too
        os._exit(_own_status[0])
    lost = "another rank" if private.service_answers() else "rank 0"
    _end_of_lost_rank(f"{lost} has ended or no longer responds: see what it printed")


connection_lost = threading.Event()  # XLA has lost the service or another process
is_watched = threading.Event()  # a watchdog ends this process if connection_lost is set


_own_status: list[int] = []  # exit status of an error that was reported


def wait_for_failed_ranks(status: int) -> None:
    """Prepare to exit with an error: rank 0, which runs the service, waits for the other ranks.

    Args:
        status: Exit status, also if the service is lost before rank 0 has heard of this process.
    """
    _own_status.append(status)
    client, peers = _state().client, range(1, count())
    with contextlib.suppress(RuntimeError):  # a process that has already ended does not respond
        if rank():
            client.key_value_set(f"graphtrain/left/{rank()}", "")
            return
        for peer in peers:
            client.blocking_key_value_get(f"graphtrain/left/{peer}", _ERROR_EXIT_TIMEOUT * 1000)


def fake_peer_processes(target: Target) -> None:
    """Simulate the other processes of a CPU target in this process, to compile for all devices.

    XLA learns of the devices of other processes only from their clients. Threads of this process
    therefore create further clients, which register their devices and never compute.
    """
    processes, devices = target.topology
    if private.distributed_state().client is not None:
        return
    address = f"127.0.0.1:{_free_port()}"

    def announce(peer: int) -> None:
        client = private.connect_distributed_client(address, peer, _HEARTBEAT_TIMEOUT)
        _fake_clients.append(client)
        _fake_clients.append(private.start_cpu_client(client, peer, processes, devices))

    threads = [
        threading.Thread(target=announce, args=(peer,), daemon=True) for peer in range(1, processes)
    ]
    for thread in threads:
        thread.start()
    state = private.distributed_state()
    state.service = private.start_distributed_service(address, processes)
    state.client = private.connect_distributed_client(address, 0, _HEARTBEAT_TIMEOUT)
    state.process_id, state.num_processes = 0, processes


_fake_clients: list[Any] = []  # keeps the clients alive, and with them their devices


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _state() -> Any:
    if "jax" not in sys.modules:  # initialize() imports jax, so this is a single process
        return _SINGLE_PROCESS
    return private.distributed_state()
