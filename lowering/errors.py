"""What a user can fix about lowering, compiling and loading."""

from collections.abc import Mapping
from typing import Any


class LoweringError(RuntimeError):
    """A graph cannot be lowered, compiled or loaded; the message says what to change."""


class OutOfMemory(LoweringError):
    """A program does not fit the memory of a device, as its compiler or the device found."""

    def __init__(self, graph: str, target: object, said: str, largest: str = "") -> None:
        first = said.partition("\n")[0].removeprefix("RESOURCE_EXHAUSTED: ").rstrip(".")
        self.graph, self.target, self.said = graph, target, said
        held = f"; largest, by estimate: {largest}" if largest else ""
        super().__init__(
            f"{graph} does not fit {target}: {first}{held}; "
            "graphtrain plan finds the cheapest changes that would fit"
        )


class CompilerMissing(LoweringError):
    """The target's compiler is not on this machine; what it would be given is."""

    def __init__(
        self, message: str, files: Mapping[str, bytes], preflight: Mapping[str, Any]
    ) -> None:
        super().__init__(message)
        self.files = files  # by name: whoever catches this puts them into a directory
        self.preflight = preflight  # what was found in the program without the compiler
