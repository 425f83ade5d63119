"""Sample instruction data from CPython's docstrings; needs no network.

A question asks what a function does, and the first paragraph of its docstring is the answer. In a
preference pair, the answer of another function is the rejected one.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from graphtrain.data.samples.text import SampleSize, docstrings_of_modules
from graphtrain.errors import DataError
from graphtrain.files import write_new

_REJECTED_DISTANCE = (
    997  # distance in answers to the rejected one, so that it is from another module
)


def write_instructions(path: str | Path, *, limit: int = 8_000_000) -> SampleSize:
    """Write conversations in OpenAI's messages format as JSON lines, up to `limit` bytes.

    The result is the same each time for one Python.

    Raises:
        DataError: this Python contains no docstrings, or the file cannot be written.
    """
    return _write(path, limit, (_conversation(*pair) for pair in _questions()))


def write_preferences(path: str | Path, *, limit: int = 8_000_000) -> SampleSize:
    """Write prompts with a chosen and a rejected answer as JSON lines, up to `limit` bytes.

    Raises:
        DataError: this Python contains no docstrings, or the file cannot be written.
    """
    pairs = list(_questions())
    rejected_answers = [
        pairs[(index + _REJECTED_DISTANCE) % len(pairs)][1] for index in range(len(pairs))
    ]
    records = (
        {"prompt": question, "chosen": answer, "rejected": rejected}
        for (question, answer), rejected in zip(pairs, rejected_answers, strict=True)
        if answer != rejected
    )
    return _write(path, limit, records)


def _questions() -> Iterator[tuple[str, str]]:
    for module, name, text in docstrings_of_modules():
        answer = " ".join(text.split("\n\n")[0].split())
        if not name.startswith("_") and len(answer) > 20:
            yield f"What does {name} of Python's module {module} do?", answer


def _conversation(question: str, answer: str) -> dict[str, Any]:
    return {
        "messages": [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]
    }


def _write(path: str | Path, limit: int, records: Iterable[dict[str, Any]]) -> SampleSize:
    documents = text_bytes = 0
    try:
        with write_new(Path(path)) as file:
            for record in records:
                line = json.dumps(record).encode() + b"\n"
                if text_bytes + len(line) > limit:
                    break
                file.write(line)
                documents += 1
                text_bytes += len(line)
            if not documents:
                raise DataError(
                    f"this Python has no docstrings below {limit} bytes; increase --megabytes"
                )
    except OSError as error:
        raise DataError(f"{error.filename}: {error.strerror}") from None
    return SampleSize(documents, text_bytes)
