"""A stored request: what was asked for, and which program answers it."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graphtrain.cache.key import CacheKey
from graphtrain.cache.layout import SCHEMA, is_digest
from graphtrain.cache.programs import Damaged, parse, read_bytes, reading, timestamp

END = b"}}"  # the last line of a request's file


@dataclass(frozen=True)
class Request:
    """One file of requests/."""

    digest: str  # the name of the file; equal to the digest of parts unless the file is damaged
    graph: str
    program: str  # digest
    created: str  # UTC
    parts: Mapping[str, Any]  # of the key

    @property
    def key(self) -> CacheKey:
        return CacheKey.from_json(self.parts)

    @property
    def target(self) -> str:
        return target_name(self.parts.get("target"))


def encode(request: CacheKey, program: str, graph: str) -> bytes:
    """The text of a request's file: JSON, with lines for its head, for each part, and END.

    Whoever reads thousands interprets the line it needs, and knows a part it has seen by its bytes.
    """
    head = {"schema": SCHEMA, "graph": graph, "program": program, "created": timestamp()}
    first = json.dumps(head | {"parts": {}}, separators=(",", ":")).removesuffix(END.decode())
    parts = ",\n".join(f"{json.dumps(name)}:{text}" for name, text in request.parts)
    return f"{first}\n{parts}\n".encode() + END


def lines_of(text: bytes) -> tuple[bytes, dict[str, bytes]]:
    """The head of a request's file, as the file of a request without parts, and its parts' texts.

    Raises:
        Damaged: the file is cut short.
    """
    first, *lines = text.split(b"\n")
    if not lines or lines.pop() != END:
        raise Damaged("request is cut short")
    named = (line.removesuffix(b",").partition(b'":') for line in lines if line)
    return first + END, {name[1:].decode(errors="replace"): value for name, _, value in named}


def read(path: Path) -> Request:
    """The request of a file.

    Raises:
        Unusable: it is missing, damaged, or of another version.
        CacheError: it cannot be read.
    """
    return decode(read_bytes(path), path.stem)


def decode(text: bytes, digest: str) -> Request:
    """The request of a file's text.

    Raises:
        Unusable: it is damaged, or of another version.
    """
    body = parse(text, "request")
    strings = all(isinstance(body.get(name), str) for name in ("graph", "program", "created"))
    if not (strings and is_digest(body["program"]) and isinstance(body.get("parts"), dict)):
        raise Damaged("request lacks its graph, program, time or parts")
    return Request(digest, body["graph"], body["program"], body["created"], body["parts"])


def digests(directory: Path, suffix: str = "") -> list[str]:
    """The digests in the names of a directory, sorted; none where there is no directory.

    Raises:
        CacheError: it cannot be read.
    """
    try:
        with reading(directory):
            names = os.listdir(directory)
    except Damaged:
        return []
    return sorted(
        name.removesuffix(suffix)
        for name in names
        if name.endswith(suffix) and is_digest(name.removesuffix(suffix))
    )


def target_name(part: object) -> str:
    """A target as people write it, as in cpu:8, from the part of a key."""
    if not isinstance(part, Mapping):
        return "" if part is None else str(part)
    topology = part.get("topology", "")
    if isinstance(topology, list):
        topology = "x".join(map(str, topology))
    return f"{part.get('machine', '')}:{topology}".strip(":")
