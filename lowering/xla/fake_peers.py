"""Simulated peers of a process, with which it compiles a CPU program of several hosts."""

from __future__ import annotations

import socket
import threading
from typing import Any

from lowering.machine.target import Target
from lowering.xla import distributed, private

_fake_clients: list[Any] = []  # keeps the clients alive, and with them their devices


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
        client = private.connect_distributed_client(address, peer, distributed.HEARTBEAT_TIMEOUT)
        _fake_clients.append(client)
        _fake_clients.append(private.start_cpu_client(client, peer, processes, devices))

    threads = [
        threading.Thread(target=announce, args=(peer,), daemon=True) for peer in range(1, processes)
    ]
    for thread in threads:
        thread.start()
    state = private.distributed_state()
    state.service = private.start_distributed_service(address, processes)
    state.client = private.connect_distributed_client(address, 0, distributed.HEARTBEAT_TIMEOUT)
    state.process_id, state.num_processes = 0, processes


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
