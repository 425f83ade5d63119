"""One device's program, with its collectives: a lowered computation after XLA's SPMD partitioner.

For compilers other than XLA's own, which take the program of one device.
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from lowering.errors import LoweringError
from lowering.hlo.proto import read_dump, write_module

# The pass after which a module is that of one device; the second name is for a single device.
_PASSES = ("spmd-partitioning", "sharding-remover")
_CODE_IS_THROWN_AWAY: dict[str, Any] = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}
if jax.__version_info__ < (0, 11):  # half the time without the emitters of MLIR; 0.11 has no others
    _CODE_IS_THROWN_AWAY["xla_cpu_use_fusion_emitters"] = False


@dataclass(frozen=True)
class Partitioned:
    """One device's program, and what XLA would hold beside its inputs and outputs."""

    hlo: bytes  # an HloModuleProto
    temporaries: int  # bytes on a CPU; other compilers differ, in the same order of magnitude
    outputs: tuple[Any, ...]  # the sharding of each


def partition(lowered: Any) -> Partitioned:
    """One device's program; processes differ in its module's id only.

    The partitioner has no entrance of its own (jaxlib 0.11), so the computation is compiled for a
    CPU, quickly, and the module is written down on its way. Several processes may do so at once.

    Args:
        lowered: A jax.stages.Lowered for devices of a CPU, as many as the target has.

    Raises:
        LoweringError: XLA wrote no such module.
    """
    with tempfile.TemporaryDirectory(prefix="graphtrain-partitioned-") as directory:
        compiled = lowered.compile(
            compiler_options=_CODE_IS_THROWN_AWAY
            | {
                "xla_dump_to": directory,
                "xla_dump_hlo_pass_re": "|".join(_PASSES),
                "xla_dump_hlo_as_proto": True,
            }
        )
        for name in _PASSES:
            for found in sorted(Path(directory).glob(f"*.after_{name}.*.hlo.pb")):
                hlo = write_module(read_dump(found.read_bytes()))
                temporaries = compiled.memory_analysis().temp_size_in_bytes
                return Partitioned(
                    hlo, temporaries, tuple(jax.tree.leaves(compiled.output_shardings))
                )
    raise LoweringError(
        f"XLA wrote no module after any of its passes {', '.join(_PASSES)}; this jax is newer than "
        "those that graphtrain was tested with (0.10 and 0.11)"
    )
