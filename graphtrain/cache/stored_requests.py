"""Stored requests: the request key, and the program that it resolves to."""

import getpass
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from graphtrain.cache.authentication import EntryAuthenticator
from graphtrain.cache.key import CacheKey
from graphtrain.cache.layout import SCHEMA, is_digest
from graphtrain.cache.programs import DamagedEntry, parse, read_bytes, read_errors, timestamp

LAST_LINE = b"}}"  # last line of a request file


@dataclass(frozen=True)
class Origin:
    """Who asked for a program first, and for what. It is only shown, and is no part of a key."""

    configuration: str = ""  # as its user named it: a path, or a script
    user: str = ""  # name@host


def current_user() -> str:
    """Return this user and host, as in alice@host; the number of a user without a name."""
    try:
        name = getpass.getuser()
    except (KeyError, OSError):  # a container's user need not have a name
        name = str(os.getuid())
    return f"{name}@{os.uname().nodename}"


@dataclass(frozen=True)
class StoredRequest:
    """Contents of one file in requests/."""

    digest: str  # file name; equals the digest of `parts` unless the file is damaged
    graph: str
    program: str  # digest
    created: str  # UTC
    parts: Mapping[str, Any]  # named parts of the request key
    code: str  # message authentication code of the user who stored it; may be empty
    origin: "Origin"

    @property
    def key(self) -> CacheKey:
        """The request key.

        Raises:
            DamagedEntry: the parts are JSON that no key contains, for example NaN.
        """
        try:
            return CacheKey.from_json(self.parts)
        except (TypeError, RecursionError) as error:
            raise DamagedEntry("request has no valid parts") from error

    @property
    def target(self) -> str:
        return target_name(self.parts.get("target"))


def encode(
    request: CacheKey, program: str, graph: str, code: str = "", origin: Origin | None = None
) -> bytes:
    """Return the contents of a request file: JSON with one line for the head and for each part.

    A reader of thousands of files can thus parse only the lines it needs, and compare equal parts
    by their bytes. The last line is LAST_LINE.
    """
    head: dict[str, Any] = {
        "schema": SCHEMA,
        "graph": graph,
        "program": program,
        "created": timestamp(),
    }
    head["code"] = code
    head |= {name: text for name, text in vars(origin or Origin()).items() if text}
    first = json.dumps(head | {"parts": {}}, separators=(",", ":")).removesuffix(LAST_LINE.decode())
    parts = ",\n".join(f"{json.dumps(name)}:{text}" for name, text in request.parts)
    return f"{first}\n{parts}\n".encode() + LAST_LINE


def authenticate(authenticator: EntryAuthenticator, request: str, program: str) -> str:
    """Return the code of a request, by digest, that resolves to this program.

    Raises:
        CacheError: the secret of this user cannot be read or created.
    """
    return authenticator.code("request", request, program)


class AuthenticatedRequest(Protocol):
    """The fields of a stored request, or of its summary, that its code covers."""

    @property
    def digest(self) -> str: ...
    @property
    def program(self) -> str: ...
    @property
    def code(self) -> str: ...


def may_use(authenticator: EntryAuthenticator, request: AuthenticatedRequest) -> bool:
    """Return whether this user stored the request, or trusts the cache."""
    own = authenticator.is_own(request.code, "request", request.digest, request.program)
    return own or authenticator.trusts_directory


def split_parts(text: bytes) -> tuple[bytes, dict[str, bytes]]:
    """Split a request file into its head, as JSON of a request without parts, and its parts.

    Returns:
        The head, and the JSON text of each part by name.

    Raises:
        DamagedEntry: the file is truncated.
    """
    first, *lines = text.split(b"\n")
    if not lines or lines.pop() != LAST_LINE:
        raise DamagedEntry("request is truncated")
    named = (line.removesuffix(b",").partition(b'":') for line in lines if line)
    return first + LAST_LINE, {name[1:].decode(errors="replace"): value for name, _, value in named}


def read(path: Path) -> StoredRequest:
    """Read a request file.

    Raises:
        UnusableEntry: the file is missing, damaged, or of another version.
        CacheError: the file cannot be read.
    """
    return decode(read_bytes(path), path.stem)


def read_asked(path: Path, request: CacheKey) -> StoredRequest:
    """Read the file of a request, and verify that it contains this request.

    Raises:
        UnusableEntry: the file is missing, damaged, or of another version.
        CacheError: the file cannot be read.
    """
    stored = read(path)
    if stored.key != request:
        raise DamagedEntry("the request's contents do not match its digest")
    return stored


def decode(text: bytes, digest: str) -> StoredRequest:
    """Parse the contents of a request file.

    Raises:
        UnusableEntry: the contents are damaged, or of another version.
    """
    body = parse(text, "request")
    strings = all(isinstance(body.get(name), str) for name in ("graph", "program", "created"))
    if not (strings and is_digest(body["program"]) and isinstance(body.get("parts"), dict)):
        raise DamagedEntry("request has no valid graph, program, created or parts")
    return StoredRequest(
        digest,
        body["graph"],
        body["program"],
        body["created"],
        body["parts"],
        _string(body, "code"),
        Origin(_string(body, "configuration"), _string(body, "user")),
    )


def _string(body: Mapping[str, Any], name: str) -> str:
    """Return a string that requests of earlier versions lack; then it is empty."""
    value = body.get(name)
    return value if isinstance(value, str) else ""


def list_digests(directory: Path, suffix: str = "") -> list[str]:
    """Return the digests among a directory's file names, sorted; empty if it does not exist.

    Raises:
        CacheError: the directory cannot be read.
    """
    try:
        with read_errors(directory):
            names = os.listdir(directory)
    except DamagedEntry:
        return []
    return sorted(
        name.removesuffix(suffix)
        for name in names
        if name.endswith(suffix) and is_digest(name.removesuffix(suffix))
    )


def target_name(part: object) -> str:
    """Return the target in user notation, for example cpu:8, from the target part of a key."""
    if not isinstance(part, Mapping):
        return "" if part is None else str(part)
    topology = part.get("topology", "")
    if isinstance(topology, list):
        topology = "x".join(map(str, topology))
    return f"{part.get('machine', '')}:{topology}".strip(":")
