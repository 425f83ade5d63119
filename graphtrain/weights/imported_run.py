"""Runs of imported models, which are exported by the names of their modules."""

from __future__ import annotations

from pathlib import Path

from graphtrain.config.resolve import ResolvedProgram, resolve
from graphtrain.config.schema import FlaxModel
from graphtrain.errors import WeightsError
from graphtrain.graphs.open_model import open_language_model


def run_of_imported_model(source: Path) -> ResolvedProgram | None:
    """Return the program of a run directory if its model is imported from PyTorch, else None.

    Raises:
        WeightsError: the model is a Flax module of the user, for which there is no other format.
    """
    if not (source / "config.toml").is_file() or not (source / "checkpoints").is_dir():
        return None
    from graphtrain.config import load_config

    program = load_config(source / "config.toml").program
    if isinstance(program.model, FlaxModel):
        raise WeightsError(
            f"{source}: the weights of program.model.flax have no Hugging Face format; read the "
            "checkpoint with Orbax"
        )
    uses_names = open_language_model(program.model).uses_module_names
    return resolve(program) if uses_names else None
