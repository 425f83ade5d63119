"""Tokenizer and chat template of a run, for prompts of tasks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from graphtrain.config.hf_config import HF_FILES, read_config_json
from graphtrain.config.schema import Config, TorchModel
from graphtrain.data.tokenizers.protocol import Tokenizer
from graphtrain.errors import DataError, ImportedModelError
from graphtrain.run.prompt import prompt_prefix, run_tokenizer
from graphtrain.run.serving.chat_format import ChatFormat, open_chat_format
from sharding_rules.documents import DocumentError


@dataclass(frozen=True)
class TextFormat:
    """Tokenizer and chat template of a model."""

    tokenizer: Tokenizer
    prefix: tuple[int, ...]  # tokens that begin a text
    chat: ChatFormat | None = None  # None: the tasks' prompts are used as they are
    ends: tuple[int, ...] = ()  # tokens that end a text, beside that of the tokenizer


def open_text_format(
    config: Config, chat_template: str | None, bos: bool | None = None
) -> TextFormat:
    """Return how prompts of tasks become tokens of a model.

    Args:
        config: The run.
        chat_template: Name or file of the template of conversations, or `own`; None: prompts are no
            conversations.
        bos: Whether texts begin with the beginning-of-sequence token; None: as the training
            documents do.

    Raises:
        DataError: there is no tokenizer, or no chat template.
    """
    tokenizer = run_tokenizer(config)
    prefix, ends = prompt_prefix(config, tokenizer, bos), ends_of_texts(config)
    if chat_template is None:
        return TextFormat(tokenizer, prefix, ends=ends)
    chat = open_chat_format(config, chat_template, tokenizer, bos)
    if chat is None:
        raise DataError(
            "neither the training data nor the tokenizer of this model has a chat template; "
            "graphtrain evaluate takes one with --chat-template"
        )
    return TextFormat(tokenizer, prefix, chat, ends)


def ends_of_texts(config: Config) -> tuple[int, ...]:
    """Return the tokens that end a text as transformers generates it: eos_token_id of the model.

    A model may have several, and others than its tokenizer names: in generation_config.json, else
    in config.json. None for a model without files of Hugging Face.

    Raises:
        DataError: a file cannot be read, or what it has is no token.
    """
    for folder in _folders_of_hugging_face(config):
        for path in (folder / "generation_config.json", folder / "config.json"):
            if not path.is_file():
                continue
            try:
                found = read_config_json(path).get("eos_token_id")
            except (ImportedModelError, DocumentError, OSError) as error:
                raise DataError(f"{path}: cannot be read ({error})") from None
            ends = found if isinstance(found, list) else [] if found is None else [found]
            if not all(type(end) is int and end >= 0 for end in ends):
                raise DataError(f"{path}: eos_token_id = {found!r} is no token, nor a list of them")
            return tuple(ends)
    return ()


def _folders_of_hugging_face(config: Config) -> Iterator[Path]:
    """Yield the folders that may have the files of the model, the run's own first."""
    model, run = config.program.model, config.run
    yield Path(run.directory) / HF_FILES
    if run.init_from is not None:
        yield Path(run.init_from) / HF_FILES
        yield Path(run.init_from)
    if isinstance(model, TorchModel) and model.hf is not None:
        yield Path(model.hf)
