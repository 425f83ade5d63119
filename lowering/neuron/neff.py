"""The files that compilers write: NEFFs, and what the simulator writes in their place."""

import json
from typing import Any

from lowering.errors import LoweringError

MAGIC = b"GRAPHTRAIN SIMULATED NEFF, NOT FOR A NEURON DEVICE\n"
SIMULATOR_VERSION = "0.0.0.0+simulator"  # no release of neuronx-cc


def is_simulated(payload: bytes) -> bool:
    return payload.startswith(MAGIC)


def check(payload: bytes, *, simulated: bool, what: str) -> None:
    """Refuse a simulated file where a NEFF belongs, and a NEFF where a simulated file belongs.

    Raises:
        LoweringError: it is the other kind, or empty.
    """
    if not payload:
        raise LoweringError(f"{what} is an empty file")
    if is_simulated(payload) and not simulated:
        raise LoweringError(
            f"{what} was made by the simulator, and no Neuron device can run it; "
            "compile it with neuronx-cc, for a target such as trn1:32"
        )
    if simulated and not is_simulated(payload):
        raise LoweringError(f"{what} was not made by the simulator; compile for neuron-sim again")


def check_directory(directory: str, payload: bytes) -> None:
    """Refuse to put a simulated file among a real compiler's, and the other way round.

    Args:
        directory: of a Neuron persistent cache, as in "neuronxcc-2.27.5334.0+a3f3b4c7".

    Raises:
        LoweringError: the payload does not belong there.
    """
    check(payload, simulated=directory.endswith("+simulator"), what=f"a file for {directory}")


def pack(header: dict[str, Any], executable: bytes) -> bytes:
    """What the simulator writes: magic, one line of JSON, an executable of XLA for this CPU."""
    return MAGIC + json.dumps(header, sort_keys=True).encode() + b"\n" + executable


def unpack(payload: bytes) -> tuple[dict[str, Any], bytes]:
    """The header and executable of what the simulator wrote."""
    header, _, executable = payload.removeprefix(MAGIC).partition(b"\n")
    return json.loads(header), executable
