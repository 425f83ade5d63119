"""Layout: the paths inside a cache directory."""

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from graphtrain.cache.key import DIGEST_LENGTH, CacheKey
from graphtrain.errors import CacheError

LAYOUT = "v1"  # increment it when the layout changes: old entries are then ignored, not misread
SCHEMA = 1  # version of the JSON files

_DIGEST = re.compile(rf"[0-9a-f]{{{DIGEST_LENGTH}}}")


@dataclass(frozen=True)
class StorePaths:
    """Paths of a cache directory; every digest is validated before it becomes part of a path."""

    root: Path  # cache directory, without the layout version

    @cached_property
    def versioned_root(self) -> Path:
        return self.root / LAYOUT

    @cached_property
    def programs(self) -> Path:
        return self.versioned_root / "programs"

    @cached_property
    def requests(self) -> Path:
        return self.versioned_root / "requests"

    @cached_property
    def leases(self) -> Path:
        return self.versioned_root / "leases"

    @cached_property
    def quarantine(self) -> Path:
        return self.versioned_root / "quarantine"

    @cached_property
    def failures(self) -> Path:
        return self.versioned_root / "failures"

    @cached_property
    def bundles(self) -> Path:
        return self.versioned_root / "bundles"

    @cached_property
    def pins(self) -> Path:
        return self.versioned_root / "pins"

    @cached_property
    def searches(self) -> Path:
        return self.versioned_root / "searches"

    @cached_property
    def temporary(self) -> Path:
        return self.versioned_root / "tmp"

    def program(self, digest: str) -> Path:
        return self.programs / validate_digest(digest)

    def request(self, digest: str) -> Path:
        return self.requests / f"{validate_digest(digest)}.json"

    def search(self, digest: str) -> Path:
        return self.searches / f"{validate_digest(digest)}.json"

    def lease(self, digest: str) -> Path:
        return self.leases / validate_digest(digest)


def digest_of(key: CacheKey | str) -> str:
    """Return the digest of a key; return a digest unchanged after validating it.

    Raises:
        CacheError: the string is not a digest.
    """
    return key.digest if isinstance(key, CacheKey) else validate_digest(key)


def is_digest(text: object) -> bool:
    """Return whether `text` is a string with the form of a digest."""
    return isinstance(text, str) and _DIGEST.fullmatch(text) is not None


def validate_digest(digest: str) -> str:
    """Return `digest` after validating it, so that it cannot form a path outside the cache.

    Raises:
        CacheError: it is not a digest.
    """
    if not is_digest(digest):
        raise CacheError(
            f"{digest!r} is not a digest: expected {DIGEST_LENGTH} characters from 0-9 and a-f"
        )
    return digest
