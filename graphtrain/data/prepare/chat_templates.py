"""Chat templates: rendering of conversations to text, and location of the answers in it.

Templates are those of transformers (Jinja). The built-in ones mark the generated parts with
`{% generation %}`. For a template without these marks, each answer is located by rendering the
conversation up to it.
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
from graphtrain.data.prepare.image_messages import content_text
from graphtrain.data.tokenizers.protocol import Tokenizer, chat_template_of_config
from graphtrain.errors import DataError
from lowering.machine.extras import optional_import

TrainOn = Literal["answers", "last", "all"]

_BEGIN, _END = "\ufdd0", "\ufdd1"  # Unicode noncharacters: never part of a text
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_MARK = re.compile(r"<\|[^\s|<>]+\|>|<reserved_\d+>|<eo[ah]>")


class Rendered(NamedTuple):
    """A conversation as text, and its spans to train on, in characters."""

    text: str
    spans: list[tuple[int, int]]


class _TemplateError(ValueError):
    """Error of a template on a conversation; the caller adds file and line."""


@dataclass(frozen=True)
class Template:
    """A Jinja chat template and the special tokens that it may use."""

    name: str
    text: str
    special: Mapping[str, str] = field(default_factory=dict)  # bos_token, eos_token, ...

    @property
    def names(self) -> frozenset[str]:
        """Variables, attributes and keys that the template mentions."""
        return _names(self.text)

    def render(self, conversation: Conversation, train_on: TrainOn, place: str) -> Rendered:
        """Render a conversation; without an answer to train on, the spans are empty.

        Args:
            conversation: The messages.
            train_on: Spans to train on: all answers, the last one, or the complete text.
            place: File and line, for error messages.

        Raises:
            DataError: the template fails, or answers cannot be located; the message begins with
                the place.
        """
        try:
            text, spans = self._answers(conversation)
            text.encode()  # raises for a lone surrogate
        except _TemplateError as error:
            raise DataError(f"{place}: {error}") from None
        except UnicodeEncodeError as error:
            raise DataError(f"{place}: not valid Unicode ({error.reason})") from None
        learned = [
            span for index, span in spans.items() if conversation.is_trained_on(index) and any(span)
        ]
        if learned and train_on == "all":
            return Rendered(text, [(0, len(text))])
        return Rendered(text, learned[-1:] if train_on == "last" else learned)

    def render_prompt(self, conversation: Conversation) -> str:
        """Render a conversation, up to where the answer of the model begins.

        Raises:
            DataError: the template fails.
        """
        try:
            text = self._text(conversation, conversation.messages, ask=True)
            text.encode()
        except _TemplateError as error:
            raise DataError(str(error)) from None
        except UnicodeEncodeError as error:
            raise DataError(f"not valid Unicode ({error.reason})") from None
        return _strip_generation_marks(text)[0]

    def _answers(self, conversation: Conversation) -> tuple[str, dict[int, tuple[int, int]]]:
        """Return the text, and the span of each assistant message by message index."""
        answers = [
            index
            for index, message in enumerate(conversation.messages)
            if message["role"] == "assistant"
        ]
        rendered = self._text(conversation, conversation.messages)
        if not _GENERATION.search(self.text):
            return rendered, {
                index: self._locate_answer(conversation, index, rendered) for index in answers
            }
        text, spans = _strip_generation_marks(rendered)
        if len(spans) != len(answers):
            raise _TemplateError(
                f"the template {self.name} marks {len(spans)} generated parts, but the "
                f"conversation has {len(answers)} assistant messages"
            )
        return text, dict(zip(answers, spans, strict=True))

    def _locate_answer(
        self, conversation: Conversation, index: int, rendered: str
    ) -> tuple[int, int]:
        """Return the span of an answer after its generation prompt, including its end tokens."""
        messages = conversation.messages
        prompt = self._text(conversation, messages[:index], ask=True)
        up_to_answer = self._text(conversation, messages[: index + 1])
        content = content_text(messages[index]).strip()
        start, content_start = len(prompt), rendered.find(content, len(prompt))
        content_start_alone = up_to_answer.find(content, start)
        if (
            not rendered.startswith(prompt)
            or not up_to_answer.startswith(prompt)
            or content_start < 0
            or content_start_alone < 0
        ):
            raise _TemplateError(
                f"the template {self.name} has no {{% generation %}} marks, and message {index} "
                "cannot be located in its text; use a template with marks, such as --chat-template "
                "chatml"
            )
        suffix = up_to_answer[content_start_alone + len(content) :].rstrip()
        end = content_start + len(content)
        if not rendered.startswith(suffix, end):
            raise _TemplateError(
                f"the template {self.name} has no {{% generation %}} marks, and ends message "
                f"{index} differently when others follow; use a template with marks, such as "
                "--chat-template chatml"
            )
        return start, end + len(suffix)

    def _text(
        self, conversation: Conversation, messages: tuple[Message, ...], ask: bool = False
    ) -> str:
        if any(mark in content_text(message) for message in messages for mark in (_BEGIN, _END)):
            raise _TemplateError("contains U+FDD0 or U+FDD1, which are not Unicode characters")
        try:
            return _rendered(
                self.text,
                messages=list(messages),
                tools=conversation.tools,
                documents=None,
                add_generation_prompt=ask,
                **self.special,
            )
        except Exception as error:  # a template is user code and may raise anything
            raise _TemplateError(
                f"the template {self.name} failed: {str(error) or type(error).__name__}"
            ) from None


def find_template(word: str, tokenizer: Tokenizer) -> Template:
    """Find a chat template.

    Args:
        word: Name of a built-in template, `own` for the template of the tokenizer, or the path of
            a .jinja file, a tokenizer_config.json or a folder with one of them.
        tokenizer: Provides the special tokens, and the template if `word` is `own`.

    Raises:
        DataError: there is no such template, or it is not valid Jinja.
    """
    path = Path(word)
    if word == "own":
        text = tokenizer.chat_template
        if text is None:
            raise DataError(
                f"the tokenizer has no chat template of its own; choose one with {_OPTION}: "
                f"{', '.join(template_names())}, or a .jinja file"
            )
    elif word in template_names():
        text = (_FOLDER / f"{word}.jinja").read_text()
    elif path.exists():
        text = _read_template(path)
    else:
        raise DataError(
            f"{_OPTION} {word}: unknown; choose own, {', '.join(template_names())}, or name a file"
        )
    template = Template(word, text, {"bos_token": "", **tokenizer.special})
    _check(template)
    return template


def template_names() -> list[str]:
    """Return the names of the built-in templates, sorted."""
    return sorted(path.name.removesuffix(".jinja") for path in _FOLDER.iterdir())


def split_special_tokens(template: Template, tokenizer: Tokenizer) -> list[str]:
    """Return the special tokens of a template that the tokenizer splits into several tokens."""
    marks = dict.fromkeys(_MARK.findall(template.text))
    return [mark for mark in marks if len(tokenizer.encode_with_offsets([mark])[0].tokens) > 1]


_OPTION = "--chat-template"
_FOLDER = resources.files("graphtrain.data.prepare") / "templates"


def _read_template(path: Path) -> str:
    if path.is_dir():
        names = ("chat_template.jinja", "tokenizer_config.json")
        path = next((path / name for name in names if (path / name).is_file()), path)
    try:
        text = path.read_text()
        template = chat_template_of_config(text) if path.suffix == ".json" else text
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DataError(f"{path}: not a tokenizer_config.json ({error})") from None
    if template is None:
        raise DataError(f"{path}: has no chat template")
    return template


def _check(template: Template) -> None:
    _environment()  # raises if jinja2 is not installed
    from jinja2 import TemplateSyntaxError

    from graphtrain.data.prepare.template_limits import MAX_TEMPLATE_CHARACTERS

    if len(template.text) > MAX_TEMPLATE_CHARACTERS:
        raise DataError(
            f"{_OPTION} {template.name[:200]}: longer than {MAX_TEMPLATE_CHARACTERS} characters, "
            "the limit"
        )
    try:
        _compiled(template.text)
    except TemplateSyntaxError as error:
        raise DataError(
            f"{_OPTION} {template.name}: line {error.lineno}: {error.message}"
        ) from None
    except Exception as error:  # of Python, for templates that are nested too deeply
        raise DataError(
            f"{_OPTION} {template.name}: cannot be compiled ({type(error).__name__}: {error})"
        ) from None


def _strip_generation_marks(rendered: str) -> tuple[str, list[tuple[int, int]]]:
    """Remove the marks around generated parts; return the text and the spans of these parts."""
    spans, segments, length = [], [], 0
    for index, segment in enumerate(re.split(f"[{_BEGIN}{_END}]", rendered)):
        if index % 2:
            spans.append((length, length + len(segment)))
        segments.append(segment)
        length += len(segment)
    return "".join(segments), spans


def _rendered(template: str, **variables: Any) -> str:
    from graphtrain.data.prepare.template_limits import limits

    compiled = _compiled(template)
    with limits(template, variables):
        return compiled.render(**variables)


@lru_cache
def _compiled(text: str) -> Any:
    environment = _environment()
    from graphtrain.data.prepare.template_limits import limits

    with limits(text):  # the compiler computes constants
        return environment.from_string(text)


@lru_cache
def _names(text: str) -> frozenset[str]:
    environment = _environment()
    from jinja2 import nodes

    from graphtrain.data.prepare.template_limits import limits

    with limits(text):
        tree = environment.parse(text)
    keys = (node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str))
    return frozenset(
        [
            *keys,
            *(node.name for node in tree.find_all(nodes.Name)),
            *(node.attr for node in tree.find_all(nodes.Getattr)),
        ]
    )


@lru_cache
def _environment() -> Any:
    """Build the sandboxed Jinja environment of transformers, with its globals and filters.

    Source: https://huggingface.co/docs/transformers/chat_templating_writing
    """
    with optional_import("a chat template"):
        from jinja2 import TemplateError, nodes
        from jinja2.ext import Extension

        from graphtrain.data.prepare.template_limits import LimitedEnvironment

    class Generation(Extension):
        """Jinja extension that marks the text between {% generation %} and {% endgeneration %}."""

        tags = {"generation"}  # noqa: RUF012, declared like this by Jinja

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

        def _mark(self, caller: Any) -> str:
            return _BEGIN + caller() + _END

    environment = LimitedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    environment.globals["raise_exception"] = raise_exception
    environment.filters["tojson"] = lambda value, **options: json.dumps(
        value, ensure_ascii=False, **options
    )
    environment.limit_filters()
    return environment
