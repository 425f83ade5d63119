"""Errors that a user can fix. The command prints them in one line and exits with their status."""

from sharding_rules.errors import UserError

# Exit status of every command, with what it means; shown by --help and in the reference.
EXIT_STATUSES = {
    "0": "success",
    "1": "a defect in graphtrain, with a traceback",
    "2": "an error that you can fix: the message says what is wrong, where, and what to do",
    "3": "`run`, `serve`, `chat`, `evaluate` or `dump` found no compiled program: compile first",
    "4": "the step does not fit in the memory of a device (`plan`), or no strategy fits (`search`)",
    "5": "the plan differs from its lock (`plan check`), or two dumps differ or could not be "
    "compared wholly (`compare`)",
    "75": "a rank was lost or hung: start the run again, and it resumes from its checkpoint",
    "76": "silent data corruption (`run.verify_every`): replace the host that the message names",
    "128 + n": "stopped by signal n, after saving a checkpoint if a run was training",
}


class GraphtrainError(UserError):
    """Base class of the errors of this package that a user can fix."""

    exit_status = 2


class ConfigError(GraphtrainError):
    """A configuration file or a --set value is wrong."""


class DataError(GraphtrainError):
    """A corpus, tokenizer or dataset is missing, damaged or unsuitable."""


class CacheError(GraphtrainError):
    """The cache of compiled programs, or a program in it, cannot be used."""


class MissingProgram(GraphtrainError):
    """A compiled program that a run needs is not in the cache."""

    exit_status = 3


class TrainingError(GraphtrainError):
    """A run cannot start or continue: for example a loss that is not finite."""


class CorruptionError(GraphtrainError):
    """A device computed or stored a wrong value without an error."""

    exit_status = 76


class CallbackError(GraphtrainError):
    """A callback of a run raised an exception, or has a method that is no event."""


class DumpError(GraphtrainError):
    """A dump of arrays cannot be written, read, or compared with another."""


class PlanError(GraphtrainError):
    """A plan cannot be made, or cannot be compared with another."""


class LaunchError(GraphtrainError):
    """A run cannot be submitted to a cluster scheduler."""


class WeightsError(GraphtrainError):
    """Weights cannot be read or converted, or belong to another model."""


class ExtractionError(GraphtrainError):
    """The graphs of a torch-xla script cannot be extracted or read."""


class ImportedModelError(GraphtrainError):
    """A PyTorch model cannot be built or traced, or its trace is not equivalent."""


class StrictFrontEndRequired(ImportedModelError):
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
