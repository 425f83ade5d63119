"""Files of rows, JSON lines or Parquet, as the package `datasets` reads them for lm-eval."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from graphtrain.errors import DataError

READERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}  # by suffix
_DEPTH = 100  # of lists and objects in each other; pyarrow reads 64, and far more end the process
_BRACKETS = re.compile(rb'"(?:[^"\\]|\\.)*"|([\[{])|([\]}])')  # a text, what opens, what closes


@dataclass(frozen=True)
class RowFormat:
    """Format of files, as the package `datasets` names it, and its options."""

    reader: str  # "json", "parquet" or another format of this package
    options: Mapping[str, Any] = field(default_factory=dict)

    def read(self, files: Mapping[str, str], cache: Path) -> Any:
        """Return the tables of files, by split."""
        import datasets

        given = {"data_files": dict(files), "cache_dir": str(cache), **self.options}
        return datasets.load_dataset(self.reader, **given)


def read_rows(path: Path, cache: Path, form: RowFormat) -> Any:
    """Return the table of a file, which has at least one row.

    Args:
        path: The file.
        cache: Directory of the files that the package `datasets` writes.
        form: How the file is read.

    Raises:
        DataError: the file cannot be read, or has no rows.
    """
    if not path.stat().st_size:
        raise DataError(f"{path}: has no rows")
    if path.suffix in (".jsonl", ".json") and (problem := _bad_bytes(path)):
        raise DataError(f"{path}: {problem}")
    try:
        table = form.read({"train": str(path)}, cache)["train"]
    except Exception as error:  # of several packages, which read damaged files
        reason = _bad_line(path) or _short(error)
        raise DataError(f"{path}: cannot be read as rows ({reason})") from None
    if not len(table):
        raise DataError(f"{path}: has no rows")
    return table


def check_together(
    files: Mapping[str, str], fields: Sequence[str], cache: Path, form: RowFormat
) -> None:
    """Check that the files of all splits have fields of types that can be read together.

    lm-eval reads those of all files as those of the first: numbers would become texts.

    Args:
        files: File of each split, all of the same format.
        fields: Fields in which texts are no numbers.
        cache: Directory of the files that the package `datasets` writes.
        form: How the files are read.

    Raises:
        DataError: they have not; the message names the field.
    """
    types = {path: read_rows(Path(path), cache, form).features for path in files.values()}
    for told, kinds in _differences(types, fields):
        if "string" in kinds:
            raise DataError(told)
    try:
        form.read(files, cache)
    except Exception as error:  # as in read_rows
        told, _ = next(_differences(types), ("", set()))
        told = told or f"{', '.join(types)}: cannot be read together ({_short(error)})"
        raise DataError(told) from None


def _differences(
    types: Mapping[str, Mapping[str, Any]], fields: Sequence[str] | None = None
) -> Iterator[tuple[str, set[str]]]:
    """Yield what to do about fields whose types differ between files, and their two types.

    Args:
        types: Type of each field, by file.
        fields: Fields to compare; None: all.
    """
    first, *others = types
    for path in others:
        for name in types[path] if fields is None else fields:
            if name not in types[path] or name not in types[first]:
                continue
            here, there = _named(types[path][name]), _named(types[first][name])
            if here != there and "null" not in (here, there):  # an empty field is of any type
                yield (
                    f"{path}: the field {name!r} is {here}, and in {first} it is {there}; "
                    "write both alike",
                    {here, there},
                )


def listed(names: Sequence[str]) -> str:
    """Return the first 20 of a list of names, as text."""
    return ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")


def _bad_bytes(path: Path) -> str | None:
    """Return the first line that the package `datasets` does not refuse by itself, and why."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                line.decode()
            except UnicodeDecodeError as error:
                return f"line {number} is not UTF-8 ({error.reason} at byte {error.start} of it)"
            if line.count(b"[") + line.count(b"{") > _DEPTH and _depth(line) > _DEPTH:
                return f"line {number} is nested too deeply, in over {_DEPTH} lists or objects"
    return None


def _depth(line: bytes) -> int:
    """Return how many lists and objects of JSON are in each other."""
    depth = deepest = 0
    for found in _BRACKETS.finditer(line):
        depth += (found[1] is not None) - (found[2] is not None)
        deepest = max(deepest, depth)
    return deepest


def _bad_line(path: Path) -> str | None:
    """Return the first line of a .jsonl file that is no row, and why; None if there is none."""
    if path.suffix != ".jsonl":
        return None
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                row = json.loads(line, object_pairs_hook=_without_repeats) if line.strip() else {}
                json.dumps(row, ensure_ascii=False).encode()
            except UnicodeEncodeError:
                return f"line {number} has half of a surrogate pair, which is no character"
            except KeyError as error:
                return f"line {number} has the field {error} twice"
            except ValueError as error:
                return f"line {number} is no JSON: {error}"
            if not isinstance(row, dict):
                return f"line {number} is no object of JSON"
    return None


def _without_repeats(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for name, value in pairs:
        if name in row:
            raise KeyError(name)
        row[name] = value
    return row


def _named(kind: Any) -> str:
    """Return the type of a field in words, such as "string" or "List(string)"."""
    if type(kind).__name__ == "Json":
        return "of several types"
    return str(kind).replace("Value('", "").replace("')", "")


def _short(error: BaseException) -> str:
    """Return the cause of an error of `datasets`, which says what is wrong in that alone."""
    cause = error.__cause__ or error
    return (str(cause) or type(cause).__name__).partition("\n")[0][:300]
