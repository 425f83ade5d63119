"""Messages of a chat request: each field has a place in the chat template, or is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from graphtrain.data.prepare.chat_templates import Template
from graphtrain.data.prepare.conversations import Conversation
from graphtrain.errors import DataError
from graphtrain.run.serving.http.errors import ApiError

_EVERY = ("role", "content")  # of a message; a part of a content has a type and a text
_PART = {"type", "text"}


def check_fields(
    messages: Sequence[dict[str, Any]], conversation: Conversation, template: Template
) -> None:
    """Check that nothing of a conversation would be dropped in silence.

    Args:
        messages: The messages as they were sent.
        conversation: The same as the template takes it.
        template: The chat template.

    Raises:
        ApiError: a field is unknown, or has no place in the template.
    """
    _check_parts(messages)
    if conversation.tools and not _has_place("tools", template, conversation, None):
        raise ApiError(
            400,
            f"the chat template {template.name} has no place for tools; leave them out, or start "
            "the server with a template that has (--chat-template)",
            "tools",
        )
    for index, name in _further_fields(messages):
        if not _has_place(name, template, conversation, index):
            raise ApiError(
                400,
                f"messages[{index}]: the field {name[:80]!r} is unknown, or the chat template "
                f"{template.name} has no place for it; remove it",
                "messages",
                "unknown_parameter",
            )


def _check_parts(messages: Sequence[dict[str, Any]]) -> None:
    for index, message in enumerate(messages):
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            if not isinstance(part, dict) or set(part) != _PART or part["type"] != "text":
                raise ApiError(
                    400,
                    f"messages[{index}]: a part of the content is not "
                    '{"type": "text", "text": "..."}',
                    "messages",
                )


def _further_fields(messages: Sequence[dict[str, Any]]) -> Iterator[tuple[int, str]]:
    """Yield the fields of messages besides role and content, with the index of the message."""
    for index, message in enumerate(messages):
        for name, value in message.items():
            # Templates tell results by their order; clients always send the id of the call.
            is_known = name in _EVERY or (name == "tool_call_id" and message["role"] == "tool")
            if value is not None and not is_known:
                yield index, name


def _has_place(
    name: str, template: Template, conversation: Conversation, index: int | None
) -> bool:
    """Return whether a template mentions a field, or renders it without a mention.

    Args:
        name: Name of the field.
        template: The chat template.
        conversation: The conversation.
        index: Index of the message that has the field; None for a variable beside them.
    """
    if name in template.names:
        return True
    try:
        rendered = template.render_prompt(conversation)
        return template.render_prompt(_without(name, conversation, index)) != rendered
    except DataError:  # it needs the field
        return True


def _without(name: str, conversation: Conversation, index: int | None) -> Conversation:
    if index is None:
        return replace(conversation, tools=None)
    messages = list(conversation.messages)
    messages[index] = {key: value for key, value in messages[index].items() if key != name}
    return replace(conversation, messages=tuple(messages))


def parse_arguments(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages with the arguments of tool calls as objects, as chat templates expect them.

    OpenAI's interface has them as JSON in a string.
    """
    return [_with_arguments(message) for message in messages]


def _with_arguments(message: dict[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    return message | {"tool_calls": [_with_object(call) for call in calls]}


def _with_object(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    arguments = function.get("arguments") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(arguments, str):
        return call
    try:
        return call | {"function": function | {"arguments": json.loads(arguments)}}
    except (ValueError, RecursionError):
        return call
