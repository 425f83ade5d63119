"""Processes of a distributed run: rank, count, and exchange of short messages.

Messages go through the key-value store of JAX's distributed service; nothing is traced or compiled.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from lowering.errors import LoweringError, PeerLost
from lowering.xla import private

_EXCHANGE_TIMEOUT = 600  # timeout in seconds for the slowest process to reach an exchange
# Seconds without a heartbeat after which JAX considers a process dead. Longer than the silence that
# graphtrain.run.watchdog accepts, which can name the rank and what it did.
HEARTBEAT_TIMEOUT = 120
_SINGLE_PROCESS = SimpleNamespace(
    process_id=0, num_processes=1, client=None, coordinator_address=None,
    preemption_sync_manager=None,
)  # fmt: skip
_PIECE = 1 << 20  # characters of one message of the service, whose gRPC takes 4 MB
_MAX_NAMES = 8  # processes that a message names
_ranks_per_process = 1  # rank processes that each process of the run starts, as on Ascend
_rounds = itertools.count()  # number of exchanges, equal on all processes; makes keys unique


def service_state() -> Any:
    """Return JAX's state of the run: its client, rank and count; that of a single process."""
    if "jax" not in sys.modules:  # joining a run imports jax, so this is a single process
        return _SINGLE_PROCESS
    return private.distributed_state()


def rank() -> int:
    """Return the rank of this process; 0 for a single process."""
    return service_state().process_id or 0


def count() -> int:
    """Return the number of processes."""
    return service_state().num_processes or 1


def set_ranks_per_process(number: int) -> None:
    """Set how many rank processes each process of the run starts, for messages."""
    global _ranks_per_process
    _ranks_per_process = number


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
    address = service_state().coordinator_address if count() > 1 else None
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
        service_state().client.wait_at_barrier(name, _EXCHANGE_TIMEOUT * 1000)
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
    client, number = service_state().client, next(_rounds)
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
    client = service_state().client
    for number, piece in enumerate(pieces):
        client.key_value_set(f"{key}/{number}", piece)
    client.key_value_set(f"{key}/count", str(len(pieces)))


def receive_text(key: str) -> str:
    """Return the word that another process sends with a key; wait as long as that takes.

    Raises:
        PeerLost: the processes are no longer connected.
    """
    client = service_state().client
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
    service_state().client.key_value_delete(f"{key}/")


def _missing(client: Any, directory: str) -> str:
    """Name the ranks that have not sent a word; "the other ranks" if the service does not say."""
    sent = set()
    with contextlib.suppress(RuntimeError):
        sent = {key.rpartition("/")[2] for key, _ in client.key_value_dir_get(directory)}
    missing = [peer for peer in range(count()) if str(peer) not in sent]
    if not sent or not missing:
        return "the other ranks"
    return names(missing)
