"""Program of one device, with its collectives: a computation after XLA's SPMD partitioner.

It is the input of compilers other than XLA's own, which compile a single-device program.
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from lowering.errors import LoweringError
from lowering.hlo.proto import read_dump, write_module

# The pass after which a module is the program of one device; the second is for one-device meshes.
_PASSES = ("spmd-partitioning", "sharding-remover")
_FAST_COMPILE_OPTIONS: dict[str, Any] = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}
if jax.__version_info__ < (0, 11):  # halves the time; 0.11 has only the MLIR fusion emitters
    _FAST_COMPILE_OPTIONS["xla_cpu_use_fusion_emitters"] = False


@dataclass(frozen=True)
class DeviceProgram:
    """Program of one device, and the memory that it needs besides its inputs and outputs."""

    hlo: bytes  # a serialized HloModuleProto
    temporaries: int  # bytes, for XLA:CPU; the order of magnitude for other compilers
    outputs: tuple[Any, ...]  # sharding of each output


def partition_spmd(lowered: Any) -> DeviceProgram:
    """Return the program of one device; between processes only the module's id differs.

    The partitioner has no API (jaxlib 0.11), so the computation is compiled for CPU, with little
    optimization, and the module is dumped after the partitioner. Several processes may do this at
    once.

    Args:
        lowered: A jax.stages.Lowered for as many CPU devices as the target has.

    Raises:
        LoweringError: XLA did not dump the module.
    """
    with tempfile.TemporaryDirectory(prefix="graphtrain-partitioned-") as directory:
        compiled = lowered.compile(
            compiler_options=_FAST_COMPILE_OPTIONS
            | {
                "xla_dump_to": directory,
                "xla_dump_hlo_pass_re": "|".join(_PASSES),
                "xla_dump_hlo_as_proto": True,
            }
        )
        for name in _PASSES:
            for dump_path in sorted(Path(directory).glob(f"*.after_{name}.*.hlo.pb")):
                hlo = write_module(read_dump(dump_path.read_bytes()))
                temporaries = compiled.memory_analysis().temp_size_in_bytes
                return DeviceProgram(
                    hlo, temporaries, tuple(jax.tree.leaves(compiled.output_shardings))
                )
    raise LoweringError(
        f"XLA dumped no module after any of the passes {', '.join(_PASSES)}; graphtrain was tested "
        "with jax 0.10 and 0.11, so install one of these versions"
    )
