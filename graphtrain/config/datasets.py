"""Settings that follow from the datasets of a run: their paths in a directory, the vocabulary."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from graphtrain.config.schema import Data
from graphtrain.errors import ConfigError, DataError

DIRECTORY = ("run", "data", "directory")


def remove_datasets(document: dict[str, Any]) -> None:
    """Remove the datasets of a document: a directory that overrides them replaces both."""
    if (data := _data_table(document)) is not None:
        data.pop("train", None)
        data.pop("validation", None)


def apply_data_directory(document: dict[str, Any]) -> None:
    """Replace run.data.directory in a document by the datasets that it holds.

    What the document says of `train` and `validation` overrides them.

    Raises:
        ConfigError: the directory is not a string.
    """
    data = _data_table(document)
    if data is None or "directory" not in data:
        return
    directory = data.pop("directory")
    if not isinstance(directory, str):
        raise ConfigError(f"run.data.directory = {directory!r}: should be a string")
    data.setdefault("train", f"{directory}/train")
    # Where the data is elsewhere, as on the machine that compiles, the directory is expected to
    # have a validation set, as `data prepare` makes by default.
    has_train, has_validation = (
        Path(directory, f"{name}.idx").is_file() for name in ("train", "validation")
    )
    if has_validation or not has_train:
        data.setdefault("validation", f"{directory}/validation")


def _data_table(document: dict[str, Any]) -> dict[str, Any] | None:
    run = document.get("run")
    data = run.get("data") if isinstance(run, dict) else None
    return data if isinstance(data, dict) else None


def data_vocab(data: Data) -> int:
    """Return the vocabulary size of the training data; of a blend, the largest.

    Raises:
        ConfigError: a dataset is missing, or has no description that states it.
    """
    return max(map(_vocab, _training_sets(data)))


def _training_sets(data: Data) -> Iterator[str]:
    if isinstance(data.train, str):
        yield data.train
    else:
        yield from (part.dataset for part in data.train)


def _vocab(prefix: str) -> int:
    from graphtrain.data.indexed.dataset import missing_file
    from graphtrain.data.indexed.description import read_description

    try:
        description = read_description(prefix)
    except DataError as error:
        raise ConfigError(str(error)) from None
    if description is not None:
        return description.vocab
    if Path(f"{prefix}.idx").is_file():
        raise ConfigError(
            f"{prefix}.json: no such file, so the vocabulary of the dataset is unknown; set "
            "program.model.vocab"
        )
    raise ConfigError(
        f"{missing_file(prefix, '.json')}; or set program.model.vocab, which is by default the "
        "vocabulary of the training data"
    )
