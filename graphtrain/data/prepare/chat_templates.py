"""Chat templates: conversations to text, and where the answers are in it.

A template is one of transformers' (Jinja): those here have `{% generation %}` around what a model
writes. Of one that has not, answers are found by rendering the conversation up to each of them.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal, NamedTuple

from graphtrain.data.prepare.conversations import Conversation, Message
from graphtrain.data.tokenizers.tokenizer import Tokenizer, template_of
from graphtrain.errors import DataError

Learn = Literal["answers", "last", "all"]

_BEGIN, _END = "\ufdd0", "\ufdd1"  # Unicode keeps them out of all text
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_MARK = re.compile(r"<\|[^\s|<>]+\|>|<reserved_\d+>|<eo[ah]>")


class Rendered(NamedTuple):
    """A conversation as text, and the parts of it to learn, in characters."""

    text: str
    spans: list[tuple[int, int]]


class _WrongConversation(ValueError):
    """Why a template cannot take a conversation, to be told with its place."""


@dataclass(frozen=True)
class Template:
    """How a conversation is written down."""

    name: str
    text: str
    special: Mapping[str, str] = field(default_factory=dict)  # bos_token, eos_token, ...

    def render(self, conversation: Conversation, learn: Learn, place: str) -> Rendered:
        """A conversation as text; no spans where it has no answer to learn.

        Raises:
            DataError: the template refuses it, or answers cannot be found; names the place.
        """
        try:
            text, found = self._answers(conversation)
            text.encode()  # a lone surrogate is no text
        except _WrongConversation as error:
            raise DataError(f"{place}: {error}") from None
        except UnicodeEncodeError as error:
            raise DataError(f"{place}: not valid Unicode ({error.reason})") from None
        learned = [
            span for index, span in found.items() if conversation.is_learned(index) and any(span)
        ]
        if learned and learn == "all":
            return Rendered(text, [(0, len(text))])
        return Rendered(text, learned[-1:] if learn == "last" else learned)

    def _answers(self, conversation: Conversation) -> tuple[str, dict[int, tuple[int, int]]]:
        """The text, and where the answer of each message of the assistant is."""
        answers = [
            index
            for index, message in enumerate(conversation.messages)
            if message["role"] == "assistant"
        ]
        whole = self._text(conversation, conversation.messages)
        if not _GENERATION.search(self.text):
            return whole, {index: self._located(conversation, index, whole) for index in answers}
        text, spans = _unmarked(whole)
        if len(spans) != len(answers):
            raise _WrongConversation(
                f"the template {self.name} writes {len(spans)} answers of {len(answers)}"
            )
        return text, dict(zip(answers, spans, strict=True))

    def _located(self, conversation: Conversation, index: int, whole: str) -> tuple[int, int]:
        """Where an answer is, with the marks that end it: behind what asks for it."""
        messages = conversation.messages
        asked = self._text(conversation, messages[:index], ask=True)
        alone = self._text(conversation, messages[: index + 1])
        content = messages[index]["content"].strip()
        begin, at = len(asked), whole.find(content, len(asked))
        at_alone = alone.find(content, begin)
        if not whole.startswith(asked) or not alone.startswith(asked) or at < 0 or at_alone < 0:
            raise _WrongConversation(
                f"the template {self.name} does not show where message {index} is in its text; "
                "use one with {% generation %}, such as --template chatml"
            )
        tail = alone[at_alone + len(content) :].rstrip()
        end = at + len(content)
        if not whole.startswith(tail, end):
            raise _WrongConversation(
                f"the template {self.name} ends message {index} in another way once others follow; "
                "use one with {% generation %}, such as --template chatml"
            )
        return begin, end + len(tail)

    def _text(
        self, conversation: Conversation, messages: tuple[Message, ...], ask: bool = False
    ) -> str:
        if any(mark in message["content"] for message in messages for mark in (_BEGIN, _END)):
            raise _WrongConversation("holds U+FDD0 or U+FDD1, which are no characters")
        try:
            return _compiled(self.text).render(
                messages=list(messages),
                tools=conversation.tools,
                documents=None,
                add_generation_prompt=ask,
                **self.special,
            )
        except Exception as error:  # a template is code of its author's, and may raise anything
            raise _WrongConversation(
                f"the template {self.name} refuses it: {str(error) or type(error).__name__}"
            ) from None


def find_template(word: str, tokenizer: Tokenizer) -> Template:
    """A template that is here by name, the tokenizer's `own`, or that of a file or a folder.

    Raises:
        DataError: there is none, or it cannot be read as Jinja.
    """
    path = Path(word)
    if word == "own":
        text = tokenizer.chat_template
        if text is None:
            raise DataError(
                "the tokenizer has no chat template of its own; choose one with --template: "
                f"{', '.join(template_names())}, or a .jinja file"
            )
    elif word in template_names():
        text = (_FOLDER / f"{word}.jinja").read_text()
    elif path.exists():
        text = _of_path(path)
    else:
        raise DataError(
            f"--template {word}: there are own, {', '.join(template_names())}; or name a file"
        )
    template = Template(word, text, {"bos_token": "", **tokenizer.special})
    _check(template)
    return template


def template_names() -> list[str]:
    """Those that are here."""
    return sorted(path.name.removesuffix(".jinja") for path in _FOLDER.iterdir())


def spelled_out(template: Template, tokenizer: Tokenizer) -> list[str]:
    """Marks of a template that are no tokens of their own, so that the model spells them."""
    marks = dict.fromkeys(_MARK.findall(template.text))
    return [mark for mark in marks if len(tokenizer.encode_places([mark])[0].tokens) > 1]


_FOLDER = resources.files("graphtrain.data.prepare") / "templates"


def _of_path(path: Path) -> str:
    if path.is_dir():
        names = ("chat_template.jinja", "tokenizer_config.json")
        path = next((path / name for name in names if (path / name).is_file()), path)
    try:
        text = path.read_text()
        found = template_of(text) if path.suffix == ".json" else text
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DataError(f"{path}: not a tokenizer_config.json ({error})") from None
    if found is None:
        raise DataError(f"{path}: has no chat template")
    return found


def _check(template: Template) -> None:
    from jinja2 import TemplateSyntaxError

    try:
        _compiled(template.text)
    except TemplateSyntaxError as error:
        raise DataError(
            f"--template {template.name}: line {error.lineno}: {error.message}"
        ) from None


def _unmarked(whole: str) -> tuple[str, list[tuple[int, int]]]:
    """Text without the marks around generated parts, and where these are."""
    spans, parts, length = [], [], 0
    for number, part in enumerate(re.split(f"[{_BEGIN}{_END}]", whole)):
        if number % 2:
            spans.append((length, length + len(part)))
        parts.append(part)
        length += len(part)
    return "".join(parts), spans


@lru_cache
def _compiled(text: str) -> Any:
    return _environment().from_string(text)


@lru_cache
def _environment() -> Any:
    """Jinja as transformers sets it: sandboxed, with its names.

    Source: https://huggingface.co/docs/transformers/chat_templating_writing
    """
    try:
        from jinja2 import TemplateError, nodes
        from jinja2.ext import Extension
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ModuleNotFoundError:
        raise DataError("chat templates need jinja2; pip install 'graphtrain[data]'") from None

    class Generation(Extension):
        """Marks what is between {% generation %} and {% endgeneration %}."""

        tags = {"generation"}  # noqa: RUF012, as Jinja has it

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

        def _mark(self, caller: Any) -> str:
            return _BEGIN + caller() + _END

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    environment.globals["raise_exception"] = raise_exception
    environment.filters["tojson"] = lambda value, **options: json.dumps(
        value, ensure_ascii=False, **options
    )
    return environment
