"""Problems of the datasets of a run: absent files, no tokens, tokens outside of the vocabulary."""

from collections.abc import Iterator

import numpy as np

from graphtrain.api.checks.images import image_data_problems
from graphtrain.api.checks.problem import Problem
from graphtrain.api.checks.weights_folder import processor_problems, tokenizer_problems
from graphtrain.config.lines import KeyPath
from graphtrain.config.schema import Config, is_streamed
from graphtrain.config.user_code import is_user_code
from graphtrain.data.indexed.dataset import dataset_paths
from graphtrain.data.indexed.description import DatasetDescription, read_description
from graphtrain.errors import CacheError, ConfigError, DataError
from graphtrain.files import missing_dataset_file

_DIRECTORY = ("run", "data", "directory")
_TRAIN, _VALIDATION = ("run", "data", "train"), ("run", "data", "validation")


def data_problems(
    config: Config, *, train: bool = True, fetch: bool = True, saved: bool = False
) -> Iterator[Problem]:
    """Yield the problems of the validation dataset and, unless it is not read, of the others.

    Args:
        config: the configuration.
        train: whether training data is read.
        fetch: whether to fetch what describes streamed datasets, which are not checked otherwise.
        saved: whether the run trained before, perhaps when less was checked.
    """
    data = config.run.data
    datasets: list[tuple[str, KeyPath]] = []
    if train:
        datasets += [(prefix, _TRAIN) for prefix in data.train_datasets]
    if data.validation is not None:
        datasets.append((data.validation, _VALIDATION))
    for prefix, setting in dict.fromkeys(datasets):
        name = ".".join(setting)
        if is_user_code(prefix):
            yield from _source_problems(config, prefix, setting)
        elif is_streamed(prefix):
            if fetch:
                yield from _stream_problems(config, prefix, setting)
        elif absent := [path for path in dataset_paths(prefix) if not path.is_file()]:
            message = f"{name}: {missing_dataset_file(prefix, absent[0].suffix)}"
            yield Problem("missing_data", message, (setting, _DIRECTORY))
        else:
            yield from _problems_of(config, prefix, setting, saved)


def _source_problems(config: Config, reference: str, setting: KeyPath) -> Iterator[Problem]:
    """Yield why a dataset of the user's code cannot be used; its first document is read."""
    from graphtrain.data.batches.concat_packing import check_tokens
    from graphtrain.run.data_sources import open_sources

    try:
        first = open_sources(config.run.data)[reference][0]
    except (ConfigError, DataError) as error:
        yield Problem("data", str(error), (setting,))
        return
    except Exception as error:  # of the user's code, as when its files are on another machine
        message = f"{reference}: document 0: {type(error).__name__}: {error}"
        yield Problem("missing_data", message, (setting,))
        return
    tokens = np.asarray(first[0] if isinstance(first, tuple) else first)
    try:
        check_tokens(reference, tokens, config.program.model.vocab_tokens, lambda _: 0)
    except DataError as error:
        yield Problem("data", str(error), (setting, ("program", "model", "vocab")))


def _stream_problems(config: Config, url: str, setting: KeyPath) -> Iterator[Problem]:
    """Yield why a dataset in an object store cannot be used; no token of it is read."""
    from graphtrain.run.streaming.open import open_streams

    try:
        open_streams(config.run.data.only(url))
    except (CacheError, DataError) as error:
        yield Problem("missing_data", f"{'.'.join(setting)}: {error}", (setting, _DIRECTORY))
        return
    description = read_description(config.run.data.stream.local_prefix(url))
    assert description is not None and description.largest is not None
    yield from _vocabulary_problems(config, url, description.largest, description)
    yield from _kind_problems(config, url, setting, description)


def _problems_of(config: Config, prefix: str, setting: KeyPath, saved: bool) -> Iterator[Problem]:
    from graphtrain.data.indexed.token_range import count_tokens, largest_token_of_sample

    name = ".".join(setting)
    try:
        description = read_description(prefix)
        tokens = count_tokens(prefix)
        if tokens < 2:
            message = f"{name}: {prefix} has {tokens} tokens and needs 2, to predict one; add text"
            yield Problem("data", message, (setting,))
            return
        largest = description.largest if description else None
        largest = largest_token_of_sample(prefix) if largest is None else largest
    except DataError as error:
        yield Problem("data", str(error), location="")  # it names the file
        return
    except OSError as error:
        message = f"{name}: {prefix} cannot be read: {error.strerror}"
        yield Problem("machine", message, (setting,))
        return
    yield from _vocabulary_problems(config, prefix, largest, description)
    yield from _kind_problems(config, prefix, setting, description)
    yield from tokenizer_problems(config, prefix, setting, description, saved=saved)
    yield from processor_problems(config, prefix, setting, description)
    yield from image_data_problems(config, prefix, setting, description)


def _vocabulary_problems(
    config: Config, prefix: str, largest: int, description: DatasetDescription | None
) -> Iterator[Problem]:
    vocab = config.program.model.vocab_tokens
    if largest < vocab:
        return
    needed = max(largest + 1, description.vocab if description else 0)
    yield Problem(
        "data",
        f"program.model.vocab = {vocab}, but {prefix} contains token {largest}; set it to at "
        f"least {needed}, or prepare the dataset with the tokenizer of the model",
        (("program", "model", "vocab"),),
    )


def _kind_problems(
    config: Config, prefix: str, setting: KeyPath, description: DatasetDescription | None
) -> Iterator[Problem]:
    """Yield that a dataset has preference pairs, or none, unlike the loss requires."""
    conversations = description.conversations if description else None
    pairs = conversations is not None and conversations.pairs
    if pairs != (config.program.loss.kind == "dpo"):
        quantifier, verb = ("", "require") if pairs else ("no ", "are required by")
        message = (
            f"{'.'.join(setting)}: {prefix} contains {quantifier}preference pairs, which {verb} "
            'program.loss.kind = "dpo"; change this setting or the dataset'
        )
        yield Problem("data", message, (setting, ("program", "loss", "kind")))
