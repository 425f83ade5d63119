"""Collectives of a compiled program: operation x mesh axes x count x bytes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Collective:
    """One collective operation of a program's text, with how often a step executes it."""

    op: str  # all-reduce, all-gather, reduce-scatter, all-to-all, collective-permute
    axes: tuple[str, ...]  # mesh axes along which the devices of a group differ, slowest first
    devices: int  # in one group
    count: int  # executions in a step: the trip counts of the loops around it, multiplied
    bytes: int  # of what one group handles in one execution, per device, in its unsplit form:
    # the result of an all-gather, the operand of a reduce-scatter, either of the others
    dtype: str = ""
    source: str = ""  # line of the model's code, as in "graphtrain/models/mlp.py:45"
    scope: str = ""  # names around the operation, as JAX gives them to the compiler
    loops: tuple[int, ...] = ()  # trip counts around it, outermost first

    @property
    def wire_bytes(self) -> float:
        """Bytes a device sends in one execution, by the algorithm that sends least."""
        share = (self.devices - 1) / self.devices
        factor = {"all-reduce": 2 * share, "collective-permute": 1.0}.get(self.op, share)
        return factor * self.bytes

    @property
    def wire_bytes_per_step(self) -> float:
        return self.count * self.wire_bytes
