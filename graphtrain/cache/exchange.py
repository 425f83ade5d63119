"""Push and pull of signed programs to and from a remote cache; interrupted transfers resume.

`signed_objects` says which objects a program has there, and in which order they are written.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from graphtrain.cache.remote import ObjectStore
from graphtrain.cache.signed_objects import (
    list_digests,
    read_program,
    read_request,
    send_program,
    send_request,
)
from graphtrain.cache.store import Cache
from graphtrain.cache.store_errors import UnusableObject
from graphtrain.cache.trust import KeyStore, UnknownSigner, UntrustedError, default_directory
from graphtrain.errors import CacheError

_CONCURRENT_TRANSFERS = 8  # concurrent transfers
T = TypeVar("T")
ProgressCallback = Callable[
    [int, int], None
]  # called with the numbers of finished and of all programs and requests


@dataclass
class TransferResult:
    """Result of a push or pull."""

    programs: list[str] = field(default_factory=list)  # digests
    requests: list[str] = field(default_factory=list)  # digests
    rejected: list[str] = field(
        default_factory=list
    )  # reasons of the programs and requests that were not transferred
    missing: list[str] = field(default_factory=list)  # requests missing from the remote cache
    replaced: list[str] = field(
        default_factory=list
    )  # why a pull would have refused what the remote cache had; it was sent again
    nbytes: int = 0  # transferred bytes of records and payloads


@dataclass(frozen=True)
class RemoteListing:
    """Digests in a remote cache; one listing can serve a push and a pull that follow each other."""

    requests: frozenset[str]
    programs: frozenset[str]

    @classmethod
    def of(cls, remote: ObjectStore) -> RemoteListing:
        """List a remote cache.

        Raises:
            CacheError: it cannot be listed.
        """
        with ThreadPoolExecutor(2) as pool:
            return cls(*pool.map(partial(list_digests, remote), ("requests", "programs")))


def push(
    cache: Cache,
    remote: ObjectStore,
    keys: KeyStore,
    requests: Iterable[str] | None = None,
    observe: ProgressCallback = lambda finished, total: None,
    listing: RemoteListing | None = None,
    *,
    verify: bool = False,
) -> TransferResult:
    """Upload programs and requests that the remote cache lacks; skip damaged ones as refused.

    Args:
        cache: local cache.
        remote: remote cache.
        keys: signing key.
        requests: digests of requests; None for all.
        observe: called after each transfer.
        listing: contents of the remote cache, if known.
        verify: read what the remote cache has already, and send again what a pull would refuse.

    Raises:
        CacheError: there is no signing key, or the remote cache is not writable.
    """
    keys.own_public_key()
    program_by_request = cache.stored_programs(requests)
    remote_listing = listing or RemoteListing.of(remote)
    result = TransferResult()
    if verify:
        remote_listing = _accepted(cache, remote, keys, program_by_request, remote_listing, result)
    programs = sorted({*program_by_request.values()} - remote_listing.programs)
    requests = sorted({*program_by_request} - remote_listing.requests)
    transfers = _Transfers(len(programs) + len(requests), observe)

    def push_program(digest: str) -> None:
        files = _read_or_reject(result, cache.program_files, digest)
        if files:
            send_program(remote, keys, digest, *files)
            result.programs.append(digest)
            result.nbytes += sum(map(len, files))

    def push_request(digest: str) -> None:
        text = _read_or_reject(result, cache.request_file, digest)
        if text and (
            program_by_request[digest] in remote_listing.programs
            or program_by_request[digest] in sent
        ):
            send_request(remote, keys, digest, text)
            result.requests.append(digest)

    transfers.run(push_program, programs)
    sent = frozenset(result.programs)
    transfers.run(push_request, requests)
    return result


def pull(
    cache: Cache,
    remote: ObjectStore,
    keys: KeyStore,
    requests: Iterable[str] | None = None,
    observe: ProgressCallback = lambda finished, total: None,
    listed: RemoteListing | None = None,
) -> TransferResult:
    """Download programs and requests that the local cache lacks.

    Anything not signed by a trusted key is refused and never parsed.

    Args:
        cache: local cache.
        remote: remote cache.
        keys: trusted public keys.
        requests: digests of requests; None for all that the remote cache lists.
        observe: called after each program.
        listed: contents of the remote cache, if known.

    Raises:
        CacheError: the remote cache cannot be read, or the local cache is not writable.
    """
    requests = requests if requests is None else set(requests)
    if requests is None:
        request_digests = listed.requests if listed else list_digests(remote, "requests")
    else:
        request_digests = requests
    missing = sorted(request_digests - set(cache.stored_programs(requests)))
    result = TransferResult()
    texts: dict[str, bytes] = {}
    programs: dict[str, str] = {}  # program digest by request digest

    def fetch_request(digest: str) -> None:
        with _record_rejections(result):
            text = read_request(cache, remote, keys, digest)
            if text is None:
                result.missing.append(digest)
                return
            programs[digest], texts[digest] = cache.program_of_request_file(text, digest), text

    def fetch_program(digest: str) -> None:
        with _record_rejections(result):
            _fetch_program(cache, remote, keys, digest, result)

    def import_request(digest: str) -> None:
        if cache.contains_program(programs[digest]):  # otherwise the program was refused
            cache.import_request(digest, texts[digest])
            result.requests.append(digest)

    _Transfers(len(missing), lambda *_: None).run(fetch_request, missing)
    absent = sorted(
        {program for program in programs.values() if not cache.contains_program(program)}
    )
    _Transfers(len(absent), observe).run(fetch_program, absent)
    for digest in sorted(texts):
        import_request(digest)
    return result


def pull_from_shared_cache(
    cache: Cache, requests: Iterable[str], log: Callable[[str], None]
) -> None:
    """Download missing programs from the remote cache $GRAPHTRAIN_SHARED_CACHE, if it is set.

    Args:
        cache: local cache.
        requests: digests of the requests needed.
        log: called with each log line.

    Raises:
        CacheError: the remote cache cannot be read.
    """
    url = os.environ.get("GRAPHTRAIN_SHARED_CACHE")
    missing = sorted(set(requests) - set(cache.stored_programs(requests))) if url else []
    if not url or not missing:
        return
    result = pull(cache, ObjectStore(url, create=False), KeyStore(default_directory()), missing)
    for reason in result.rejected:
        log(f"refused: {reason}")
    if result.requests:
        log(f"fetched {len(result.requests)} programs from {url}")


def _accepted(
    cache: Cache,
    remote: ObjectStore,
    keys: KeyStore,
    program_by_request: Mapping[str, str],
    listing: RemoteListing,
    result: TransferResult,
) -> RemoteListing:
    """Return a listing without what a pull would refuse, of what the local cache has.

    Objects that only an unknown key signed are left to its owner.
    """
    refused: set[str] = set()

    def check(digest: str, read: Callable[[str], object]) -> None:
        try:
            read(digest)
        except UnknownSigner:
            return
        except (UntrustedError, UnusableObject) as error:
            refused.add(digest)
            result.replaced.append(str(error))

    def find_request(digest: str) -> None:
        text = read_request(cache, remote, keys, digest)
        if text is None:
            raise UntrustedError(f"{remote.url}: request {digest} is missing")

    def find_program(digest: str) -> None:
        read_program(remote, keys, digest)

    programs = sorted(listing.programs & {*program_by_request.values()})
    requests = sorted(listing.requests & {*program_by_request})
    quiet = _Transfers(0, lambda *_: None)
    quiet.run(partial(check, read=find_program), programs)
    quiet.run(partial(check, read=find_request), requests)
    return RemoteListing(listing.requests - refused, listing.programs - refused)


def _fetch_program(
    cache: Cache, remote: ObjectStore, keys: KeyStore, digest: str, result: TransferResult
) -> None:
    record, payload = read_program(remote, keys, digest)
    cache.import_program(digest, record, payload)
    result.programs.append(digest)
    result.nbytes += len(record) + len(payload)


@contextmanager
def _record_rejections(result: TransferResult) -> Iterator[None]:
    """Record a refusal, so that the other transfers continue."""
    try:
        yield
    except (UntrustedError, UnusableObject) as error:
        result.rejected.append(str(error))


def _read_or_reject(result: TransferResult, read: Callable[[str], T], digest: str) -> T | None:
    """Read a local entry to upload; record a refusal and return None if it is damaged."""
    try:
        return read(digest)
    except CacheError as error:
        result.rejected.append(str(error))
        return None


class _Transfers:
    """Concurrent transfers with a progress count; the first error cancels those not started."""

    def __init__(self, total: int, observe: ProgressCallback) -> None:
        self._total, self._observe, self._done = total, observe, 0

    def run(self, action: Callable[[str], None], digests: list[str]) -> None:
        with ThreadPoolExecutor(_CONCURRENT_TRANSFERS) as pool:
            futures = [pool.submit(action, digest) for digest in digests]
            try:
                for future in as_completed(futures):
                    future.result()
                    self._done += 1
                    self._observe(self._done, self._total)
            finally:
                pool.shutdown(cancel_futures=True)
