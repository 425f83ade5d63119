"""Winners of searches: the strategy that a search chose for a program, by the program's key."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from typing import Any

from graphtrain.cache.key import CacheKey
from graphtrain.cache.layout import SCHEMA, StorePaths
from graphtrain.cache.programs import CacheWarning, UnusableEntry, exists, read_bytes
from graphtrain.cache.writing import replace_file, write_errors
from graphtrain.files import json_digest

_MAX_BYTES = 1024 * 1024
_DAMAGE = UnusableEntry, ValueError, KeyError, TypeError, AttributeError, RecursionError


def store(layout: StorePaths, key: CacheKey, settings: Mapping[str, Any]) -> None:
    """Store the settings that a search chose, replacing those of an earlier one.

    Raises:
        CacheError: the disk is full, or the cache is not writable.
    """
    content: dict[str, Any] = {"version": SCHEMA, "settings": dict(settings)}
    content["digest"] = json_digest(content)
    data = (json.dumps(content, indent=1) + "\n").encode()
    path = layout.search(key.digest)
    with write_errors(path, len(data)):
        replace_file(layout, path, data)


def read(layout: StorePaths, key: CacheKey) -> dict[str, Any] | None:
    """Return the settings that the last search chose, or None; damaged ones count as none."""
    path = layout.search(key.digest)
    if not exists(path):
        return None
    try:
        content = json.loads(read_bytes(path, _MAX_BYTES))
        digest = content.pop("digest", None)
        if digest != json_digest(content) or content["version"] != SCHEMA:
            raise ValueError("its digest or version differs")
        return dict(content["settings"])
    except _DAMAGE as error:
        warnings.warn(f"{path} is ignored: {error}", CacheWarning, stacklevel=3)
        return None
