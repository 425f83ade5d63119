"""Text, TOML and JSON that users give, read within limits of size and depth.

Every such file is parsed here, so that a hostile or damaged one ends in a short error: not in a
traceback, in minutes of parsing or in gigabytes of memory.
"""

import json
import os
import re
import stat
import tomllib
from pathlib import Path
from typing import Any

from sharding_rules.errors import UserError

MAX_DEPTH = 64  # tables and lists inside each other; a configuration needs 6
MAX_TOML_BYTES = 256 << 10  # the largest example has 800 bytes
MAX_JSON_BYTES = 64 << 20  # the index of a model with a million tensors
_MAX_KEY_DOTS = 100  # of one dotted key, for which tomllib takes quadratic time
# Comments, strings and dotted keys of TOML, in linear time: every alternative that begins a string
# also matches one without an end, and nothing is tried twice: possessive repetitions, and atomic
# groups where an alternative looks ahead, with which Python 3.11.2 repeats possessively in error.
_STRING = r'"(?:[^"\\\n]|\\[^\n]?)*+"?|\'[^\'\n]*+\'?'
_PART = rf"(?:[A-Za-z0-9_+-]++|{_STRING})"  # of a key; a float is two parts
_TOML_TOKEN = re.compile(
    r"#[^\n]*+"
    r'|"""(?>(?:[^"\\]|\\(?:.|\Z)|"(?!""))*)(?:"{3,5}|\Z)'
    r"|'''(?>(?:[^']|'(?!''))*)(?:'{3,5}|\Z)"
    rf"|(?P<deep_key>{_PART}(?:[ \t]*+\.[ \t]*+{_PART}){{{_MAX_KEY_DOTS + 1}}})"
    rf"|{_PART}(?:[ \t]*+\.[ \t]*+{_PART})*+",
    re.DOTALL,
)


class DocumentError(UserError, ValueError):
    """A document is not valid, or exceeds a limit; the caller adds the name of the file.

    Args:
        reason: what is wrong, without the name of the file.
        line: number of the line, if it is known.
    """

    def __init__(self, reason: str, line: int | None = None) -> None:
        super().__init__(reason if line is None else f"line {line}: {reason}")
        self.reason, self.line = reason, line


def read_text(path: Path, max_bytes: int = MAX_JSON_BYTES) -> str:
    """Read a file of UTF-8 text, without a byte order mark that some editors write.

    Raises:
        OSError: the file cannot be opened or read.
        DocumentError: it is longer than `max_bytes`, is a device, or is not UTF-8.
    """
    data = read_bytes(path, max_bytes)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise DocumentError("not UTF-8 text; save the file as UTF-8", line) from None


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file.

    Raises:
        OSError: the file cannot be opened or read.
        DocumentError: it is not valid TOML, or exceeds a limit.
    """
    return parse_toml(read_text(path, MAX_TOML_BYTES))


def read_json(path: Path) -> Any:
    """Read a JSON file.

    Raises:
        OSError: the file cannot be opened or read.
        DocumentError: it is not valid JSON, or exceeds a limit.
    """
    return parse_json(read_text(path))


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON file that contains an object.

    Raises:
        OSError: the file cannot be opened or read.
        DocumentError: it is not a valid JSON object, or exceeds a limit.
    """
    return parse_object(read_text(path))


def parse_toml(text: str) -> dict[str, Any]:
    """Parse TOML.

    Raises:
        DocumentError: the text is not valid TOML, or exceeds a limit.
    """
    if len(text) > MAX_TOML_BYTES:
        raise DocumentError(f"longer than {MAX_TOML_BYTES} characters, the limit")
    for token in _TOML_TOKEN.finditer(text):
        if token["deep_key"]:
            line = text.count("\n", 0, token.start()) + 1
            raise DocumentError(
                f"a dotted key with more than {_MAX_KEY_DOTS} dots, the limit", line
            )
    try:
        document = tomllib.loads(text)
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:  # besides TOMLDecodeError: Python refuses numbers of 5000 digits
        raise DocumentError(_short(str(error))) from None
    _check_depth(document)
    return document


def parse_json(text: str | bytes) -> Any:
    """Parse JSON.

    Raises:
        DocumentError: the text is not valid JSON, or exceeds a limit.
    """
    try:
        value = json.loads(text)
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:  # also bytes that are not UTF-8, and numbers of 5000 digits
        raise DocumentError(_short(str(error))) from None
    _check_depth(value)
    return value


def parse_object(text: str | bytes) -> dict[str, Any]:
    """Parse a JSON object.

    Raises:
        DocumentError: the text is not a valid JSON object, or exceeds a limit.
    """
    value = parse_json(text)
    if not isinstance(value, dict):
        raise DocumentError(f"not a JSON object but {_kind(value)}")
    return value


def read_bytes(path: Path, max_bytes: int = MAX_JSON_BYTES) -> bytes:
    """Read a file; a FIFO that nobody writes to is empty, and is not waited for.

    Raises:
        OSError: the file cannot be opened or read.
        DocumentError: it is longer than `max_bytes`, is a device, or has an impossible name.
    """
    try:
        file = open(path, "rb", opener=_open_without_waiting)  # noqa: SIM115, closed below
    except ValueError:  # a NUL or a lone surrogate in the name
        raise DocumentError("no file can have this name") from None
    with file:
        status = os.fstat(file.fileno())
        mode = status.st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISFIFO(mode):  # a pipe of the shell is a FIFO
            raise DocumentError("not a regular file")
        os.set_blocking(file.fileno(), True)
        # The buffer has the size that is asked for; a FIFO, or a file in /proc, has none.
        data = file.read(min(max_bytes, max(status.st_size, MAX_JSON_BYTES)) + 1)
    if len(data) > max_bytes:
        raise DocumentError(f"longer than {max_bytes} bytes, the limit")
    return data


def _open_without_waiting(path: str, flags: int) -> int:
    """Open a file; a FIFO that nobody writes to does not block, but is empty."""
    return os.open(path, flags | os.O_NONBLOCK)


def _check_depth(value: Any) -> None:
    """Raise unless everything that walks through the value can do so recursively."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return
    raise _too_deep()


def _too_deep() -> DocumentError:
    return DocumentError(f"more than {MAX_DEPTH} tables or lists inside each other, the limit")


def _short(reason: str) -> str:
    """Shorten a parser's message, which may quote a whole value."""
    reason = reason.partition("; use sys.set_int_max_str_digits")[0]
    return reason if len(reason) <= 200 else f"{reason[:200]}..."


def _kind(value: Any) -> str:
    return "a list" if isinstance(value, list) else "null" if value is None else "a single value"
