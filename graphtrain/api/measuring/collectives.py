"""Measured collectives over all devices of this process, by size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from graphtrain.api.measuring.timing import compiled, less, measure_compiled
from graphtrain.cost_model.machine_profile import MeasuredCollective

_AXIS = "all"
_REPEATED = 8  # collectives in one call
_BYTES = (1 << 8, 1 << 16, 1 << 19, 1 << 22)  # as Collective.bytes has them


def measure_collectives(devices: int, observe: Callable[[str], None]) -> list[MeasuredCollective]:
    """Measure the collectives of training steps over the first devices of this process."""
    observe(f"collectives over {devices} devices")
    mesh = Mesh(np.array(jax.devices()[:devices]), (_AXIS,))
    return [
        _measure(mesh, op, function, size)
        for op, function in _functions(devices).items()
        for size in _BYTES
    ]


def _functions(devices: int) -> dict[str, Callable[[Any], Any]]:
    """Return a collective by name, of a device's array that is as large before as after it."""
    ring = [(one, (one + 1) % devices) for one in range(devices)]
    return {
        "all-reduce": lambda x: jax.lax.psum(x, _AXIS),
        "all-gather": lambda x: jax.lax.all_gather(x[: x.size // devices], _AXIS, tiled=True),
        "reduce-scatter": lambda x: jax.lax.dynamic_update_slice(
            x, jax.lax.psum_scatter(x, _AXIS, tiled=True), (0,)
        ),
        "all-to-all": lambda x: jax.lax.all_to_all(x, _AXIS, 0, 0, tiled=True),
        "collective-permute": lambda x: jax.lax.ppermute(x, _AXIS, ring),
    }


def _measure(mesh: Mesh, op: str, function: Callable[[Any], Any], size: int) -> MeasuredCollective:
    devices = mesh.size
    elements = size // 4

    def repeated(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, _REPEATED, lambda _, x: function(x), x)

    split = PartitionSpec(_AXIS)
    sharded = jax.shard_map(repeated, mesh=mesh, in_specs=split, out_specs=split, check_vma=False)
    x = jax.device_put(jnp.ones(elements * devices), NamedSharding(mesh, split))
    measured = measure_compiled(compiled(sharded, x), x)
    # On a CPU, processor time is of all devices; by the clock, all send at the same time.
    share = devices if jax.default_backend() == "cpu" else 1
    each = less(measured, 0.0, _REPEATED * share)
    return MeasuredCollective(**asdict(each), op=op, devices=devices, bytes=size)
