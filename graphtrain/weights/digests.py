"""weights.json: size and SHA-256 of the files of a converted folder, verified before their use.

Folders of Hugging Face and of PEFT have no digests: their weights are used as they are.
"""

import warnings
from pathlib import Path

from graphtrain.checkpoints.manifest import DamagedCheckpoint, verify_files, write_manifest
from graphtrain.errors import WeightsError
from lowering.xla import distributed

NAME = "weights.json"


def record_weights(directory: Path) -> None:
    """Record the digests of the weights and of model.toml, when both are complete."""
    weights = sorted((directory / "weights").iterdir())
    names = ["model.toml", *(f"weights/{path.name}" for path in weights)]
    write_manifest(directory, directory / NAME, names)


def verify_weights(directory: Path) -> None:
    """Verify a converted folder; several ranks verify a share of the files each.

    Raises:
        WeightsError: a file is missing or not as it was written; the message names it.
    """
    if not (directory / NAME).is_file():
        warnings.warn(
            f"{directory} has no {NAME}, so damage to its weights is not noticed; convert the "
            "source again to have one",
            stacklevel=2,
        )
        return
    try:
        verify_files(
            directory, directory / NAME, part=distributed.rank(), parts=distributed.count()
        )
    except DamagedCheckpoint as damaged:
        raise WeightsError(
            f"{directory} is damaged: {damaged.reason}; convert the source again, or remove "
            f"{directory / NAME} if the change was meant"
        ) from None
