"""Problems of run.trackers: packages that are not installed where the run trains."""

from collections.abc import Iterator

from graphtrain.api.checks.problem import Problem
from graphtrain.config.schema import Config
from lowering.machine.extras import is_installed, missing_extra

_MODULES = {"wandb": "wandb", "mlflow": "mlflow", "prometheus": "prometheus_client"}


def trackers_problems(config: Config) -> Iterator[Problem]:
    """Yield which trackers cannot be used on this machine."""
    for name in config.run.trackers:
        if not is_installed(_MODULES[name]):
            message = str(missing_extra(_MODULES[name], f'run.trackers = ["{name}"]'))
            yield Problem("machine", message, (("run", "trackers"),))
