"""End of a process whose peers are lost, or that ends with an error while they wait for it."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from typing import NoReturn

from lowering.errors import LoweringError, PeerLost
from lowering.xla import distributed, private

_ERROR_EXIT_TIMEOUT = 5  # seconds that rank 0 waits for the other ranks when all end with an error
_WATCHDOG_START = 10  # seconds from the connection of all processes to the start of the watchdog
_WATCHDOG_TIME = 60  # seconds that a watchdog has to end this process when a connection is lost

connection_lost = threading.Event()  # XLA has lost the service or another process
is_watched = threading.Event()  # a watchdog ends this process if connection_lost is set
_own_status: list[int] = []  # exit status of an error that was reported


def end_for_another_rank(reason: LoweringError) -> NoReturn:
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


def end_without_peers() -> None:
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


def wait_for_failed_ranks(status: int) -> None:
    """Prepare to exit with an error: rank 0, which runs the service, waits for the other ranks.

    Args:
        status: Exit status, also if the service is lost before rank 0 has heard of this process.
    """
    _own_status.append(status)
    client, peers = distributed.service_state().client, range(1, distributed.count())
    with contextlib.suppress(RuntimeError):  # a process that has already ended does not respond
        if distributed.rank():
            client.key_value_set(f"graphtrain/left/{distributed.rank()}", "")
            return
        for peer in peers:
            client.blocking_key_value_get(f"graphtrain/left/{peer}", _ERROR_EXIT_TIMEOUT * 1000)
