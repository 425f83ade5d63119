"""What a user can fix about lowering, compiling and loading."""


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
