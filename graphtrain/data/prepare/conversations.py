"""Parsing of the published instruction data formats into messages with roles."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from graphtrain.data.prepare.media_keys import media_problem
from graphtrain.errors import DataError

Message = dict[str, Any]  # role and content, and other keys of the record for the template

_ROLES = {
    "human": "user",
    "prompter": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "function_response": "tool",
}


@dataclass(frozen=True)
class Conversation:
    """Messages in order; answers before message index `learned_from` are context, not targets."""

    messages: tuple[Message, ...]
    tools: Any = None
    train_from: int = 0

    def is_trained_on(self, index: int) -> bool:
        """Return True if a message is an answer to train on; a weight of 0 excludes it."""
        message = self.messages[index]
        is_weighted_answer = message["role"] == "assistant" and message.get("weight") != 0
        return is_weighted_answer and index >= self.train_from


class _RecordError(ValueError):
    """Error in a record; the caller adds file and line."""


def read_conversations(
    record: Any, format: str, place: str, *, is_prompt: bool = False
) -> tuple[Conversation, ...]:
    """Return the conversation of a record; of a preference pair, the chosen and the rejected one.

    Args:
        record: A parsed record.
        format: A key of FORMATS, or auto to detect it by the keys of the record.
        place: File and line, for error messages.
        is_prompt: The record is to be answered by a model, not prepared as data.

    Raises:
        DataError: the record does not have the format, or any known format; the message begins
            with the place.
    """
    try:
        if not isinstance(record, dict):
            raise _RecordError("not a JSON object")
        if (problem := media_problem(record, is_prompt=is_prompt)) is not None:
            raise _RecordError(problem)
        return FORMATS[detect_format(record) if format == "auto" else format](record)
    except _RecordError as error:
        raise DataError(f"{place}: {error}") from None


def detect_format(record: dict[str, Any]) -> str:
    """Detect the format of a record by its keys."""
    if "chosen" in record and "rejected" in record:
        return "preference"
    if "instruction" in record:
        belle = str(record["instruction"]).lstrip().startswith("Human:")
        return "belle" if belle else "alpaca"
    for key, name in _FORMAT_BY_KEY.items():
        if key in record:
            return name
    keys = ", ".join(map(repr, list(record)[:5])) or "nothing"
    raise _RecordError(
        f"has the keys {keys}, which match no known format; name the format with --format"
    )


def _alpaca(record: dict[str, Any]) -> tuple[Conversation, ...]:
    """Parse Alpaca: instruction, input, output; optional system, history of (question, answer)."""
    messages = [*_system(record), *_history_messages(record.get("history") or ())]
    return (_conversation([*messages, _instruction(record), _answer(_string(record, "output"))]),)


def _belle(record: dict[str, Any]) -> tuple[Conversation, ...]:
    """Parse BELLE: turns after Human: and Assistant: in `instruction`, last answer in `output`."""
    messages: list[Message] = []
    for turn in _string(record, "instruction").split("Human:")[1:]:
        question, *answers = turn.split("Assistant:")
        messages.append(_question(question.strip()))
        messages.extend(_answer(answer.strip()) for answer in answers[:1] if answer.strip())
    if not messages or messages[-1]["role"] != "user":
        raise _RecordError("'instruction' does not end with a question after Human:")
    return (_conversation([*messages, _answer(_string(record, "output"))]),)


def _moss(record: dict[str, Any]) -> tuple[Conversation, ...]:
    """Parse MOSS: `chat` with named turns, or `plain_text`; drop thoughts and commands."""
    messages: list[Message] = []
    meta = record.get("meta_instruction")
    if isinstance(meta, str) and meta.strip():
        messages.append({"role": "system", "content": meta.strip()})
    if "chat" in record:
        turns = record["chat"]
        if not isinstance(turns, dict):
            raise _RecordError("'chat' is not an object of turns")
        for name, turn in turns.items():
            if turn is None:  # tables have a column for every turn of the longest chat
                continue
            if not isinstance(turn, dict):
                raise _RecordError(f"turn {name!r} of 'chat' is not an object")
            messages.append(
                _question(_strip_affixes(_string(turn, "Human"), "<|Human|>:", "<eoh>"))
            )
            messages.append(_answer(_strip_affixes(_string(turn, "MOSS"), "<|MOSS|>:", "<eom>")))
    else:
        for turn in _string(record, "plain_text").split("[Human]:")[1:]:
            question, mark, answer = turn.partition("[MOSS]:")
            if not mark:
                raise _RecordError("'plain_text' has a [Human]: without [MOSS]: after it")
            messages.append(_question(_strip_affixes(question, "", "<eoh>")))
            messages.append(_answer(_strip_affixes(answer, "", "<eoa>")))
    return (_conversation(messages),)


def _leetcode(record: dict[str, Any]) -> tuple[Conversation, ...]:
    """Parse leetcode-python: a problem, then code and its explanation."""
    problem = _string(record, "code_with_problem").split("```", 1)[0].strip()
    answer = _string(record, "code_only") + "\n" + _string(record, "explanation_only")
    return (_conversation([_question(problem), _answer(answer)]),)


def _sharegpt(record: dict[str, Any]) -> tuple[Conversation, ...]:
    """Parse ShareGPT: `from` and `value` under conversations."""
    return (
        _conversation(
            [*_system(record), *_message_list(record, "conversations")], record.get("tools")
        ),
    )


def _messages(record: dict[str, Any]) -> tuple[Conversation, ...]:
    """Parse OpenAI chat: `role` and `content` under messages."""
    return (_conversation(_message_list(record, "messages"), record.get("tools")),)


def _preference(record: dict[str, Any]) -> tuple[Conversation, ...]:
    """Parse chosen and rejected: answers to a prompt, or message lists with a common prefix."""
    ends = [_answer_messages(record, key) for key in ("chosen", "rejected")]
    prompt = _prompt(record)
    pair = [[*prompt, *end] for end in ends]
    shared_messages = takewhile(
        lambda messages_pair: messages_pair[0] == messages_pair[1], zip(*pair, strict=False)
    )
    shared = max(len(list(shared_messages)), len(prompt))
    if any(len(messages) == shared for messages in pair):
        raise _RecordError("'chosen' and 'rejected' are the same, or one is a prefix of the other")
    return tuple(_conversation(messages, record.get("tools"), shared) for messages in pair)


FORMATS: dict[str, Callable[[dict[str, Any]], tuple[Conversation, ...]]] = {
    "alpaca": _alpaca,
    "belle": _belle,
    "moss": _moss,
    "leetcode": _leetcode,
    "sharegpt": _sharegpt,
    "messages": _messages,
    "preference": _preference,
}
_FORMAT_BY_KEY = {
    "messages": "messages",
    "conversations": "sharegpt",
    "chat": "moss",
    "plain_text": "moss",
    "code_with_problem": "leetcode",
}


def _prompt(record: dict[str, Any]) -> list[Message]:
    """Return the prompt of a preference pair; empty if both answers already include it."""
    prompt = record.get("prompt")
    if isinstance(prompt, list):
        return _message_list(record, "prompt")
    if prompt is not None:
        return [*_system(record), _question(_string(record, "prompt"))]
    if "instruction" in record:
        history = _history_messages(record.get("history") or ())
        return [*_system(record), *history, _instruction(record)]
    for key in ("conversations", "messages"):
        if key in record:
            return [*_system(record), *_message_list(record, key)]
    if isinstance(record["chosen"], str):
        raise _RecordError("'chosen' is a text, and the record has no 'prompt'")
    return []


def _answer_messages(record: dict[str, Any], key: str) -> list[Message]:
    """Return the messages of one answer: from a text, one message or a list of messages."""
    value = record.get(key)
    if isinstance(value, dict):
        return [_message(value, key)]
    if isinstance(value, list):
        return _message_list(record, key)
    return [_answer(_string(record, key))]


def _instruction(record: dict[str, Any]) -> Message:
    """Return the user message; also keep instruction and input for the Alpaca template."""
    instruction = _string(record, "instruction")
    added = _string(record, "input") if record.get("input") else ""
    if not added:
        return _question(instruction)
    fields = {"instruction": instruction, "input": added}
    return _question(f"{instruction}\n{added}") | fields


def _system(record: dict[str, Any]) -> list[Message]:
    if not record.get("system"):
        return []
    return [{"role": "system", "content": _string(record, "system")}]


def _history_messages(history: Any) -> list[Message]:
    messages = []
    for turn in history if isinstance(history, list | tuple) else [history]:
        if not isinstance(turn, list) or [type(text) for text in turn] != [str, str]:
            raise _RecordError("'history' is not a list of [question, answer] pairs")
        messages += [_question(turn[0]), _answer(turn[1])]
    return messages


def _message_list(record: dict[str, Any], key: str) -> list[Message]:
    value = record.get(key)
    if not isinstance(value, list) or not value:
        raise _RecordError(f"{key!r} is not a list of messages")
    return [_message(message, f"{key}[{index}]") for index, message in enumerate(value)]


def _message(message: Any, location: str) -> Message:
    """Return a message with a standard role name; keep its other keys."""
    if not isinstance(message, dict):
        raise _RecordError(f"{location} is not an object")
    names = ("from", "value") if "from" in message else ("role", "content")
    role = message.get(names[0])
    if not isinstance(role, str) or not role:
        raise _RecordError(f"{location}: {names[0]!r} is absent, empty or not a string")
    extra_keys = {
        name: value for name, value in message.items() if name not in names and value is not None
    }
    content = _content(message.get(names[1]), location, names[1], "tool_calls" in extra_keys)
    return {"role": _ROLES.get(role, role), "content": content, **extra_keys}


def _content(content: Any, location: str, name: str, may_be_absent: bool) -> str:
    if isinstance(content, list):  # OpenAI content parts
        texts = [item.get("text") if isinstance(item, dict) else None for item in content]
        if not all(isinstance(text, str) for text in texts):
            raise _RecordError(
                f"{location}: {name!r} has a part that is not text; images need --processor FOLDER"
            )
        return "".join(texts)  # type: ignore[arg-type]
    if content is None and may_be_absent:
        return ""
    if not isinstance(content, str):
        raise _RecordError(f"{location}: {name!r} is absent or not a string")
    return content


def _conversation(
    messages: Sequence[Message], tools: Any = None, learned_from: int = 0
) -> Conversation:
    if not messages:
        raise _RecordError("has no messages")
    return Conversation(tuple(messages), tools, learned_from)


def _question(text: str) -> Message:
    return {"role": "user", "content": text}


def _answer(text: str) -> Message:
    return {"role": "assistant", "content": text}


def _string(record: dict[str, Any], key: str) -> str:
    if not isinstance(record.get(key), str):
        problem = (
            "is absent" if key not in record else f"is {type(record[key]).__name__}, not a string"
        )
        raise _RecordError(f"{key!r} {problem}")
    return record[key]


def _strip_affixes(text: str, prefix: str, suffix: str) -> str:
    return text.strip().removeprefix(prefix).removesuffix(suffix).strip()
