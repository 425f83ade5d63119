"""Limits of a search that the settings give: the largest batch, and the memory of a device."""

from __future__ import annotations

from graphtrain.config.schema import Program, SearchSettings
from graphtrain.errors import PlanError
from lowering.machine import gpu_memory
from lowering.machine.target import Target


def usable_bytes(target: Target, settings: SearchSettings) -> int | None:
    """Return the memory of a device that a step may use; None for what the target says.

    Raises:
        PlanError: the settings give a device more memory than it has.
    """
    given, fraction = settings.device_memory_gb, settings.memory_fraction
    if given is None and fraction is None:
        return None
    total = target.memory_bytes if given is None else given * 1e9
    if total > target.memory_bytes:
        raise PlanError(
            f"run.search.device_memory_gb = {given:g} is more than a device of {target} has, "
            f"{target.memory_bytes / 1e9:.4g} GB; use at most that, or a target with more memory"
        )
    if fraction is None:
        fraction = gpu_memory.pool_fraction() if target.is_gpu else 1.0
    return int(total * fraction)


def batch_sizes(program: Program, settings: SearchSettings) -> tuple[int, ...]:
    """Return the global batch sizes to try: doublings of the configured one, and the largest.

    Raises:
        PlanError: the largest is less than the configured one, or the run has phases.
    """
    size, largest = program.batch.global_batch_size, settings.max_global_batch_size
    if largest is None or largest == size:
        return (size,)
    if largest < size:
        raise PlanError(
            f"run.search.max_global_batch_size = {largest} is less than "
            f"program.batch.global_batch_size = {size}, the smallest that is tried; raise one, or "
            "lower the other"
        )
    if program.phases:
        raise PlanError(
            "run.search.max_global_batch_size cannot be used with program.phase, whose phases have "
            "batches of their own; remove one"
        )
    sizes = [size]
    while 2 * sizes[-1] < largest:
        sizes.append(2 * sizes[-1])
    return (*sizes, largest)
