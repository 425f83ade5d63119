"""What a user can fix about lowering, compiling and loading."""


class LoweringError(RuntimeError):
    """A graph cannot be lowered, compiled or loaded; the message says what to change."""
