"""Parallel tokenization on the machines of a Ray cluster: the tasks of `encode`, sent by Ray.

This process reads the text and writes the datasets; a chunk travels with its text, so the machines
need no file system in common. They need graphtrain in the same version, which is checked.
"""

from __future__ import annotations

import hashlib
import os
import socket
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from importlib import metadata
from pathlib import Path
from typing import Any

from graphtrain.data.prepare.encode import ChunkEncoder, EncodedChunk, ordered_results
from graphtrain.data.readers.corpus import Chunk
from graphtrain.errors import DataError
from lowering.machine.extras import is_installed, missing_extra

LOCAL = "local"  # address: a cluster of this machine alone, started for this call
_CHUNKS_PER_CPU = 2  # in flight: one that is encoded, one that is on its way
_CONNECT_SECONDS = 10.0
# Packages whose versions may change the bytes of a dataset.
_PACKAGES = ("jinja2", "numpy", "pyarrow", "sentencepiece", "tokenizers")


def require_ray() -> None:
    """Raise MissingExtra if Ray is not installed."""
    if not is_installed("ray"):
        raise missing_extra("ray", "graphtrain data prepare --ray")


def encode_on_cluster(
    chunks: Iterable[Chunk], encoder: ChunkEncoder, address: str, workers: int | None
) -> Iterator[EncodedChunk]:
    """Yield encoded chunks in order, each encoded by a task on some machine of a cluster.

    Ray repeats tasks of a machine that is lost on another one.

    Args:
        chunks: Chunks of a corpus.
        encoder: Encoder, sent to each machine once.
        address: Cluster, as "HOST:PORT"; "auto" for the one that this machine is in; "local".
        workers: Maximum number of chunks in flight; None: two for each CPU of the cluster.

    Raises:
        DataError: a record cannot be used, the cluster cannot be reached, or a machine of it has
            another version of graphtrain.
    """
    import ray
    import ray.exceptions

    with _connected(ray, address, workers):
        task = ray.remote(num_cpus=1)(_encode)
        reference, environment = [ray.put(encoder)], _environment()

        def submit(chunk: Chunk) -> Any:
            return partial(ray.get, task.remote(reference, environment, chunk))

        cpus = int(ray.cluster_resources().get("CPU", 1))
        try:
            yield from ordered_results(submit, iter(chunks), workers or _CHUNKS_PER_CPU * cpus)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, DataError):
                raise error.cause from None
            raise
        except ray.exceptions.RayError as error:
            raise DataError(
                f"the Ray cluster {address} cannot encode the text: {_first_line(error)}; "
                "graphtrain must be installed, with the same extras, on each of its machines"
            ) from None


@contextmanager
def _connected(ray: Any, address: str, workers: int | None) -> Iterator[None]:
    """Connect to a cluster, unless this process is connected to one already.

    Raises:
        DataError: it cannot be reached.
    """
    if ray.is_initialized():
        yield
        return
    if address.startswith("ray://"):
        raise DataError(
            f"--ray {address}: Ray Client is not supported; run the command on a machine of the "
            "cluster, with --ray auto"
        )
    options: dict[str, Any] = {"log_to_driver": False, "configure_logging": False}
    if address == LOCAL:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # sends nothing to anyone
        options |= {"num_cpus": workers, "include_dashboard": False}
    try:
        _check_reachable(address)
        ray.init(address=address, **options)
    except (OSError, OverflowError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        raise DataError(
            f"--ray {address}: cannot connect to a Ray cluster: {_first_line(error)}; start one "
            "with ray start --head, or use --ray local"
        ) from None
    try:
        yield
    finally:
        ray.shutdown()


def _check_reachable(address: str) -> None:
    """Connect to HOST:PORT once, because Ray tries for minutes.

    Raises:
        OSError: nothing listens there.
    """
    host, _, port = address.rpartition(":")
    if host and port.isdecimal():
        with socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS):
            pass


def _encode(reference: list[Any], environment: str, chunk: Chunk) -> EncodedChunk:
    """Encode a chunk, in a worker process of Ray."""
    return _encoder_of(reference[0], environment)(chunk)


@cache
def _encoder_of(reference: Any, environment: str) -> ChunkEncoder:
    """Fetch the encoder once for a worker process, because it is large.

    Raises:
        DataError: this machine would encode with other code.
    """
    import ray

    if (found := _environment()) != environment:
        raise DataError(
            f"{os.uname().nodename}, a machine of the Ray cluster, has {found}, and this one has "
            f"{environment}; install the same versions on both"
        )
    return ray.get(reference)


@cache
def _environment() -> str:
    """Return what the bytes of a dataset depend on: versions, and a digest of our code."""
    python = ".".join(map(str, sys.version_info[:2]))
    versions = [f"python {python}", *(f"{name} {_version(name)}" for name in _PACKAGES)]
    code = hashlib.sha256()
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        code.update(path.read_bytes())
    return ", ".join([*versions, f"graphtrain.data {code.hexdigest()[:12]}"])


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "missing"


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).partition("\n")[0]
