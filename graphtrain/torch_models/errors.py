"""Errors of imported models that a user can fix."""

from graphtrain.errors import GraphtrainError


class ImportedModelError(GraphtrainError):
    """A PyTorch model cannot be built or traced, or its trace is not equivalent."""


class NeedsStrict(ImportedModelError):
    """A trace would be silently wrong; the strict front end is needed.

    Args:
        reason: what a trace would lose, and where.
        remedy: what to change in the module instead.
    """

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(
            f'{reason}; {remedy}, or set program.model.front_end = "strict" (or "auto")'
        )
        self.reason = reason
