"""Tokenizer and chat template of a run, for prompts of tasks."""

from __future__ import annotations

from graphtrain.config.schema import Config
from graphtrain.errors import DataError
from graphtrain.run.evaluation.harness_model import TextFormat
from graphtrain.run.prompt import prompt_prefix, run_tokenizer
from graphtrain.run.serving.chat_format import open_chat_format


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
    prefix = prompt_prefix(config, tokenizer, bos)
    if chat_template is None:
        return TextFormat(tokenizer, prefix)
    chat = open_chat_format(config, chat_template, tokenizer, bos)
    if chat is None:
        raise DataError(
            "neither the training data nor the tokenizer of this model has a chat template; "
            "graphtrain evaluate takes one with --chat-template"
        )
    return TextFormat(tokenizer, prefix, chat)
