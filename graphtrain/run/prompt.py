"""Tokenizer of a run, and the token ids that begin a prompt."""

from __future__ import annotations

import warnings
from pathlib import Path

from graphtrain.config.schema import Config
from graphtrain.data.indexed.description import dataset_tokenizer, read_description
from graphtrain.data.tokenizers.open import load_tokenizer
from graphtrain.data.tokenizers.protocol import CHAT_TEMPLATE, Tokenizer
from graphtrain.data.tokenizers.special_tokens import document_prefix
from graphtrain.errors import DataError
from graphtrain.run.streaming.open import described_datasets
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


def conversation_prefix(config: Config, tokenizer: Tokenizer, bos: bool | None) -> tuple[int, ...]:
    """Return the token ids that precede a conversation: as asked, else as in the training data.

    Where no conversations were learned, the chat template alone writes BOS, or does not, as in
    transformers' apply_chat_template.

    Raises:
        DataError: BOS is required, and the tokenizer has none.
    """
    if bos is not None:
        return document_prefix(tokenizer, bos)
    descriptions = map(read_description, _train_prefixes(config))
    conversations = (one for one in descriptions if one and one.conversations is not None)
    return next((one.bos for one in conversations), ())


def encode_prompt(tokenizer: Tokenizer, prompt: str, prefix: tuple[int, ...]) -> list[int]:
    """Return the token ids of a prompt, which begins with the prefix (BOS) once."""
    tokens = encode_text(tokenizer, prompt)
    return tokens if tuple(tokens[: len(prefix)]) == prefix else [*prefix, *tokens]


def encode_text(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the token ids of a raw text; a special token spelled out in it is that token.

    So it is in transformers, whichever library tokenizes.
    """
    if not any(special in text for special in tokenizer.special_texts):
        return tokenizer.encode(text)
    (encoded,) = tokenizer.encode_with_offsets([text])
    return encoded.tokens.tolist()


def _train_prefixes(config: Config) -> list[str]:
    """Return the path prefixes of the training datasets, whose descriptions are on this machine."""
    return described_datasets(config.run.data)


def run_template(config: Config) -> str | None:
    """Return the path of the chat template of the training data, else that with the weights."""
    for prefix in _train_prefixes(config):
        description = read_description(prefix)
        path = Path(prefix).parent / CHAT_TEMPLATE
        if description is not None and description.conversations is not None and path.is_file():
            return str(path)
    paths = [folder / CHAT_TEMPLATE for folder in _tokenizer_folders(config)]
    return next((str(path) for path in paths if path.is_file()), None)


def run_tokenizer(config: Config) -> Tokenizer:
    """Return the tokenizer stored with the weights, else that of the training data.

    Raises:
        DataError: there is no tokenizer, or it cannot be used.
        WeightsError: its file is damaged.
    """
    for folder in _tokenizer_folders(config):
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


def _tokenizer_folders(config: Config) -> list[Path]:
    """Return the folders that may hold the tokenizer of the weights."""
    folders = [Path(config.run.directory) / HF_FILES]
    if config.run.init_from is not None:  # converted weights, or a Hugging Face folder
        folders += [Path(config.run.init_from) / HF_FILES, Path(config.run.init_from)]
    return folders
