"""Journal of answers: an evaluation that was interrupted does not compute them again."""

from __future__ import annotations

import fcntl
import json
import warnings
from pathlib import Path
from typing import Any, Protocol

from graphtrain.checkpoints.output_directory import write_errors
from graphtrain.errors import TrainingError
from graphtrain.files import json_digest


class Answers(Protocol):
    """Answers of a model that were computed before."""

    def find(self, key: str) -> Any:
        """Return the answer to a request; None if there is none."""

    def write(self, key: str, answer: Any) -> None:
        """Keep the answer to a request."""


class NoAnswers:
    """Answers that are not kept: those of weights that change."""

    def find(self, key: str) -> None:
        return None

    def write(self, key: str, answer: Any) -> None:
        pass


class AnswerJournal:
    """Answers of a model to requests, in a file of JSON lines, each by the digest of its request.

    The file belongs to one model: its name is a digest of the weights and programs. A line that
    was cut off, because the process was killed, is dropped. One that was changed is blanked.

    Args:
        path: The file; it is created.
    """

    def __init__(self, path: Path) -> None:
        """Open the file, and read the answers in it.

        Raises:
            TrainingError: another process writes into it, or it cannot be written.
        """
        self.path = path
        self.reused = 0  # answers that were not computed again
        with write_errors(path.parent):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a+b")
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._file.close()
                raise TrainingError(
                    f"{path}: another process evaluates this model; wait for it, or end it"
                ) from None
            self._answers = self._read()

    def find(self, key: str) -> Any:
        """Return the answer to a request; None if there is none."""
        answer = self._answers.get(key)
        self.reused += answer is not None
        return answer

    def write(self, key: str, answer: Any) -> None:
        """Keep the answer to a request."""
        with write_errors(self.path.parent):
            self._file.write(_line(key, answer))
            self._file.flush()

    def __enter__(self) -> AnswerJournal:
        return self

    def __exit__(self, *error: object) -> None:
        """Close the file; another process may write into it then."""
        with write_errors(self.path.parent):  # what a full disk refused is written once more
            self._file.close()

    def _read(self) -> dict[str, Any]:
        self._file.seek(0)
        answers, complete, changed = {}, 0, []
        for number, line in enumerate(self._file, 1):
            if not line.endswith(b"\n"):
                break
            entry = _entry(line)
            if entry is not None:
                answers[entry[0]] = entry[1]
            elif line.strip():
                self._blank(complete, len(line))
                changed.append(number)
            complete += len(line)
        self._file.truncate(complete)
        if changed:
            count = "" if len(changed) == 1 else f" and {len(changed) - 1} other lines"
            warnings.warn(
                f"{self.path}: line {changed[0]}{count}: not as written; their answers are "
                "computed again where they are needed",
                stacklevel=2,
            )
        return answers

    def _blank(self, begin: int, length: int) -> None:
        """Write spaces in place of a line."""
        with self.path.open("r+b") as file:  # the other one only appends
            file.seek(begin)
            file.write(b" " * (length - 1))


def request_key(*parts: Any) -> str:
    """Return the digest of a request: everything that its answer depends on, beside the model."""
    return json_digest(parts)[:32]


def _line(key: str, answer: Any) -> bytes:
    check = json_digest([key, answer])[:8]
    return json.dumps({"request": key, "answer": answer, "check": check}).encode() + b"\n"


def _entry(line: bytes) -> tuple[str, Any] | None:
    """Return the request and the answer of a line; None if it is not as it was written."""
    try:
        fields = json.loads(line)
        key, answer, check = fields["request"], fields["answer"], fields["check"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return (key, answer) if check == json_digest([key, answer])[:8] else None
