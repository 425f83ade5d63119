"""Bundles: compiler inputs stored with their keys, to be compiled on another machine."""

import json
from collections.abc import Mapping
from pathlib import Path

from graphtrain.cache.failures import directory_name, store_files
from graphtrain.cache.key import CacheKey
from graphtrain.cache.layout import StorePaths
from graphtrain.errors import CacheError
from sharding_rules.documents import parse_object

KEYS_FILE = "keys.json"


def store(
    layout: StorePaths, key: CacheKey, request: CacheKey, name: str, files: Mapping[str, bytes]
) -> Path:
    """Write a bundle, replacing an older one of the same program; return its directory."""
    keys = {"program": key.to_json(), "request": request.to_json()}
    path = layout.bundles / directory_name(name, key.digest)
    written = {**files, KEYS_FILE: (json.dumps(keys) + "\n").encode()}
    return store_files(layout, path, written)


def read(directory: Path) -> tuple[CacheKey, CacheKey, dict[str, bytes]]:
    """Return the program key, the request key and the files by name of a bundle.

    Raises:
        CacheError: the directory is not a bundle.
    """
    if not (directory / KEYS_FILE).is_file():
        reason = f"it has no {KEYS_FILE}" if directory.is_dir() else "no such directory"
        raise CacheError(f"not a bundle: {reason}; graphtrain compile prints the paths of bundles")
    try:
        files = {each.name: each.read_bytes() for each in directory.glob("*") if each.is_file()}
        keys = parse_object(files.pop(KEYS_FILE))
        program, request = (CacheKey.from_json(keys[name]) for name in ("program", "request"))
    except (OSError, KeyError, ValueError, TypeError) as error:
        raise CacheError(
            f"not a bundle: {KEYS_FILE} is damaged ({error}); copy the bundle again"
        ) from None
    return program, request, files
