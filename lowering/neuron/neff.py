"""Compiled files: the NEFFs of neuronx-cc, and the simulator's replacement for them."""

import json
from typing import Any

from lowering.errors import LoweringError

SIMULATOR_MAGIC = b"GRAPHTRAIN SIMULATED NEFF, NOT FOR A NEURON DEVICE\n"
SIMULATOR_VERSION = "0.0.0.0+simulator"  # no release of neuronx-cc


def is_simulated(payload: bytes) -> bool:
    """Return whether a file was written by the simulator."""
    return payload.startswith(SIMULATOR_MAGIC)


def check(payload: bytes, *, simulated: bool, what: str) -> None:
    """Check that a file is a NEFF, or that it is a simulated one if `simulated`.

    Raises:
        LoweringError: the file is of the other kind, or empty.
    """
    if not payload:
        raise LoweringError(f"{what} is an empty file")
    if is_simulated(payload) and not simulated:
        raise LoweringError(
            f"{what} was made by the simulator, and no Neuron device can run it; "
            "compile with neuronx-cc, for a target such as trn1:32"
        )
    if simulated and not is_simulated(payload):
        raise LoweringError(f"{what} was not made by the simulator; compile for neuron-sim again")


def check_directory(directory: str, payload: bytes) -> None:
    """Check that a file belongs in a directory of a Neuron persistent cache.

    Simulated files belong only in the simulator's directory, and NEFFs only in a compiler's.

    Args:
        directory: name of the directory, for example "neuronxcc-2.27.5334.0+a3f3b4c7".
        payload: content of the file, or its first bytes.

    Raises:
        LoweringError: the file does not belong there.
    """
    check(payload, simulated=directory.endswith("+simulator"), what=f"a file for {directory}")


def pack(header: dict[str, Any], executable: bytes) -> bytes:
    """Return the file of the simulator: magic, one line of JSON, an XLA executable for this CPU."""
    return SIMULATOR_MAGIC + json.dumps(header, sort_keys=True).encode() + b"\n" + executable


def unpack(payload: bytes) -> tuple[dict[str, Any], bytes]:
    """Return the header and the XLA executable in a file of the simulator."""
    header, _, executable = payload.removeprefix(SIMULATOR_MAGIC).partition(b"\n")
    return json.loads(header), executable
