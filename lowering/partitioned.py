"""One device's program, with its collectives: a lowered computation after XLA's SPMD partitioner.

For compilers other than XLA's own, which take the program of one device.
"""

import tempfile
from pathlib import Path
from typing import Any

from lowering.errors import LoweringError
from lowering.neuron.proto import read_dump, write_module

# The pass after which a module is that of one device; the second name is for a single device.
_PASSES = ("spmd-partitioning", "sharding-remover")


def partitioned(lowered: Any) -> bytes:
    """The HloModuleProto of one device's program; processes differ in its id only.

    The partitioner has no entrance of its own (jaxlib 0.11), so the computation is compiled for a
    CPU, quickly, and the module is written down on its way. Several processes may do so at once.

    Args:
        lowered: A jax.stages.Lowered for devices of a CPU, as many as the target has.

    Raises:
        LoweringError: XLA wrote no such module.
    """
    with tempfile.TemporaryDirectory(prefix="graphtrain-partitioned-") as directory:
        lowered.compile(
            compiler_options={
                "xla_dump_to": directory,
                "xla_dump_hlo_pass_re": "|".join(_PASSES),
                "xla_dump_hlo_as_proto": True,
                "xla_backend_optimization_level": 0,  # what comes after is thrown away
                "xla_llvm_disable_expensive_passes": True,
            }
        )
        for name in _PASSES:
            for found in sorted(Path(directory).glob(f"*.after_{name}.*.hlo.pb")):
                return write_module(read_dump(found.read_bytes()))
    raise LoweringError(
        f"XLA wrote no module after any of its passes {', '.join(_PASSES)}; this jax is newer than "
        "those that graphtrain was tested with (0.10 and 0.11)"
    )
