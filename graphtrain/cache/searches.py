"""Winners of searches: the strategy that a search chose for a program, by the program's key.

A strategy decides which programs are compiled and which files of rules are read. As programs, those
that another user stored are not used unless this user trusts the cache.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from typing import Any

from graphtrain.cache.authentication import EntryAuthenticator
from graphtrain.cache.key import CacheKey
from graphtrain.cache.layout import SCHEMA, StorePaths
from graphtrain.cache.programs import (
    CacheWarning,
    ForeignEntry,
    UnusableEntry,
    exists,
    read_bytes,
)
from graphtrain.cache.writing import replace_file, write_errors
from graphtrain.files import json_digest

_MAX_BYTES = 1024 * 1024
_DAMAGE = UnusableEntry, ValueError, KeyError, TypeError, AttributeError, RecursionError


def store(
    layout: StorePaths,
    authenticator: EntryAuthenticator,
    key: CacheKey,
    settings: Mapping[str, Any],
) -> None:
    """Store the settings that a search chose, replacing those of an earlier one.

    Raises:
        CacheError: the disk is full, the cache is not writable, or the secret of this user cannot
            be read or created.
    """
    content: dict[str, Any] = {"version": SCHEMA, "settings": dict(settings)}
    digest = json_digest(content)
    content |= {"digest": digest, "code": authenticator.code("search", key.digest, digest)}
    data = (json.dumps(content, indent=1) + "\n").encode()
    path = layout.search(key.digest)
    with write_errors(path, len(data)):
        replace_file(layout, path, data)


def read(
    layout: StorePaths, authenticator: EntryAuthenticator, key: CacheKey
) -> dict[str, Any] | None:
    """Return the settings that the last search chose, or None.

    Damaged ones, and those of another user, count as none, with a CacheWarning.

    Raises:
        CacheError: the secret of this user exists but cannot be used.
    """
    path = layout.search(key.digest)
    if not exists(path):
        return None
    try:
        content = json.loads(read_bytes(path, _MAX_BYTES))
        if not isinstance(content, dict):
            raise ValueError("it is not a JSON object")
        digest, code = content.pop("digest", None), content.pop("code", "")
        if digest != json_digest(content) or content["version"] != SCHEMA:
            raise ValueError("its digest or version differs")
        is_own = authenticator.is_own(str(code), "search", key.digest, digest)
        if not (is_own or authenticator.trusts_directory):
            raise ForeignEntry
        return dict(content["settings"])
    except _DAMAGE as error:
        warnings.warn(f"{path} is ignored: {error}", CacheWarning, stacklevel=3)
        return None
