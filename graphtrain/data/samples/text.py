"""Sample corpus of the text that comes with every CPython; needs no network.

It consists of the reference topics of `pydoc`, and the docstrings and sources of the standard
library.
"""

import ast
import importlib
import json
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from graphtrain.errors import DataError
from graphtrain.files import write_new

SAMPLE_PARTS = ("topics", "docstrings", "sources")

_SKIPPED = {
    "__pycache__",
    "dist-packages",
    "encodings",  # tables of character codes, not text
    "idlelib",
    "lib2to3",
    "pydoc_data",  # contains the topics
    "site-packages",
    "test",
    "tests",
}
_DEFINITIONS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class SampleSize:
    """Size of a written sample corpus."""

    documents: int
    text_bytes: int


@dataclass(frozen=True)
class _Docstring:
    """Docstring and the position of its literal: lines from 1, columns in bytes, as in `ast`."""

    name: str
    text: str
    first_line: int
    first_column: int
    last_line: int
    last_column: int


def write_sample(
    path: str | Path, *, include: Sequence[str] = SAMPLE_PARTS, limit: int = 8_000_000
) -> SampleSize:
    """Write documents as JSON lines until `limit` bytes of text; deterministic for one Python.

    If docstrings are included, sources are written without their docstrings, so that no text is in
    both the training and the validation split.

    Args:
        path: Output file.
        include: Parts to write, of SAMPLE_PARTS.
        limit: Maximum bytes of text.

    Raises:
        DataError: this Python contains no such text, or the file cannot be written.
    """
    documents = text_bytes = 0
    try:
        with write_new(Path(path)) as file:
            for source, text in _documents(include):
                size = len(text.encode())
                if text_bytes + size > limit:
                    break
                file.write(json.dumps({"text": text, "source": source}).encode() + b"\n")
                documents += 1
                text_bytes += size
            if not documents:
                raise DataError(
                    f"this Python has no text of {', '.join(include)} below {limit} bytes; "
                    "increase --megabytes or use a Python whose standard library is installed as "
                    "files"
                )
    except OSError as error:
        raise DataError(f"{error.filename}: {error.strerror}") from None
    return SampleSize(documents, text_bytes)


def docstrings_of_modules() -> Iterator[tuple[str, str, str]]:
    """Yield module, name and docstring of every function, method and class of the library."""
    for path, source in _modules():
        module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for docstring in _docstrings(path, source):
            if docstring.name != path:
                yield module, docstring.name, docstring.text


def _documents(include: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield pairs of source name and text, part by part."""
    if "topics" in include:
        yield from _topics()
    docstrings: dict[str, list[_Docstring]] = {}
    if "docstrings" in include:
        for name, source in _modules():
            docstrings[name] = _docstrings(name, source)
            text = "\n\n".join(
                f"{docstring.name}\n{docstring.text}" for docstring in docstrings[name]
            )
            if text:
                yield f"docstrings/{name}", text
    if "sources" in include:
        for name, source in _modules():
            text = _without_docstrings(source, docstrings.get(name, []))
            if text.strip():
                yield f"sources/{name}", text


def _topics() -> Iterator[tuple[str, str]]:
    try:
        topics = importlib.import_module("pydoc_data.topics").topics
    except ModuleNotFoundError:
        return  # some distributions package it separately
    for name in sorted(topics):
        yield f"topics/{name}", topics[name]


def _modules() -> Iterator[tuple[str, str]]:
    """Yield relative path and source of the modules of the standard library, sorted by path."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if not _SKIPPED.isdisjoint(relative.parts) or not path.is_file():
            continue
        try:
            yield relative.as_posix(), path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # one of the few files in another encoding


def _docstrings(name: str, source: str) -> list[_Docstring]:
    """Return the docstrings in file order; none if this Python cannot parse the file."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return []
    docstrings = []
    for node in ast.walk(tree):
        if isinstance(node, _DEFINITIONS) and (text := ast.get_docstring(node)):
            literal = node.body[0]
            assert literal.end_lineno is not None and literal.end_col_offset is not None
            span = literal.lineno, literal.col_offset, literal.end_lineno, literal.end_col_offset
            docstrings.append(_Docstring(getattr(node, "name", name), text, *span))
    return sorted(docstrings, key=lambda entry: entry.first_line)


def _without_docstrings(source: str, docstrings: list[_Docstring]) -> str:
    """Replace each docstring by `...`, so that the source remains valid."""
    lines = source.encode().splitlines(keepends=True)
    for docstring in reversed(docstrings):
        prefix = lines[docstring.first_line - 1][: docstring.first_column]
        suffix = lines[docstring.last_line - 1][docstring.last_column :]
        lines[docstring.first_line - 1 : docstring.last_line] = [prefix + b"..." + suffix]
    return b"".join(lines).decode()
