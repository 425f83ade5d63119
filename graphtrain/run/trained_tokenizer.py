"""Check of the datasets of a run: they have the tokenizer that its checkpoint was trained with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from graphtrain.checkpoints.info import read_checkpoint_info
from graphtrain.checkpoints.steps import saved_steps
from graphtrain.config.schema import Run
from graphtrain.data.indexed.description import read_description
from graphtrain.errors import DataError


def tokenizer_digests(prefixes: Sequence[str]) -> list[str | None]:
    """Return the digest of each dataset's tokenizer; None without a description.

    Raises:
        DataError: a description is damaged.
    """
    return [
        description.tokenizer_digest[:16] if description else None
        for description in map(read_description, prefixes)
    ]


def check_trained_tokenizer(run: Run, step: int | None) -> None:
    """Check that the datasets of a run were not prepared with another tokenizer since.

    Args:
        run: The run.
        step: Step of the checkpoint that is used; None for the last.

    Raises:
        DataError: a dataset has a tokenizer that the checkpoint was not trained with.
        TrainingError: the metadata of the checkpoint cannot be read.
    """
    directory = Path(run.directory) / "checkpoints"
    steps = saved_steps(directory)
    if step is None and steps:
        step = steps[-1]
    if step not in steps:  # weights of run.init_from, or an error that says which steps there are
        return
    trained = read_checkpoint_info(directory, step).identity.get("tokenizer", [])
    code = {one.reference for one in run.data.user_code}
    prefixes = [one for one in run.data.local.datasets if one not in code]
    for prefix, digest in zip(prefixes, tokenizer_digests(prefixes), strict=True):
        if digest is not None and any(trained) and digest not in trained:
            raise DataError(
                f"{prefix} has another tokenizer than the data that {directory}/{step} was trained "
                "on: it was prepared again since; prepare it as before, or name the earlier data "
                "in run.data"
            )
