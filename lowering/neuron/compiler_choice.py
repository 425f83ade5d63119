"""Choice of how to compile for Neuron devices: neuronx-cc, or AWS's library, which calls it."""

import os
import time

from lowering.errors import LoweringError
from lowering.machine.target import Target
from lowering.neuron import compiler, library
from lowering.neuron.compiler import Compiler


def compile_timed(
    installed_compiler: Compiler, hlo: bytes, chosen: list[str], *, graph: str, target: Target
) -> tuple[bytes, float]:
    """Compile a normalised module; return the NEFF and the compile time in seconds.

    The environment variable GRAPHTRAIN_NEURON_COMPILER chooses neuronx-cc, which is the default, or
    libneuronxla.

    Raises:
        OutOfMemory: see `compiler.run`.
        CompilerFailed: see `compiler.run`.
        CompilerInterrupted: see `compiler.run`.
        LoweringError: the variable has an unknown value, or the library failed.
    """
    start_time = time.perf_counter()
    if _uses_library(target):
        payload = library.compile_through_library(hlo, chosen, graph=graph, target=target)
    else:
        payload = compiler.run(installed_compiler, hlo, chosen, graph=graph, target=target)
    return payload, time.perf_counter() - start_time


def _uses_library(target: Target) -> bool:
    """Return whether the environment selects AWS's library.

    Raises:
        LoweringError: the environment variable has an unknown value.
    """
    compiler_name = os.environ.get(library.COMPILER_VARIABLE, "neuronx-cc")
    if compiler_name not in ("neuronx-cc", library.NAME):
        raise LoweringError(
            f"{library.COMPILER_VARIABLE}={compiler_name} is neither neuronx-cc nor "
            f"{library.NAME}; set it to one of them, or unset it for neuronx-cc"
        )
    return compiler_name == library.NAME and not target.runs_on_cpu
