"""Conversations as prompts: the chat template of a model, and where its answers end."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from graphtrain.config.schema import Config
from graphtrain.data.prepare.chat_templates import Template, find_template
from graphtrain.data.prepare.conversations import Conversation, Message
from graphtrain.data.tokenizers.protocol import Tokenizer
from graphtrain.errors import DataError
from graphtrain.run.prompt import conversation_prefix, run_template
from graphtrain.run.serving.literal_content import LiteralContent

OWN_TEMPLATE = "own"  # that of the training data, else that of the tokenizer
_ANSWER = "b"


@dataclass(frozen=True)
class ChatFormat:
    """Chat template with a tokenizer."""

    template: Template
    tokenizer: Tokenizer
    prefix: tuple[int, ...]  # tokens that begin a conversation
    stop_tokens: tuple[int, ...]  # that end an answer
    stop: tuple[str, ...]  # the same, where the tokenizer splits the mark into several tokens

    def prompt(self, conversation: Conversation) -> list[int]:
        """Return the tokens of a conversation, up to where the answer of the model begins.

        Raises:
            DataError: the template fails.
        """
        text = self.template.render_prompt(self._literal.mark(conversation))
        tokens = self._literal.encode(text)
        return (
            tokens if tuple(tokens[: len(self.prefix)]) == self.prefix else [*self.prefix, *tokens]
        )

    @cached_property
    def _literal(self) -> LiteralContent:
        return LiteralContent(self.tokenizer)


def chat_format(template: Template, tokenizer: Tokenizer, prefix: tuple[int, ...]) -> ChatFormat:
    """Return the format of a chat template, whose end of an answer is found by an example."""
    mark = _end_of_answer(template)
    (encoded,) = tokenizer.encode_with_offsets([mark])
    tokens = tuple(encoded.tokens.tolist())
    if len(tokens) == 1:
        return ChatFormat(template, tokenizer, prefix, tokens, ())
    return ChatFormat(template, tokenizer, prefix, (), (mark,) if mark else ())


def open_chat_format(
    config: Config, word: str, tokenizer: Tokenizer, bos: bool | None
) -> ChatFormat | None:
    """Return the chat template that is named; None if it is `own` and there is none.

    Args:
        config: The run.
        word: Name or file of the template, or `own`.
        tokenizer: The tokenizer.
        bos: Whether a conversation begins with BOS; None: see run.prompt.conversation_prefix.

    Raises:
        DataError: there is no such template, or it is not valid; or BOS is required, and the
            tokenizer has none.
    """
    if word == OWN_TEMPLATE and (path := run_template(config)) is not None:
        word = path
    if word == OWN_TEMPLATE and tokenizer.chat_template is None:
        return None
    prefix = conversation_prefix(config, tokenizer, bos)
    return chat_format(find_template(word, tokenizer), tokenizer, prefix)


def _end_of_answer(template: Template) -> str:
    """Return the text that a template puts after an answer, without spaces; it may be empty."""
    question: Message = {"role": "user", "content": "a"}
    answer: Message = {"role": "assistant", "content": _ANSWER}
    try:
        rendered = template.render(Conversation((question, answer)), "answers", template.name)
    except DataError:  # the template needs more than two messages, or marks no end
        return ""
    if not rendered.spans:
        return ""
    begin, end = rendered.spans[-1]
    return rendered.text[begin:end].strip().removeprefix(_ANSWER).strip()
