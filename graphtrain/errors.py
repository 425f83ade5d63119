"""What a user can fix; the command prints these in one line and exits with their status."""

from lowering.errors import LoweringError
from sharding_rules.errors import ShardingError


class GraphtrainError(Exception):
    """Base of the errors of this package that a user can fix."""

    exit_status = 2


class ConfigError(GraphtrainError):
    """A configuration file or a --set value is wrong."""


class DataError(GraphtrainError):
    """A corpus, tokenizer or dataset cannot be used."""


class CacheError(GraphtrainError):
    """The store of compiled programs cannot be used."""


class MissingProgram(GraphtrainError):
    """`graphtrain run` found no compiled program for what it was asked."""

    exit_status = 3


class TrainingError(GraphtrainError):
    """A run stopped: the loss is not finite, or its directory cannot be used."""


class PlanError(GraphtrainError):
    """A plan cannot be made, or compared with what it should be compared with."""


class LaunchError(GraphtrainError):
    """A run cannot be handed to a scheduler."""


class WeightsError(GraphtrainError):
    """Weights cannot be converted, or are of another model."""


class ExtractionError(GraphtrainError):
    """The graphs of a torch-xla script cannot be extracted, or read."""


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


USER_ERRORS = (GraphtrainError, LoweringError, ShardingError)  # of every package
