"""Settings that are errors in new runs, and warnings in those saved before they were refused."""

import warnings
from pathlib import Path

from graphtrain.config.schema import Config
from graphtrain.config.schema.native_checks import frozen_biases
from graphtrain.config.schema.torch_model import is_imported
from graphtrain.errors import ConfigError

_OF_RUN = ("checkpoints", "metrics.jsonl")


def check_frozen_biases(config: Config, name: str, file: Path | None = None) -> None:
    """Refuse a new run whose adapter freezes biases that the settings want to be updated.

    Earlier versions froze them without an error. A saved run is still resumed, exported and served
    with its settings: with another rate, its checkpoints would be of another model.

    Args:
        config: The configuration.
        name: Where it is from, for messages.
        file: config.toml of a directory, if its settings are as they are written there.

    Raises:
        ConfigError: says how to freeze them, and how to update them.
    """
    program = config.program
    if program.adapter is None or is_imported(program.model):
        return
    problem = frozen_biases(program.model, program.adapter)
    if problem is None:
        return
    directories = [Path(config.run.directory), *([file.parent] if file is not None else [])]
    if not any((directory / one).exists() for directory in directories for one in _OF_RUN):
        raise ConfigError(f"{name}: program: {problem}")
    warnings.warn(
        f"{name}: the run froze the biases of routers, although it sets "
        "program.model.moe.bias_update_rate; a new run with these settings is an error",
        stacklevel=2,
    )
