"""What a user can fix about an imported model."""

from graphtrain.errors import GraphtrainError


class ImportedModelError(GraphtrainError):
    """A model of PyTorch cannot be made, traced, or trusted; the message says why."""
