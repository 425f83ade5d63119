"""Verification of all cache entries against their checksums."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from graphtrain.cache import programs, stored_requests
from graphtrain.cache.authentication import EntryAuthenticator
from graphtrain.cache.layout import StorePaths
from graphtrain.cache.programs import (
    DamagedEntry,
    ForeignEntry,
    OtherSchemaVersion,
    UnusableEntry,
    exists,
)
from graphtrain.cache.writing import quarantine

Kind = Literal["damaged", "other version", "dangling", "foreign"]


@dataclass(frozen=True)
class Problem:
    """Program or request that cannot be used."""

    path: Path
    kind: Kind  # dangling: a request without its program; foreign: not stored by this user
    reason: str
    repaired: bool


@dataclass(frozen=True)
class VerificationReport:
    """Result of a verification."""

    programs: int  # number of valid programs
    requests: int  # number of valid requests
    unreferenced_programs: tuple[
        str, ...
    ]  # valid programs that no request resolves to; still found by program key after tracing
    problems: tuple[Problem, ...]

    @property
    def valid(self) -> bool:
        """True if there are no problems, or all of them are repaired."""
        return all(problem.repaired for problem in self.problems)


def verify(
    layout: StorePaths, authenticator: EntryAuthenticator, *, repair: bool
) -> VerificationReport:
    """Check every program and request.

    Args:
        layout: paths of the cache.
        authenticator: decides which entries this user may load.
        repair: move damaged and foreign entries and dangling requests to quarantine.

    Raises:
        CacheError: the cache cannot be read.
    """
    problems: list[Problem] = []
    sound_programs: set[str] = set()
    for digest in stored_requests.list_digests(layout.programs):
        path = layout.program(digest)
        try:
            programs.check(path, digest, authenticator, contents=True)
            sound_programs.add(digest)
        except UnusableEntry as reason:
            if exists(path):  # otherwise another process has removed it
                problems.append(_problem(layout, path, _kind(reason), str(reason), repair))
    answered: list[str] = []
    for path, result in _checked_requests(layout, authenticator):
        if isinstance(result, UnusableEntry):
            problems.append(_problem(layout, path, _kind(result), str(result), repair))
        elif not exists(layout.program(result.program)):
            if _still_names(path, result.program):  # otherwise gc has just removed both
                reason = f"its program {result.program} is not stored"
                problems.append(_problem(layout, path, "dangling", reason, repair))
        else:
            answered.append(result.program)
    orphans = tuple(sorted(sound_programs.difference(answered)))
    return VerificationReport(len(sound_programs), len(answered), orphans, tuple(problems))


def _checked_requests(
    layout: StorePaths, authenticator: EntryAuthenticator
) -> Iterator[tuple[Path, stored_requests.StoredRequest | UnusableEntry]]:
    for digest in stored_requests.list_digests(layout.requests, ".json"):
        path = layout.request(digest)
        try:
            request = stored_requests.read(path)
            if request.key.digest != digest:
                raise DamagedEntry("the request's contents do not match its digest")
            if not stored_requests.may_use(authenticator, request):
                raise ForeignEntry
            yield path, request
        except UnusableEntry as reason:
            if exists(path):
                yield path, reason


def _still_names(path: Path, program: str) -> bool:
    """Return whether a request that was read a moment ago is still stored, with this program."""
    try:
        return stored_requests.read(path).program == program
    except UnusableEntry:
        return False


def _kind(reason: UnusableEntry) -> Kind:
    if isinstance(reason, ForeignEntry):
        return "foreign"
    return "other version" if isinstance(reason, OtherSchemaVersion) else "damaged"


def _problem(layout: StorePaths, path: Path, kind: Kind, reason: str, repair: bool) -> Problem:
    """Return the problem, repaired if requested; entries of other versions are never changed."""
    repaired = repair and kind != "other version" and quarantine(layout, path, reason) is not None
    return Problem(path, kind, reason, repaired)
