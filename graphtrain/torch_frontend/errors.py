"""What a user can fix about an imported model."""

from graphtrain.errors import GraphtrainError


class ImportedModelError(GraphtrainError):
    """A model of PyTorch cannot be made, traced, or trusted; the message says why."""


class NeedsStrict(ImportedModelError):
    """A trace would be wrong in silence, where the strict front end is right."""

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(
            f'{reason}; {remedy}, or set program.model.front_end = "strict" (or "auto")'
        )
        self.reason = reason
