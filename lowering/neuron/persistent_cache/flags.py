"""The compiler's flags of a cache entry, and the flags key in the entry's name."""

import hashlib
import json
import shlex
from pathlib import Path
from typing import Any

from lowering.errors import LoweringError
from sharding_rules.documents import read_json, read_text

# Versions up to 2.12 write the second.
JSON_FILE, TEXT_FILE = "compile_flags.json", "compile_flags.txt"


def json_flags_key(flags: list[str]) -> str:
    """Return the flags key of libneuronxla versions that write compile_flags.json."""
    return _digest(json.dumps(flags))


def text_flags_key(flags: list[str]) -> str:
    """Return the flags key of older versions: a digest of the flags as one line."""
    return _digest(" ".join(flags))


def match_key(name: str, flags: list[str]) -> bool:
    """Return whether the flags match the flags key at the end of an entry's name.

    Both formulas are tried. They belong to libneuronxla, whose newer versions may use another.
    """
    return name.rpartition("+")[2] in (json_flags_key(flags), text_flags_key(flags))


def read(directory: Path) -> list[str]:
    """Read the flags of an entry.

    Raises:
        LoweringError: the entry has no file of flags, or the file cannot be parsed.
    """
    try:
        return _checked(read_json(directory / JSON_FILE))
    except FileNotFoundError:
        pass
    except (OSError, ValueError):
        raise LoweringError(f"{directory / JSON_FILE} is not a JSON list of flags") from None
    try:
        return shlex.split(read_text(directory / TEXT_FILE))
    except FileNotFoundError:
        raise LoweringError(f"{directory} contains neither {JSON_FILE} nor {TEXT_FILE}") from None
    except (OSError, ValueError) as error:  # also an unterminated quotation
        raise LoweringError(f"{directory / TEXT_FILE} is not a line of flags: {error}") from None


def target_flag(flags: list[str]) -> str | None:
    """Return the value of --target; None if the flags do not contain it, as before 2.16."""
    for index, flag in enumerate(flags):
        if flag.startswith("--target="):
            return flag.partition("=")[2]
        if flag == "--target" and index + 1 < len(flags):
            return flags[index + 1]
    return None


def _checked(flags: Any) -> list[str]:
    if not (isinstance(flags, list) and all(isinstance(flag, str) for flag in flags)):
        raise ValueError("not a list of strings")
    return flags


def _digest(text: str) -> str:
    return hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()[:8]
