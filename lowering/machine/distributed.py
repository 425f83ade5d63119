"""The processes of a run: who they are, and how they agree without computing anything.

JAX's distributed service carries every word between them; nothing here is traced or compiled.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from lowering.errors import LoweringError
from lowering.machine.target import Target

_PATIENCE = 600  # seconds for the slowest process to come as far as the others
_SILENCE = 60  # seconds without a sign of life after which a process counts as dead
_GOODBYE = 5  # seconds that rank 0 waits for others that end with an error too
_FAREWELL = 120  # seconds that the first to end waits for the last
_SLICE_PORT = 8476  # of the coordinator on the first host of a TPU slice
_ALONE = SimpleNamespace(
    process_id=0, num_processes=1, client=None, coordinator_address=None,
    preemption_sync_manager=None,
)  # fmt: skip
_rounds = itertools.count()  # names are used once; every process counts alike


@dataclass(frozen=True)
class Membership:
    """Which of how many processes this is."""

    rank: int
    count: int
    coordinator: str | None = None  # host:port of rank 0; None where JAX asks the launcher


def membership(
    environ: Mapping[str, str] = os.environ,
    *,
    coordinator: str | None = None,
    count: int | None = None,
    rank: int | None = None,
) -> Membership | None:
    """What was given, else what Slurm says of this step, or a TPU slice on Kubernetes of its hosts;
    None for a process alone.

    Raises:
        LoweringError: only a part is given, or the rank is none of the processes.
    """
    given = {"--coordinator": coordinator, "--processes": count, "--rank": rank}
    if coordinator is not None and count is not None and rank is not None:
        if not 0 <= rank < count:
            raise LoweringError(f"--rank {rank} of --processes {count}: ranks begin with 0")
        return Membership(rank, count, coordinator)
    if any(value is not None for value in given.values()):
        missing = ", ".join(name for name, value in given.items() if value is None)
        raise LoweringError(f"several processes need {missing} as well")
    if "SLURM_STEP_NODELIST" in environ and int(environ.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
        return Membership(int(environ["SLURM_PROCID"]), int(environ["SLURM_STEP_NUM_TASKS"]))
    # As GKE sets them in the pods of a slice; one host is a process alone.
    hosts = environ.get("TPU_WORKER_HOSTNAMES", "").split(",")
    if len(hosts) > 1 and "TPU_WORKER_ID" in environ:
        return Membership(
            int(environ["TPU_WORKER_ID"]), len(hosts), f"{hosts[0].strip()}:{_SLICE_PORT}"
        )
    return None


def check_target(target: Target, member: Membership | None) -> None:
    """Refuse a number of processes that the target was not compiled for.

    Raises:
        LoweringError: says how many there should be, and how to start them.
    """
    count = member.count if member else 1
    if target.processes in (None, count):
        return
    raise LoweringError(
        f"{target} runs in {target.processes} processes, one for each host, and here are {count}; "
        "start them with graphtrain launch slurm, with srun, or give each --coordinator, "
        "--processes and --rank"
    )


def join(member: Membership, target: Target) -> None:
    """Meet the other processes; before anything asks JAX for a device.

    Raises:
        LoweringError: they do not come together in time.
    """
    import jax

    given: dict[str, Any] = {}
    if member.coordinator:
        given["coordinator_address"] = member.coordinator
    if target.is_gpu and target.processes:
        # All cards of the host; JAX would take one, as for a process each.
        given["local_device_ids"] = list(range(target.devices // target.processes))
    try:
        jax.distributed.initialize(
            **given,
            num_processes=member.count,
            process_id=member.rank,
            cluster_detection_method="deactivate" if member.coordinator else "slurm",
            heartbeat_timeout_seconds=_SILENCE,
            shutdown_timeout_seconds=_FAREWELL,
        )
    except RuntimeError as error:
        first = str(error).partition("\n")[0]
        raise LoweringError(
            f"rank {member.rank} of {member.count} processes did not meet the others at "
            f"{member.coordinator or 'the first node of the step'}: {first}"
        ) from None


def rank() -> int:
    """This process's number; 0 where it is alone."""
    return _state().process_id or 0


def count() -> int:
    """How many processes there are."""
    return _state().num_processes or 1


def first_host() -> str:
    """Name or address of the host of rank 0, by which the others know it."""
    address = _state().coordinator_address if count() > 1 else None
    return address.rpartition(":")[0].strip("[]") if address else "127.0.0.1"


def exchange(word: str) -> list[str]:
    """What every process says at this point of the run, by rank; all wait for the slowest.

    Raises:
        LoweringError: one did not come.
    """
    if count() == 1:
        return [word]
    client, name = _state().client, f"graphtrain/{next(_rounds)}"
    client.key_value_set(f"{name}/{rank()}", word)
    try:
        return [
            client.blocking_key_value_get(f"{name}/{other}", _PATIENCE * 1000)
            for other in range(count())
        ]
    except RuntimeError as error:
        first = str(error).partition("\n")[0]
        raise LoweringError(f"rank {rank()} waited in vain for the others: {first}") from None


def is_stop_agreed(step: int) -> bool:
    """Whether all stop after this step, since one of them was sent SIGTERM."""
    manager = _state().preemption_sync_manager
    return manager is not None and manager.reached_sync_point(step)


def leave() -> None:
    """Before an end with an error: the service is in rank 0, which therefore goes last."""
    client, others = _state().client, range(1, count())
    with contextlib.suppress(RuntimeError):  # who is gone already does not answer
        if rank():
            client.key_value_set(f"graphtrain/left/{rank()}", "")
            return
        for other in others:
            client.blocking_key_value_get(f"graphtrain/left/{other}", _GOODBYE * 1000)


def stand_in(target: Target) -> None:
    """Give a compiler the devices of all processes of a CPU target, in this process alone.

    XLA knows the devices of other processes only by meeting them. So they are met: further clients
    in threads of this process announce their devices, and never compute.
    """
    from jax._src import distributed
    from jax._src.lib import _jax, xla_client  # pyright: ignore[reportPrivateImportUsage]

    processes, devices = target.topology
    if distributed.global_state.client is not None:
        return
    address = f"127.0.0.1:{_free_port()}"

    def announce(other: int) -> None:
        client = _jax.get_distributed_runtime_client(address, other, init_timeout=_SILENCE)
        client.connect()
        _announced.append(client)
        _announced.append(
            xla_client.make_cpu_client(
                distributed_client=client,
                node_id=other,
                num_nodes=processes,
                num_devices=devices,
            )
        )

    others = [
        threading.Thread(target=announce, args=(other,), daemon=True)
        for other in range(1, processes)
    ]
    for thread in others:
        thread.start()
    state: Any = distributed.global_state
    state.service = _jax.get_distributed_runtime_service(address, processes)
    state.client = _jax.get_distributed_runtime_client(address, 0, init_timeout=_SILENCE)
    state.client.connect()
    state.process_id, state.num_processes = 0, processes


_announced: list[Any] = []  # kept, or their devices would go


def _free_port() -> int:
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _state() -> Any:
    if "jax" not in sys.modules:  # who met others has imported it; a process alone can wait
        return _ALONE
    from jax._src import distributed  # the key-value store has no public name (jax 0.11)

    return distributed.global_state
