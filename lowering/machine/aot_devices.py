"""Ahead-of-time devices: describe a TPU or GPU that is not attached, to compile for it.

The compilers are JAX plugins. They identify a machine by name (TPU) or by hardware parameters
(GPU), and neither needs a driver.
"""

import math
import os
from functools import cache
from typing import Any

from lowering.errors import LoweringError
from lowering.machine.extras import is_installed, missing_extra
from lowering.machine.target import Target
from lowering.machine.topology_check import CHIPS_PER_HOST

_COMPILERS = {"tpu": "libtpu", "cuda": "jax_plugins.xla_cuda13"}  # module by platform


@cache
def devices(target: Target) -> tuple[Any, ...]:
    """Return the compiler's descriptions of all devices of the target.

    Raises:
        LoweringError: the compiler does not support the topology.
        MissingExtra: the compiler is not installed.
    """
    return {"tpu": _tpu, "cuda": _cuda}[target.platform](target)


def _tpu(target: Target) -> tuple[Any, ...]:
    require_compiler(target)
    # Allow several compiler processes, and skip the query to a metadata server that does not exist.
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_LOG_DIR", "disabled")  # by default it writes to /tmp/tpu_logs
    question: dict[str, Any] = {}
    if "chip" in target.specification:
        question["chip_config_name"] = target.specification["chip"]
    if math.prod(target.topology) < CHIPS_PER_HOST:  # by default it requires complete hosts
        question["chips_per_host_bounds"] = (*target.topology, 1, 1)[:3]
    if target.slices > 1:
        question["num_slices"] = target.slices
    name = f"{target.specification.get('compiled_as', target.machine)}:{target.topology_text}"
    return _topology_devices(target, platform="tpu", topology_name=name, **question)


def _cuda(target: Target) -> tuple[Any, ...]:
    require_compiler(target)
    return _topology_devices(
        target,
        platform="cuda",
        topology_name="",
        target_config=_gpu_config(target),
        topology=_hosts(target),
    )


def _hosts(target: Target) -> str:
    """Return the topology as "slices x hosts x GPUs per host"."""
    per_host = min(target.devices, target.devices_per_host or target.devices)
    return f"1x{target.devices // per_host}x{per_host}"


def _topology_devices(target: Target, **question: Any) -> tuple[Any, ...]:
    from jax.errors import JaxRuntimeError
    from jax.experimental import topologies

    try:
        topology_devices = tuple(topologies.get_topology_desc(**question).devices)
    except JaxRuntimeError as error:
        first = str(error).partition("\n")[0]
        raise LoweringError(f"{target}: the compiler rejects this topology: {first}") from None
    if len(topology_devices) != target.devices:
        raise LoweringError(
            f"{target}: the compiler reports {len(topology_devices)} devices in "
            f"{target.slices * math.prod(target.topology)} chips, expected {target.devices}"
        )
    return topology_devices


def require_compiler(target: Target) -> None:
    """Check that the compiler for devices that are not attached is installed.

    Raises:
        MissingExtra: it is not.
    """
    module = _COMPILERS.get(target.platform)
    if module is not None and not is_installed(module):
        raise missing_extra(module, f"compiling for {target}")


def _gpu_config(target: Target) -> str:
    """Return the GPU as the text form of XLA's GpuTargetConfigProto."""
    about = target.specification
    if "gpu" not in about:
        raise LoweringError(
            f"{target}: its table has no description of the hardware for the compiler ([gpu]), so "
            "it cannot be compiled ahead of time; graphtrain plan --no-compile estimates it"
        )
    card, minor = about["gpu"], about["gpu"].get("minor", 0)
    info = {
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "shared_memory_per_block": 49152,
        "shared_memory_per_core": card["shared_memory"],
        "shared_memory_per_block_optin": card["shared_memory"] - 1024,
        "threads_per_core_limit": card.get("threads", 2048),
        "core_count": card["cores"],
        "fpus_per_core": 64 if (card["capability"], minor) == (8, 0) else 128,
        "block_dim_limit_x": 2**31 - 1,
        "block_dim_limit_y": 65535,
        "block_dim_limit_z": 65535,
        "thread_dim_limit_x": 1024,
        "thread_dim_limit_y": 1024,
        "thread_dim_limit_z": 64,
        "registers_per_core_limit": 65536,
        "registers_per_block_limit": 65536,
        "memory_bandwidth": int(about["bandwidth"]),
        "l2_cache_size": card["l2"],
        "clock_rate_ghz": card["clock_ghz"],
        "device_memory_size": int(about["memory"]),
    }
    fields = " ".join(f"{name}: {value}" for name, value in info.items())
    return (
        f"gpu_device_info {{ {fields} "
        f"cuda_compute_capability {{ major: {card['capability']} minor: {minor} }} }}\n"
        'platform_name: "CUDA"\n'
        "dnn_version_info { major: 9 minor: 10 }\n"
        "runtime_version { major: 13 minor: 0 }\n"
        f'device_description_str: "{card["name"]}"\n'
    )
