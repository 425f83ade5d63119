"""Layout: where everything in a store lies."""

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from graphtrain.cache.key import DIGEST_LENGTH, CacheKey
from graphtrain.errors import CacheError

LAYOUT = "v1"  # raise it when the layout changes: old entries are then ignored, not misread
SCHEMA = 1  # of the JSON files

_DIGEST = re.compile(rf"[0-9a-f]{{{DIGEST_LENGTH}}}")


@dataclass(frozen=True)
class Layout:
    """The paths of a store; every digest is checked on its way into one."""

    root: Path  # the store's, without the version

    @cached_property
    def base(self) -> Path:
        return self.root / LAYOUT

    @cached_property
    def programs(self) -> Path:
        return self.base / "programs"

    @cached_property
    def requests(self) -> Path:
        return self.base / "requests"

    @cached_property
    def leases(self) -> Path:
        return self.base / "leases"

    @cached_property
    def quarantine(self) -> Path:
        return self.base / "quarantine"

    @cached_property
    def failures(self) -> Path:
        return self.base / "failures"

    @cached_property
    def bundles(self) -> Path:
        return self.base / "bundles"

    @cached_property
    def pins(self) -> Path:
        return self.base / "pins"

    @cached_property
    def temporary(self) -> Path:
        return self.base / "tmp"

    def program(self, digest: str) -> Path:
        return self.programs / checked(digest)

    def request(self, digest: str) -> Path:
        return self.requests / f"{checked(digest)}.json"

    def lease(self, digest: str) -> Path:
        return self.leases / checked(digest)


def digest_of(key: CacheKey | str) -> str:
    """The digest of a key, or a digest itself, checked.

    Raises:
        CacheError: a string that is not a digest.
    """
    return key.digest if isinstance(key, CacheKey) else checked(key)


def is_digest(text: object) -> bool:
    return isinstance(text, str) and _DIGEST.fullmatch(text) is not None


def checked(digest: str) -> str:
    """digest itself.

    Raises:
        CacheError: it is not a digest, and as a path could lead out of the store.
    """
    if not is_digest(digest):
        raise CacheError(f"{digest!r} is not a digest: expected {DIGEST_LENGTH} of 0-9 and a-f")
    return digest
