"""Devices of a target: real ones, or ahead-of-time ones; their mesh, processor and memory."""

from __future__ import annotations

import os
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import Mesh

from lowering.errors import LoweringError
from lowering.machine import aot_devices, gpu_memory, host
from lowering.machine.target import Target
from lowering.xla import distributed, private
from lowering.xla.fake_peers import fake_peer_processes
from sharding_rules.mesh import MeshShape

_REQUIRES_DEVICES = ("cpu", "rocm")
_THREADS_PER_DEVICE = 8  # more than the number of concurrent collectives without dependencies

_FIXED_COUNT = (
    ", whose number of CPU devices was fixed when JAX was first used; use another process, or in a "
    "notebook restart the kernel, and run the target with the most devices first"
)

Device = Any  # jax.Device; type checkers reject it as a type


def compile_devices(target: Target) -> list[Device]:
    """Return the devices to compile for: real ones on cpu and rocm, else ahead-of-time devices.

    Compiling for cuda and tpu needs no accelerator.

    Raises:
        LoweringError: the target's compiler is not installed, or does not support the topology.
    """
    if target.platform in _REQUIRES_DEVICES:
        if target.platform == "cpu" and target.processes != distributed.count():
            fake_peer_processes(target)
        return devices(target)
    _configure_platform("cpu", 1)
    return list(aot_devices.devices(target))


def devices(target: Target) -> list[Device]:
    """Return the target's devices in this process.

    A CPU is split into the required number of devices, unless JAX's backend is initialized already.

    Raises:
        LoweringError: JAX finds no device of the platform, or fewer than the target has, or devices
            of hosts whose processes have not joined this one.
    """
    _configure_platform(target.platform, target.devices // (target.processes or 1))
    try:
        available = jax.devices(target.platform)  # pyright: ignore[reportArgumentType]
    except RuntimeError as error:
        raise LoweringError(
            _missing_device_message(target, str(error).partition("\n")[0])
        ) from None
    if len(available) < target.devices:
        raise LoweringError(
            f"{target} needs {target.devices} devices; JAX has {len(available)} in this process"
            f"{_FIXED_COUNT if target.platform == 'cpu' else ''}"
        )
    hosts = len({device.process_index for device in available})
    if hosts > distributed.count():  # a TPU slice; each host would act as rank 0
        raise LoweringError(
            f"the devices of {target} are on {hosts} hosts, but this process was started alone; "
            "start one process on each host, with the coordinator's address, the number of "
            "processes and its rank"
        )
    return available[: target.devices]


def _missing_device_message(target: Target, reason: str) -> str:
    requirements = {
        "cuda": "a machine with its driver and pip install 'jax[cuda13]'",
        "rocm": "a machine with ROCm 7 and pip install 'jax[rocm7-local]', which is needed even to "
        "compile",
        "tpu": "a TPU machine and pip install 'jax[tpu]'",
    }
    return (
        f"{target}: JAX finds no {target.platform} device on this machine ({reason}); it requires "
        f"{requirements[target.platform]}. Except for rocm, planning and compiling require no "
        "device"
    )


def _configure_platform(platform: str, cpu_devices: int) -> None:
    """Configure JAX's platforms and number of CPU devices, before its backend is initialized.

    A virtual CPU device blocks one thread for each collective in progress. If XLA:CPU has no thread
    left to start the collectives of the other devices, they deadlock; NPROC enlarges its thread
    pool.
    """
    gpu_memory.reserve_pool()  # JAX reads it when it first looks for devices of any platform
    if platform != "cpu":
        cpu_devices = 1
    elif cpu_devices > 1:
        os.environ.setdefault("NPROC", str(_THREADS_PER_DEVICE * cpu_devices))
    try:
        jax.config.update("jax_platforms", platform if platform == "cpu" else f"{platform},cpu")
        jax.config.update("jax_num_cpu_devices", cpu_devices)
    except RuntimeError:
        pass  # the backend is initialized; devices() checks the number of devices
    jax.config.update("jax_enable_compilation_cache", False)


def make_mesh(shape: MeshShape, placed_on: list[Device]) -> Mesh:
    """Return the JAX mesh of these devices; on TPU in an order that fits the torus."""
    if placed_on[0].platform == "tpu":  # neighbours in the mesh become neighbours in the torus
        return Mesh(_grid_of_slices(shape, placed_on), tuple(shape.axes))
    return Mesh(np.array(placed_on).reshape(tuple(shape.axes.values())), tuple(shape.axes))


def _grid_of_slices(shape: MeshShape, placed_on: list[Device]) -> np.ndarray:
    """Return TPU devices in the order of a mesh, whose slowest axes run across slices."""
    sizes, slices = tuple(shape.axes.values()), _slices(placed_on)
    if slices == 1:
        return mesh_utils.create_device_mesh(sizes, placed_on, allow_split_physical_axes=True)
    across = tuple(shape.across(slices).values())
    inside = tuple(size // part for size, part in zip(sizes, across, strict=True))
    return mesh_utils.create_hybrid_device_mesh(
        inside, across, placed_on, allow_split_physical_axes=True
    )


def _slices(placed_on: list[Device]) -> int:
    """Return the number of TPU slices that devices are in."""
    return len({getattr(device, "slice_index", 0) for device in placed_on})


def fingerprint(placed_on: list[Device]) -> str:
    """Return a string that identifies the processor that compiled code depends on.

    For a CPU, XLA's digest of the devices and the instruction set. For an accelerator, properties
    that both the attached device and its ahead-of-time description have.
    """
    kind = placed_on[0]
    if kind.platform == "gpu":
        return f"compute capability {kind.compute_capability}"
    if kind.platform == "tpu":
        slices = f" in {count} slices" if (count := _slices(placed_on)) > 1 else ""
        return f"{kind.device_kind}, {kind.num_cores} cores, {len(placed_on)} devices{slices}"
    if any(device.process_index for device in placed_on):  # XLA's digest differs between processes
        return f"{len(placed_on)} devices, {host.processor()['features']}"
    return private.cpu_fingerprint(placed_on)


def memory_in_use() -> int:
    """Return the bytes in use on the fullest local device; on CPU, the process's resident bytes."""
    stats = [device.memory_stats() for device in jax.local_devices()]
    bytes_in_use = [stat["bytes_in_use"] for stat in stats if stat]
    return max(bytes_in_use) if bytes_in_use else host.resident_bytes()


def peak_memory() -> int:
    """Return the peak bytes in use on any local device; on CPU, the process's resident peak."""
    stats = [device.memory_stats() for device in jax.local_devices()]
    peaks = [stat["peak_bytes_in_use"] for stat in stats if stat]
    return max(peaks) if peaks else host.peak_resident_bytes()
