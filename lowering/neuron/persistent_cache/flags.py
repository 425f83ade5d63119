"""The compiler's flags of an entry, and the key that they give its name."""

import hashlib
import json
import shlex
from pathlib import Path

from lowering.errors import LoweringError

JSON_FILE, TEXT_FILE = "compile_flags.json", "compile_flags.txt"  # the second up to 2.12


def key_of_list(flags: list[str]) -> str:
    """The flags key of libneuronxla since it writes compile_flags.json."""
    return _digest(json.dumps(flags))


def key_of_text(flags: list[str]) -> str:
    """The flags key of older ones: of the flags as one line."""
    return _digest(" ".join(flags))


def fit(name: str, flags: list[str]) -> bool:
    """Whether flags give the key with which the name of an entry ends, by either formula.

    The formula belongs to libneuronxla, whose newer versions may have another.
    """
    return name.rpartition("+")[2] in (key_of_list(flags), key_of_text(flags))


def read(directory: Path) -> list[str]:
    """The flags that stand in an entry.

    Raises:
        LoweringError: there are none, or they cannot be read.
    """
    try:
        return _parsed((directory / JSON_FILE).read_text())
    except FileNotFoundError:
        pass
    except ValueError:
        raise LoweringError(f"{directory / JSON_FILE} is no list of flags in JSON") from None
    try:
        return shlex.split((directory / TEXT_FILE).read_text())
    except FileNotFoundError:
        raise LoweringError(f"{directory} holds neither {JSON_FILE} nor {TEXT_FILE}") from None
    except ValueError as error:  # a quotation without an end
        raise LoweringError(f"{directory / TEXT_FILE} is no line of flags: {error}") from None


def machine(flags: list[str]) -> str | None:
    """What --target says; None where the flags leave it to the caller, as before 2.16."""
    for index, flag in enumerate(flags):
        if flag.startswith("--target="):
            return flag.partition("=")[2]
        if flag == "--target" and index + 1 < len(flags):
            return flags[index + 1]
    return None


def _parsed(text: str) -> list[str]:
    flags = json.loads(text)
    if not (isinstance(flags, list) and all(isinstance(flag, str) for flag in flags)):
        raise ValueError(text)
    return flags


def _digest(text: str) -> str:
    return hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()[:8]
