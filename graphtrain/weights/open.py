"""Opening of weights in any form: a converted folder, a run, or a run with an adapter."""

from __future__ import annotations

from pathlib import Path

from graphtrain.checkpoints.steps import missing_checkpoint
from graphtrain.config import load_config
from graphtrain.config.run_record import CONFIG
from graphtrain.config.schema import Config
from graphtrain.errors import ConfigError, WeightsError
from graphtrain.weights.base import recorded_folder, verify_base
from graphtrain.weights.merged import MergedWeights
from graphtrain.weights.sources import ConvertedFolder, RunCheckpoint, WeightSource


def open_weights(
    directory: Path, step: int | None = None, *, averaged: bool = False
) -> WeightSource:
    """Open a converted folder or a run directory; the adapter of a run is merged.

    Args:
        directory: Converted folder or run directory.
        step: Step of the run's checkpoint; None for the last.
        averaged: Whether the weights are the moving average of the run's weights.

    Raises:
        TrainingError: the run is not trained yet.
        WeightsError: the directory is neither, or has no such checkpoint; or the base weights of
            the adapter are missing, or are not those of the run.
    """
    if (directory / "model.toml").is_file():
        if step is not None:
            raise WeightsError(
                f"{directory} is a converted folder, which has no checkpoints; do not pass a step"
            )
        if averaged:
            raise WeightsError(
                f"{directory} is a converted folder, which has no averaged weights; remove "
                "--averaged"
            )
        return ConvertedFolder(directory)
    if (directory / "checkpoints").is_dir():
        run = RunCheckpoint(directory, step, averaged=averaged)
        if run.program.adapter is None:
            return run
        base = _open_base_weights(load_config(directory / "config.toml"), directory)
        return MergedWeights(run, base)
    if _is_run_of_project(directory):
        raise missing_checkpoint(directory / "checkpoints", [])
    raise WeightsError(
        f"{directory} is neither a converted folder (no model.toml) nor a run directory (no "
        "checkpoints); convert weights of other formats first: graphtrain convert -h"
    )


def _is_run_of_project(directory: Path) -> bool:
    """Return whether the configuration beside a directory names it as the directory of its run."""
    file = directory.parent / CONFIG
    try:
        named = file.is_file() and Path(load_config(file).run.directory)
    except ConfigError:  # which says nothing about this directory
        return False
    return bool(named) and named.absolute() == directory.absolute()


def _open_base_weights(config: Config, directory: Path) -> WeightSource:
    """Open a run's base weights, from run.init_from if it is a directory, else as recorded."""
    assert config.run.init_from is not None
    configured = Path(config.run.init_from)
    weights = open_weights(configured if configured.is_dir() else recorded_folder(directory))
    verify_base(weights, directory)
    return weights
