"""Tokenizer of a run, and the token ids that begin a prompt."""

from __future__ import annotations

import warnings
from pathlib import Path

from graphtrain.config.schema import Config
from graphtrain.data.indexed.description import dataset_tokenizer, read_description
from graphtrain.data.tokenizers.open import load_tokenizer
from graphtrain.data.tokenizers.protocol import Tokenizer
from graphtrain.data.tokenizers.special_tokens import document_prefix
from graphtrain.errors import DataError
from graphtrain.weights.hf_record import verify_hf_files
from graphtrain.weights.sources import HF_FILES


def prompt_prefix(config: Config, tokenizer: Tokenizer, bos: bool | None) -> tuple[int, ...]:
    """Return the token ids that begin a prompt: as asked, else as the training documents begin.

    Raises:
        DataError: BOS is required, and the tokenizer has none.
    """
    if bos is not None:
        return document_prefix(tokenizer, bos)
    descriptions = map(read_description, _train_prefixes(config))
    beginnings = list(dict.fromkeys(entry.bos for entry in descriptions if entry))
    if len(beginnings) > 1:
        warnings.warn(
            "only some datasets of run.data.train begin documents with the beginning-of-sequence "
            f"token; the prompt begins {'with' if beginnings[0] else 'without'} it, as in the "
            "first of them (choose with --bos or --no-bos)",
            stacklevel=2,
        )
    return beginnings[0] if beginnings else tokenizer.prefix


def _train_prefixes(config: Config) -> list[str]:
    """Return the path prefixes of the training datasets."""
    train = config.run.data.train
    return [train] if isinstance(train, str) else [entry.dataset for entry in train]


def run_tokenizer(config: Config) -> Tokenizer:
    """Return the tokenizer stored with the weights, else that of the training data.

    Raises:
        DataError: there is no tokenizer, or it cannot be used.
        WeightsError: its file is damaged.
    """
    folders = [Path(config.run.directory) / HF_FILES]
    if config.run.init_from is not None:  # converted weights, or a Hugging Face folder
        folders += [Path(config.run.init_from) / HF_FILES, Path(config.run.init_from)]
    for folder in folders:
        if any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model")):
            if folder.name == HF_FILES:
                verify_hf_files(folder.parent)
            return load_tokenizer(folder)
    for prefix in _train_prefixes(config):
        if (tokenizer := dataset_tokenizer(prefix)) is not None:
            return tokenizer
    raise DataError(
        f"no tokenizer in {config.run.directory}/{HF_FILES}, with the weights of run.init_from, or "
        "with the datasets of run.data.train; prepare the data with graphtrain data prepare"
    )
