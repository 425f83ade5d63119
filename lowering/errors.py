"""What a user can fix about lowering, compiling and loading."""

import re

_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


class LoweringError(RuntimeError):
    """A graph cannot be lowered, compiled or loaded; the message says what to change."""


class OutOfMemory(LoweringError):
    """The compiler found no way to fit a program into the device's memory."""

    def __init__(self, graph: str, target: object, said: str) -> None:
        first = said.partition("\n")[0].removeprefix("RESOURCE_EXHAUSTED: ")
        self.needed_bytes = _needed(first)
        super().__init__(
            f"{graph} does not fit {target}: {first}; "
            "graphtrain plan shows what takes the memory and what would fit"
        )


def _needed(said: str) -> int | None:
    """Bytes that the TPU compiler says it would take, at least; None where it gives no number.

    It writes "... HLO temporaries (56.69G) exceeds ..." or "Used 56.69G of 15.75G hbm" (libtpu
    0.0.42), where G is 2^30.
    """
    found = re.search(r"\(([\d.]+)([KMGT])\) exceeds|Used ([\d.]+)([KMGT]) of", said)
    if found is None:
        return None
    number, unit = found[1] or found[3], found[2] or found[4]
    return int(float(number) * _UNITS[unit])
