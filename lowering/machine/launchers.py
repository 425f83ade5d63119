"""Launchers: which process of a run this is, by the variables of what started it."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lowering.errors import LoweringError
from sharding_rules.documents import read_json

_PORT = 8476  # of the coordinator where the launcher names only its host

# Rank, number of processes, and number of those on this host, of launchers of MPI.
_MPI = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),  # Open MPI
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"),  # MPICH, Intel MPI and others with Hydra
)
_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Membership:
    """Rank of this process and number of processes."""

    rank: int
    count: int
    coordinator: str | None = None  # host:port of rank 0; None if JAX reads it from Slurm


def launched(environ: Mapping[str, str], coordinator: str | None = None) -> Membership | None:
    """Return what a launcher says of this process; None for a single process.

    Slurm is asked first, then the variables of a TPU slice, torchrun, Ascend's rank table and MPI.

    Args:
        environ: Environment variables.
        coordinator: Address of rank 0, if the user gave it.

    Raises:
        LoweringError: the variables contradict, or do not say where rank 0 is.
    """
    if "SLURM_STEP_NODELIST" in environ and _number(environ, "SLURM_STEP_NUM_TASKS", 1) > 1:
        found = Membership(
            _number(environ, "SLURM_PROCID"), _number(environ, "SLURM_STEP_NUM_TASKS"), coordinator
        )
        return _checked(found, "SLURM_PROCID")
    for find in (_tpu_slice, _torchrun, _rank_table, _mpi):
        found = find(environ, coordinator)
        if found is not None:
            return found if found.count > 1 else None
    return None


def _tpu_slice(environ: Mapping[str, str], coordinator: str | None) -> Membership | None:
    """Return the host in the pods of TPU slices on GKE; one host is a single process.

    Ranks are consecutive in a slice.

    Source: jax/_src/clusters/cloud_tpu_cluster.py, jax 0.10.2.
    """
    hosts = environ.get("TPU_WORKER_HOSTNAMES", "").split(",")
    slices = _number(environ, "MEGASCALE_NUM_SLICES", 1)
    count = len(hosts) * slices
    if count < 2 or "TPU_WORKER_ID" not in environ:
        return None
    first, rank = hosts[0].strip(), _number(environ, "TPU_WORKER_ID")
    if slices > 1:
        first = environ.get("MEGASCALE_COORDINATOR_ADDRESS", "").partition(":")[0]
        rank += len(hosts) * _number(environ, "MEGASCALE_SLICE_ID")
    if not first and coordinator is None:
        raise LoweringError(
            f"MEGASCALE_NUM_SLICES = {slices}, but MEGASCALE_COORDINATOR_ADDRESS does not say "
            "where rank 0 is; set GRAPHTRAIN_COORDINATOR to HOST:PORT of rank 0"
        )
    found = Membership(rank, count, coordinator or f"{first}:{_PORT}")
    return _checked(found, "TPU_WORKER_ID")


def _torchrun(environ: Mapping[str, str], coordinator: str | None) -> Membership | None:
    """Return the worker of torchrun, or the pod of a PyTorchJob.

    An agent of torchrun that shares its store listens at MASTER_PORT itself.

    Source: torch/distributed/elastic/agent/server/local_elastic_agent.py, torch 2.13.
    """
    if not all(name in environ for name in _TORCHRUN):
        return None
    is_taken = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    port = _number(environ, "MASTER_PORT") + is_taken
    address = coordinator or f"{environ['MASTER_ADDR']}:{port}"
    found = Membership(_number(environ, "RANK"), _number(environ, "WORLD_SIZE"), address)
    return _checked(found, "RANK")


def _mpi(environ: Mapping[str, str], coordinator: str | None) -> Membership | None:
    """Return the process of mpirun, mpiexec or another launcher with these variables."""
    for rank, size, local_size in _MPI:
        if rank not in environ or size not in environ:
            continue
        count = _number(environ, size)
        found = Membership(_number(environ, rank), count, coordinator)
        if count == 1 or coordinator:
            return _checked(found, rank)
        if "MASTER_ADDR" in environ:
            address = f"{environ['MASTER_ADDR']}:{_number(environ, 'MASTER_PORT', _PORT)}"
        elif _number(environ, local_size, 0) == count:
            address = f"127.0.0.1:{_PORT}"  # all are on this host
        else:
            raise LoweringError(
                f"{rank} and {size} do not say where rank 0 is; set GRAPHTRAIN_COORDINATOR to "
                "HOST:PORT of rank 0 for all processes, for example with mpirun -x"
            )
        return _checked(Membership(found.rank, count, address), rank)
    return None


def _rank_table(environ: Mapping[str, str], coordinator: str | None) -> Membership | None:
    """Return the host in the rank table of Ascend, with one process for each host.

    Source: HCCL's guide, "Rank Table Configuration", versions 1.0 and 1.2 of the format.
    """
    path = environ.get("RANK_TABLE_FILE")
    if not path:
        return None
    servers = sorted(_servers(path), key=lambda one: min(one.ranks))
    if len(servers) < 2:
        return Membership(0, 1)
    if "RANK_ID" in environ:
        own = _number(environ, "RANK_ID")
        places = [index for index, one in enumerate(servers) if own in one.ranks]
        reason = f"no server with rank_id {own}, which is RANK_ID"
    else:
        places = [index for index, one in enumerate(servers) if _is_this_host(one.address)]
        reason = "no server whose server_id or host_ip is an address of this host; set RANK_ID"
    if len(places) != 1:
        raise LoweringError(f"RANK_TABLE_FILE = {path}: {reason}")
    return Membership(places[0], len(servers), coordinator or f"{servers[0].address}:{_PORT}")


@dataclass(frozen=True)
class _Server:
    """One host of a rank table."""

    address: str
    ranks: tuple[int, ...]


def _servers(path: str) -> Iterator[_Server]:
    try:
        for server in read_json(Path(path))["server_list"]:
            ranks = tuple(int(device["rank_id"]) for device in server["device"])
            yield _Server(str(server.get("host_ip") or server["server_id"]), (min(ranks), *ranks))
    except OSError as error:
        raise LoweringError(f"RANK_TABLE_FILE = {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise LoweringError(
            f"RANK_TABLE_FILE = {path} is not a rank table: {type(error).__name__}: {error}"
        ) from None


def _is_this_host(address: str) -> bool:
    """Return whether an address or a name is of this host."""
    try:
        found = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)
        family, _, _, _, where = found[0]
        with socket.socket(family) as probe:
            probe.bind(where)
    except OSError:
        return False
    return True


def _number(environ: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """Return a number of the environment.

    Raises:
        LoweringError: it is missing without a default, or no number.
    """
    word = environ.get(name, "" if default is None else str(default))
    if not (word.isascii() and word.isdigit() and len(word) < 10):
        raise LoweringError(f"{name} = {word!r} should be a number")
    return int(word)


def _checked(member: Membership, variable: str) -> Membership:
    if member.rank >= member.count:
        raise LoweringError(
            f"{variable} = {member.rank} is out of range: {member.count} processes have the ranks "
            f"0 to {member.count - 1}"
        )
    return member
