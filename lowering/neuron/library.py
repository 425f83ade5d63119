"""libneuronxla, AWS's library: compiles through the persistent cache that its other users share.

Source: how neuronx-distributed and transformers-neuronx, which are public, call it.
"""

import hashlib
import importlib
from typing import Any

from lowering.errors import LoweringError
from lowering.machine.target import Target
from lowering.neuron import compiler, neff
from lowering.neuron.persistent_cache import flags as cache_flags


def compile(hlo: bytes, flags: list[str], *, graph: str, target: Target) -> bytes:
    """Compile a normalised module, or take its NEFF from the persistent cache.

    The key is a digest of the module, which is the same in every process: whoever compiles the same
    step with the same compiler and flags through this function finds it.

    Raises:
        LoweringError: the library is not here, or did not compile the program.
    """
    library = _library(target)
    try:
        payload = library.neuron_xla_compile(
            hlo,
            [flag for flag in flags if not flag.startswith("--target=")],  # it adds its own
            input_format="hlo",
            platform_target=cache_flags.machine(flags),
            cache_key=hashlib.sha256(hlo).hexdigest()[:20],
        )
    except Exception as error:  # which ones it raises is documented nowhere
        kind = type(error).__name__
        raise LoweringError(
            f"{compiler.LIBRARY} did not compile {graph} for {target}: {kind}: {error}"
        ) from error
    neff.check(payload, simulated=False, what=f"the compiled {graph} step")
    return payload


def _library(target: Target) -> Any:
    """The library, if it is AWS's: PyPI has a placeholder of its name."""
    try:
        library = importlib.import_module(compiler.LIBRARY)
    except ModuleNotFoundError as error:
        if error.name != compiler.LIBRARY:
            raise
        library = None
    if library is None or not hasattr(library, "neuron_xla_compile"):
        what = "is not installed" if library is None else "is the placeholder that PyPI has"
        raise LoweringError(
            f"{target}: {compiler.CHOICE} asks for {compiler.LIBRARY}, which {what} here; install "
            f"it from the index that the AWS Neuron documentation names, or unset {compiler.CHOICE}"
        )
    return library
