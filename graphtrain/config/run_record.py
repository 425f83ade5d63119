"""config.record.json: the configuration files of a run as the run wrote them.

They may be edited, so a change is not refused here: it is reported with the settings that changed,
so that an edit is confirmed and damage is seen. `graphtrain.config.identity` says which settings a
resumed run may change.
"""

import hashlib
import json
import shutil
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from typing_extensions import TypedDict  # pydantic refuses that of typing before Python 3.12

from graphtrain.config.identity import differences, say
from graphtrain.config.lines import KeyPath
from graphtrain.files import atomic_write, content_digest, json_digest, validate
from sharding_rules.documents import (
    MAX_TOML_BYTES,
    DocumentError,
    parse_toml,
    read_object,
    read_text,
)

CONFIG = "config.toml"
RECORD = "config.record.json"
_VERSION = 1
_MAX_NAMED = 5  # changed settings in one message


class _Record(TypedDict):
    """Contents of the record without its digest."""

    version: int
    text: str  # of config.toml
    digests: dict[str, str]  # SHA-256 of config.toml and of each config.STEP.toml, by name


def write_run_config(directory: Path, text: str, start: int) -> None:
    """Write config.toml; keep one that differs as config.STEP.toml, with the step it was used to.

    Files that are not as the run wrote them are reported first.

    Raises:
        OSError: a file cannot be written.
    """
    path = directory / CONFIG
    warn_if_changed(path)
    _warn_of_changed_copies(directory)
    if path.exists() and path.read_bytes() != text.encode():
        kept, number = path.with_name(f"config.{start}.toml"), 1
        while kept.exists():
            kept, number = path.with_name(f"config.{start}-{number}.toml"), number + 1
        shutil.copyfile(path, kept)
    _write_record(directory, text)
    with atomic_write(path) as file:
        file.write(text.encode())


def warn_if_changed(path: Path) -> None:
    """Warn if the config.toml of a run is not as the run wrote it; name the changed settings."""
    record = _read_record(path.parent)
    if record is None or not path.is_file():
        return
    # Between the record and config.toml a run may be killed: then config.toml is the one before,
    # of which the run has kept a copy.
    if content_digest(path) not in record["digests"].values():
        warnings.warn(f"{path} is not as the run wrote it: {_changes(path, record)}", stacklevel=1)


def _warn_of_changed_copies(directory: Path) -> None:
    record = _read_record(directory)
    for name, digest in record["digests"].items() if record is not None else ():
        path = directory / name
        if name != CONFIG and path.is_file() and content_digest(path) != digest:
            warnings.warn(
                f"{path}, the settings of an earlier part of the run, is not as the run wrote it",
                stacklevel=1,
            )


def _write_record(directory: Path, text: str) -> None:
    """Record the text that config.toml will have, and the copies beside it as they are now."""
    digests = {path.name: content_digest(path) for path in sorted(directory.glob("config.*.toml"))}
    digests[CONFIG] = hashlib.sha256(text.encode()).hexdigest()
    content: dict[str, Any] = {"version": _VERSION, "text": text, "digests": digests}
    content["digest"] = json_digest(content)
    with atomic_write(directory / RECORD) as file:
        file.write((json.dumps(content, indent=1) + "\n").encode())


def _read_record(directory: Path) -> _Record | None:
    """Return the record of a run; None if an earlier version wrote none, or it is damaged."""
    path = directory / RECORD
    try:
        content = read_object(path)
        if content.pop("digest", None) != json_digest(content):
            raise DocumentError("its digest differs")
        return validate(_Record, content)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        warnings.warn(
            f"{path} is not as it was written ({error}), so changes of {directory / CONFIG} are "
            "not noticed; the next resumption writes it again",
            stacklevel=1,
        )
        return None


def _changes(path: Path, record: _Record) -> str:
    """Say which settings of config.toml differ from those that the run wrote."""
    try:
        current = parse_toml(read_text(path, MAX_TOML_BYTES))
    except (OSError, ValueError):
        return "it was edited or damaged"
    saved = dict(_settings((), parse_toml(record["text"])))
    changed = differences(saved, dict(_settings((), current)))
    if not changed:
        return "its settings are the same"
    named = [
        f"{name} was {say(before)} and is {say(now)}"
        for name, (before, now) in list(changed.items())[:_MAX_NAMED]
    ]
    more = len(changed) - len(named)
    return "; ".join([*named, *([f"and {more} more"] if more else [])])


def _settings(path: KeyPath, table: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the settings of a table by name; dates, which no setting accepts, as strings."""
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _settings((*path, name), value)
        else:
            yield ".".join((*path, name)), json.loads(json.dumps(value, default=str))
