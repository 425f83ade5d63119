"""Damage to files and options, as disks, transfers and enemies do it, and what may come of it."""

import json
import os
import re
import shutil
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any, NoReturn

import click

from graphtrain.cli import _exit_status, _words

ODD_JSON = (
    None, True, -1, 0, 1, 3, 2**31, 2**63, 10**400, 1e308, -0.5, float("nan"), float("inf"), "",
    "x", "x" * 300, "\0", "\ud800", "\x1b[2J", "../../../etc/passwd", "/dev/zero", "gs://b/o",
    "é\u202e", [], [[]], {}, {"": {}}, [None], ["x"], [0], {"__float__": "Infinity"},
    json.loads("[" * 90 + "]" * 90),
)  # fmt: skip
ODD_TOML = (
    "0", "-1", "1", "7", "1e400", "nan", "-inf", "9" * 5000, "2" * 30, "true", '""', "''", '"x"',
    '"\\u0000"', '"\\u001b[2J"', '"' + "x" * 300 + '"', '"../../../../etc/passwd"', '"/dev/zero"',
    '"s3://bucket/x"', "[]", "[[]]", "{}", "[1, 2]", '["x"]', "[{}]", "{ a = 1 }", "1979-05-27",
    "07:32:00", "[" * 200 + "]" * 200, "{a=" * 200 + "1" + "}" * 200, "0x7fffffffffffffff", '"""',
    "\x00", "\ud7ff", "'\x7f'", "a." * 400 + "b", "[" + "0.1, " * 300 + "]", '"rest"', '"auto"',
)  # fmt: skip
ODD_BYTES = (
    b"", b"\0", b"\xff\xfe", b"\xef\xbb\xbf", b"[" * 100_000, b'{"a":' * 50_000, b"null", b"[]",
    b"{}", b"5", b'""', b"NaN", b"9" * 5000, b"\n", b"{\n}}", b"\x80\x05.", b"PK\x03\x04",
    b"\xed\xa0\x80", b'{"digest": 1}', b'{"schema": 1}',
)  # fmt: skip


class Defect(AssertionError):
    """What no file and no option may cause."""


def only_user_errors(action: Callable[[], Any], seconds: float = 60) -> bool:
    """Run an action; return whether it succeeded.

    Raises:
        Defect: it raised what the command would show as a traceback, took longer, or its message is
            not one paragraph.
    """
    try:
        with _time_limit(seconds), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            action()
        return True
    except click.ClickException as error:
        message = error.format_message()
    except Defect:
        raise
    except Exception as error:
        if _exit_status(error) is None:
            raise Defect(f"{type(error).__name__}: {str(error)[:300]}") from error
        message = _words(error)
    if not message.strip() or "\n\n" in message or "Traceback" in message or len(message) > 20_000:
        raise Defect(f"not one paragraph, but {len(message)} characters: {message[:300]!r}")
    return False


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    def end(signal_number: int, frame: FrameType | None) -> NoReturn:
        raise Defect(f"took longer than {seconds} s")

    previous = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def damage_bytes(content: bytes, random: Random) -> bytes:
    """Flip a bit, cut, repeat, insert or replace."""
    position = random.randrange(len(content) + 1)
    end = min(len(content), position + random.choice((1, 2, 8, 100)))
    kind = random.choice(("flip", "flip", "cut", "drop", "repeat", "insert", "replace", "zeros"))
    if kind == "flip" and content:
        position = min(position, len(content) - 1)
        flipped = content[position] ^ (1 << random.randrange(8))
        return content[:position] + bytes([flipped]) + content[position + 1 :]
    if kind == "cut":
        return content[:position]
    if kind == "drop":
        return content[:position] + content[end:]
    if kind == "repeat":
        return content[:end] + content[position:]
    if kind == "zeros":
        return content[:position] + bytes(end - position) + content[end:]
    odd = random.choice(ODD_BYTES)
    return content[:position] + odd + content[position:] if kind == "insert" else odd


def damage_json(content: bytes, random: Random) -> bytes:
    """Replace, remove or rename one entry of a JSON document; its other bytes stay valid."""
    try:
        root = [json.loads(content)]
    except (ValueError, RecursionError):
        return damage_bytes(content, random)
    places = list(_places(root))
    container, key = random.choice(places)
    kind = random.choice(("replace", "replace", "replace", "remove", "rename", "swap"))
    if kind == "remove" and container is not root:
        del container[key]
    elif kind == "rename" and isinstance(container, dict):
        container[random.choice(("", "x", "\ud800", "digest", "../x", "x" * 300))] = container.pop(
            key
        )
    elif kind == "swap":
        other, other_key = random.choice(places)
        container[key] = other[other_key] if other is not container else None
    else:
        container[key] = random.choice(ODD_JSON)
    try:
        return json.dumps(root[0] if root else None).encode()
    except (ValueError, RecursionError):  # an entry inside itself
        return b"null"


def _places(container: Any) -> Iterator[tuple[Any, Any]]:
    keys = list(container) if isinstance(container, dict) else list(range(len(container)))
    for key in keys[:200]:
        yield container, key
        if isinstance(container[key], dict | list):
            yield from _places(container[key])


def damage_json_lines(content: bytes, random: Random) -> bytes:
    """Damage one line of JSON lines."""
    lines = content.split(b"\n")
    index = random.randrange(len(lines))
    lines[index] = random.choice((damage_json, damage_bytes))(lines[index], random)
    return b"\n".join(lines)


_TOML_VALUE = re.compile(rb"(?m)^([^\n=#\[]+=)(.*)$")


def damage_toml(content: bytes, random: Random) -> bytes:
    """Replace, rename, repeat or remove one line of a TOML document."""
    matches = list(_TOML_VALUE.finditer(content))
    if not matches:
        return damage_bytes(content, random)
    match = random.choice(matches)
    start, end = match.span()
    kind = random.choice(("value", "value", "value", "name", "repeat", "remove", "table"))
    if kind == "value":
        line = match[1] + b" " + random.choice(ODD_TOML).encode(errors="replace")
    elif kind == "name":
        name = random.choice(("x", '""', "a.b", "a." * 200 + "b", '"\\u001b[2J"', "seed", "mesh"))
        line = name.encode() + b" =" + match[2]
    elif kind == "repeat":
        line = match[0] + b"\n" + match[0]
    elif kind == "remove":
        line = b""
    else:
        line = b"[" + random.choice((b"program", b"run.data", b"x", b"[run", b"program.model.rope"))
        line += b"]\n" + match[0]
    return content[:start] + line + content[end:]


Damage = Callable[[bytes, Random], bytes]
_BY_SUFFIX: dict[str, Damage] = {
    ".json": damage_json,
    ".jsonl": damage_json_lines,
    ".toml": damage_toml,
    "": damage_json,  # metadata, requests
}


def damage_file(path: Path, random: Random, special: bool = True) -> str:
    """Damage a file, or replace it by what is no file; return in a word what was done.

    Args:
        path: The file.
        random: Source of the choices.
        special: Whether it may become a directory, a link or a named pipe.
    """
    if special and random.random() < 0.1:
        kind = random.choice(("missing", "directory", "loop", "pipe", "dangling"))
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        if kind == "directory":
            path.mkdir()
        elif kind == "loop":
            path.symlink_to(path.name)
        elif kind == "pipe":
            os.mkfifo(path)
        elif kind == "dangling":
            path.symlink_to("no such file")
        return kind
    damage = _BY_SUFFIX.get(path.suffix, damage_bytes)
    if random.random() < 0.4:
        damage = damage_bytes
    content = path.read_bytes()
    for _ in range(random.choice((1, 1, 1, 2, 5))):
        content = damage(content, random)
    path.write_bytes(content)
    return damage.__name__
