"""Compilation through libneuronxla, AWS's library, and the persistent cache of its other users.

Source: calls of the library in neuronx-distributed and transformers-neuronx, which are public.
"""

import hashlib
import importlib
from typing import Any

from lowering.errors import LoweringError
from lowering.machine.target import Target
from lowering.neuron import neff
from lowering.neuron.persistent_cache import flags as cache_flags

# Environment variable that chooses the compiler: neuronx-cc (the default) or the library's name.
COMPILER_VARIABLE, NAME = "GRAPHTRAIN_NEURON_COMPILER", "libneuronxla"


def compile_through_library(hlo: bytes, flags: list[str], *, graph: str, target: Target) -> bytes:
    """Compile a normalised module, or read its NEFF from the persistent cache.

    The cache key is a digest of the module, which is the same in every process: any process that
    compiles the same step with the same compiler and flags through this function finds the entry.

    Raises:
        LoweringError: the library is not installed, or failed to compile the program.
    """
    library = _library(target)
    try:
        payload = library.neuron_xla_compile(
            hlo,
            [flag for flag in flags if not flag.startswith("--target=")],  # added by the library
            input_format="hlo",
            platform_target=cache_flags.target_flag(flags),
            cache_key=hashlib.sha256(hlo).hexdigest()[:20],
        )
    except Exception as error:  # the library does not document its exceptions
        kind = type(error).__name__
        raise LoweringError(
            f"{NAME} did not compile {graph} for {target}: {kind}: {error}"
        ) from error
    neff.check(payload, simulated=False, what=f"the compiled {graph} step")
    return payload


def _library(target: Target) -> Any:
    """Import AWS's library; raise an error for the placeholder of that name on PyPI."""
    try:
        library = importlib.import_module(NAME)
    except ModuleNotFoundError as error:
        if error.name != NAME:
            raise
        library = None
    if library is None or not hasattr(library, "neuron_xla_compile"):
        reason = "is not installed" if library is None else "is PyPI's placeholder package"
        raise LoweringError(
            f"{target}: {COMPILER_VARIABLE} selects {NAME}, which "
            f"{reason} on this "
            "machine; install it from AWS's package index, see the AWS Neuron documentation, or "
            f"unset {COMPILER_VARIABLE}"
        )
    return library
