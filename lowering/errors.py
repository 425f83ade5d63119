"""What a user can fix about lowering, compiling and loading."""

from collections.abc import Mapping


class LoweringError(RuntimeError):
    """A graph cannot be lowered, compiled or loaded; the message says what to change."""


class OutOfMemory(LoweringError):
    """The compiler found no way to fit a program into the device's memory."""

    def __init__(self, graph: str, target: object, said: str) -> None:
        first = said.partition("\n")[0].removeprefix("RESOURCE_EXHAUSTED: ")
        super().__init__(
            f"{graph} does not fit {target}: {first}; "
            "graphtrain plan shows what takes the memory and what would fit"
        )


class CompilerMissing(LoweringError):
    """The target's compiler is not on this machine; what it would be given is."""

    def __init__(self, message: str, files: Mapping[str, bytes]) -> None:
        super().__init__(message)
        self.files = files  # by name: whoever catches this puts them into a directory
