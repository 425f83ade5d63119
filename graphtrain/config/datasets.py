"""Settings that follow from the datasets of a run: their paths in a directory, the vocabulary."""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from graphtrain.config.schema import Config, Data, is_streamed
from graphtrain.config.user_code import is_user_code
from graphtrain.errors import ConfigError
from graphtrain.files import missing_dataset_file, read_digested_object
from sharding_rules.documents import DocumentError

DIRECTORY = ("run", "data", "directory")
# Rows of an embedding that follow from the data: matrix products are faster with such sizes, and
# nanoGPT and Megatron-LM round in the same way.
_VOCAB_MULTIPLE = 64


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


def with_data_vocab(config: Config) -> Config:
    """Return a configuration whose model has the vocabulary of its training data, padded.

    The rows are a multiple of _VOCAB_MULTIPLE, so that most meshes can shard them and a run can
    resume on another, and of the number of shards on this mesh.

    Raises:
        ConfigError: the vocabulary is unknown.
        LoweringError: the target is unknown.
        ShardingError: the rules are unknown, or the mesh does not fill the target.
    """
    from graphtrain.config.resolve import resolve  # not needed if the vocabulary is set

    tokens, program = data_vocab(config.run.data), config.program
    resolved = resolve(program)  # with a placeholder for the vocabulary
    rules = resolved.rules
    tables = rules.parameters, rules.gradients, rules.optimizer, rules.activations
    shards = [resolved.mesh.size(table.get("vocab", ())) for table in tables]
    rows = -tokens % math.lcm(_VOCAB_MULTIPLE, *shards) + tokens
    model = replace(program.model, vocab=rows, vocab_padding=rows - tokens or None)
    return replace(config, program=replace(program, model=model))


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
    if is_user_code(prefix):
        raise ConfigError(f"run.data.train = {prefix!r} is code; set program.model.vocab")
    if is_streamed(prefix):
        raise ConfigError(
            f"run.data.train = {prefix!r} is in an object store; set program.model.vocab"
        )
    path = Path(f"{prefix}.json")
    try:
        vocab = read_digested_object(path).get("vocab")
    except FileNotFoundError:
        raise ConfigError(_without_description(prefix)) from None
    except (OSError, DocumentError) as error:
        raise ConfigError(
            f"{path}: not the description of a dataset ({error}); prepare the dataset again"
        ) from None
    if not isinstance(vocab, int) or vocab < 1:
        raise ConfigError(f"{path}: does not state a vocabulary; prepare the dataset again")
    return vocab


def _without_description(prefix: str) -> str:
    if Path(f"{prefix}.idx").is_file():
        return (
            f"{prefix}.json: no such file, so the vocabulary of the dataset is unknown; set "
            "program.model.vocab"
        )
    return (
        f"{missing_dataset_file(prefix, '.json')}; or set program.model.vocab, which is by default "
        "the vocabulary of the training data"
    )
