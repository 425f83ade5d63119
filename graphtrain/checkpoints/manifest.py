"""manifest.json of a checkpoint: size and digest of its files, verified before they are trusted.

The digest is XXH3 of 128 bits, which finds damage as surely as SHA-256 does and takes an eighth of
its time. It is no protection against an attacker, who could as well write another manifest. Earlier
versions recorded SHA-256, which is still verified.

It is written into the directory of the step before Orbax renames it, so a complete checkpoint has
one. Orbax's own notes on the directory (`UNVERIFIED`) are written after it, and are not used.
"""

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NotRequired

import xxhash
from typing_extensions import TypedDict  # pydantic refuses that of typing before Python 3.12

from graphtrain.errors import TrainingError
from graphtrain.files import atomic_write, content_digest, json_digest, validate
from sharding_rules.documents import read_object

NAME = "manifest.json"
_VERSION = 2
UNVERIFIED = (NAME, "_CHECKPOINT_METADATA", "commit_success.txt")
_THREADS = min(8, os.cpu_count() or 1)


class _File(TypedDict):
    """Entry of one file."""

    size: int
    xxh3_128: NotRequired[str]  # from version 2
    sha256: NotRequired[str]  # in version 1


class _Manifest(TypedDict):
    """Contents of a manifest without its digest."""

    version: int
    files: dict[str, _File]


class DamagedCheckpoint(TrainingError):
    """A file of a checkpoint is not as it was written.

    Args:
        checkpoint_path: Directory of the checkpoint.
        reason: The file, relative to it, and what is wrong with the file.
    """

    def __init__(self, checkpoint_path: Path, reason: str) -> None:
        super().__init__(
            f"{checkpoint_path} is damaged: {reason}; restore the file from a copy, or use another "
            "checkpoint"
        )
        self.checkpoint_path, self.reason = checkpoint_path, reason


def write_manifest(
    directory: Path, manifest: Path | None = None, names: Sequence[str] | None = None
) -> None:
    """Write the manifest of a checkpoint, or of another directory, whose files are complete.

    Args:
        directory: The directory.
        manifest: File to write; None for manifest.json in the directory.
        names: Files to record, relative to the directory; None for all.

    Raises:
        OSError: a file cannot be read, or the manifest cannot be written.
    """
    names = _file_names(directory) if names is None else names
    with ThreadPoolExecutor(_THREADS) as pool:
        entries = pool.map(lambda name: _entry(directory / name), names)
        files = dict(zip(names, entries, strict=True))
    content = {"version": _VERSION, "files": files}
    content["digest"] = json_digest(content)
    with atomic_write(manifest or directory / NAME) as file:
        file.write((json.dumps(content, indent=1) + "\n").encode())


def recorded_files(directory: Path) -> dict[str, int]:
    """Return the size of each file of a checkpoint by its name, as its manifest records them.

    Raises:
        DamagedCheckpoint: the manifest is missing or damaged.
    """
    files = _read_manifest(directory, directory / NAME)
    return {name: file["size"] for name, file in files.items()}


def recorded_digests(directory: Path) -> dict[str, dict[str, object]]:
    """Return size and digest of each file of a checkpoint by its name, as its manifest records.

    Raises:
        DamagedCheckpoint: the manifest is missing or damaged.
    """
    return {name: dict(file) for name, file in _read_manifest(directory, directory / NAME).items()}


def verify_files(
    directory: Path,
    manifest: Path | None = None,
    *,
    only: str = "",
    part: int = 0,
    parts: int = 1,
    is_wanted: Callable[[], bool] = lambda: True,
) -> None:
    """Verify size and digest of the files of a checkpoint, or of another directory.

    Args:
        directory: The directory.
        manifest: Its manifest; None for manifest.json in the directory.
        only: Hash only the files whose names begin with this.
        part: Which share of the files to hash, of `parts`. Sizes are always all verified.
        parts: Number of shares, one for each rank.
        is_wanted: Asked before each file; the rest is left out when the result is no longer wanted.

    Raises:
        DamagedCheckpoint: a file is missing or not as it was written, or there is no manifest.
    """
    files = _read_manifest(directory, manifest or directory / NAME)
    hashed = {name for name in _shares(files, parts)[part] if name.startswith(only)}

    def verify(name: str) -> None:
        if is_wanted():
            _verify_file(directory, name, files[name], name in hashed)

    with ThreadPoolExecutor(_THREADS) as pool:
        list(pool.map(verify, files))


def _read_manifest(directory: Path, path: Path) -> dict[str, _File]:
    try:
        content = read_object(path)
        digest = content.pop("digest")
        if content["version"] not in (1, _VERSION):
            raise DamagedCheckpoint(
                directory,
                f"{path.name} has version {str(content['version'])[:80]}, not 1 or {_VERSION}",
            )
        if digest != json_digest(content):
            raise DamagedCheckpoint(
                directory, f"{path.name} does not have the digest it was written by"
            )
        return validate(_Manifest, content)["files"]
    except FileNotFoundError:
        raise DamagedCheckpoint(
            directory,
            f"{path.name} is missing (removed, or the checkpoint is of an earlier version)",
        ) from None
    except (OSError, ValueError, KeyError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise DamagedCheckpoint(directory, f"{path.name} cannot be read ({reason})") from None


def _verify_file(directory: Path, name: str, entry: _File, hashed: bool) -> None:
    path = directory / name
    try:
        size = path.stat().st_size
        if size != entry["size"]:
            raise DamagedCheckpoint(
                directory, f"{name} has {size} bytes instead of {entry['size']}"
            )
        if hashed and not _has_content(path, entry):
            raise DamagedCheckpoint(
                directory, f"{name} does not have the digest it was written with"
            )
    except OSError as error:
        raise DamagedCheckpoint(directory, f"{name} cannot be read ({error.strerror})") from None


def _shares(files: dict[str, _File], parts: int) -> Sequence[set[str]]:
    """Divide files among ranks so that each hashes about as many bytes: largest first."""
    shares: list[set[str]] = [set() for _ in range(parts)]
    loads = [0] * parts
    for name in sorted(files, key=lambda name: (-files[name]["size"], name)):
        least = loads.index(min(loads))
        shares[least].add(name)
        loads[least] += files[name]["size"]
    return shares


def _file_names(directory: Path) -> list[str]:
    paths = (path for path in directory.rglob("*") if path.is_file())
    names = (path.relative_to(directory).as_posix() for path in paths)
    return sorted(name for name in names if name not in UNVERIFIED)


def _entry(path: Path) -> _File:
    return {"size": path.stat().st_size, "xxh3_128": _fast_digest(path)}


def _has_content(path: Path, entry: _File) -> bool:
    """Return whether the content of a file has the digest of its entry; without one, False."""
    if "xxh3_128" in entry:
        return _fast_digest(path) == entry["xxh3_128"]
    return "sha256" in entry and content_digest(path) == entry["sha256"]


def is_intact(content: bytes, entry: Mapping[str, object]) -> bool:
    """Return whether the content of a file has the size and the XXH3 digest of its entry."""
    is_complete = len(content) == entry["size"]
    return is_complete and xxhash.xxh3_128_hexdigest(content) == entry.get("xxh3_128")


def _fast_digest(path: Path) -> str:
    """Return the XXH3 digest of the content of a file.

    Source: https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md
    """
    with path.open("rb", buffering=0) as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()
