"""Problems of the checkpoint from which a run would resume: it is one of another run."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from graphtrain.api.checks.problem import Problem
from graphtrain.config.phase_settings import settings_of_step
from graphtrain.config.schema import Config
from graphtrain.errors import DataError, TrainingError


def has_checkpoints(config: Config) -> bool:
    """Return whether the run directory has a checkpoint: the run trained before."""
    directory = Path(config.run.directory) / "checkpoints"
    if not directory.is_dir():
        return False
    from graphtrain.checkpoints.steps import saved_steps

    try:
        return bool(saved_steps(directory))
    except OSError:  # reported by what reads them
        return False


def checkpoint_problems(
    config: Config, allowed_changes: Sequence[str] = (), *, weights_only: bool = False
) -> Iterator[Problem]:
    """Yield that the newest checkpoint of the run directory is of another run or model.

    A damaged checkpoint is left to the run, which may use the one before it.

    Args:
        config: the configuration.
        allowed_changes: names of settings that may differ from those of the checkpoint.
        weights_only: only its model must be the same.
    """
    if not (Path(config.run.directory) / "checkpoints").is_dir():
        return
    from graphtrain.checkpoints.info import check_same_model, read_checkpoint_info
    from graphtrain.checkpoints.manifest import DamagedCheckpoint, verify_files
    from graphtrain.checkpoints.steps import saved_steps
    from graphtrain.run.resume import UnknownChange, check_identity, identity_of

    directory = Path(config.run.directory) / "checkpoints"
    try:
        steps = saved_steps(directory)
        if not steps:
            return
        path = directory / str(steps[-1])
        verify_files(path, only="about/")
        info = read_checkpoint_info(directory, steps[-1])
        if weights_only:
            check_same_model(path, info, settings_of_step(config.program, steps[-1]))
        else:
            check_identity(path, info, identity_of(config, steps[-1]), allowed_changes)
    except (DamagedCheckpoint, DataError, OSError):
        return  # reported by the checks of the data, or by the run
    except UnknownChange as error:
        yield Problem("checkpoint", str(error), location="")  # it names the option
    except TrainingError as error:
        yield Problem("checkpoint", str(error))
