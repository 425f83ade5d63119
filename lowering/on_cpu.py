"""Whether XLA compiles for a CPU what is traced, and barriers that it heeds there.

XLA:CPU fuses into a loop whatever the loop reads, and computes it again for each element that does:
the angles of rotary positions once a head. An optimization barrier says what to compute once and
keep. `jax_xla` has XLA:CPU leave them in, which by default takes them out before it fuses.
"""

from typing import TypeVar

import jax

from lowering.tracing import traced_target

# By XLA's name of the pass that takes barriers out (jaxlib 0.10, 0.11).
KEEP_BARRIERS = {"xla_disable_hlo_passes": "cse_barrier_expander"}

Arrays = TypeVar("Arrays")


def on_cpu() -> bool:
    """Whether what is traced is for a CPU; not so where nobody said."""
    target = traced_target()
    return target is not None and target.platform == "cpu"


def computed_once(arrays: Arrays) -> Arrays:
    """Arrays that XLA:CPU is to compute once and keep; on other platforms, as they are."""
    return jax.lax.optimization_barrier(arrays) if on_cpu() else arrays
