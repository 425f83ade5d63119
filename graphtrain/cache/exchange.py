"""Push and pull of signed programs to and from a remote cache; interrupted transfers resume.

Objects of a program are written in the order payload, signature, record, and its request last, so
a request is visible only when its program is complete. Payload and signature are named by the
digest of their record: if several hosts push one program at once, the last record wins and stays
consistent. Signatures are verified before any byte of a download is parsed, and sizes before it is
read. Object stores list a thousand names per page, so the two kinds that are listed have prefixes
of their own:

    v1/requests/<digest>.json
    v1/programs/<digest>.json (the record)
    v1/payloads/<sha256 of the record>
    v1/signatures/<sha256 of the record or the request>
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from graphtrain.cache.layout import LAYOUT, is_digest
from graphtrain.cache.programs import (
    MAX_JSON_BYTES,
    UnusableEntry,
    check_imported,
    decode_record,
)
from graphtrain.cache.remote import ObjectStore, UnusableObject
from graphtrain.cache.store import Cache
from graphtrain.cache.trust import (
    MAX_ENVELOPE_BYTES,
    KeyStore,
    UnknownSigner,
    UntrustedError,
    default_directory,
)
from graphtrain.errors import CacheError

_CONCURRENT_TRANSFERS = 8  # concurrent transfers
_MAX_REQUEST_BYTES = 16 * 1024 * 1024  # a request has a few hundred kilobytes
_MAX_RECORD_BYTES = MAX_JSON_BYTES
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
            return cls(*pool.map(partial(_digests, remote), ("requests", "programs")))


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

    def send_program(digest: str) -> None:
        files = _read_or_reject(result, cache.program_files, digest)
        if files:
            _send_program(remote, keys, digest, *files)
            result.programs.append(digest)
            result.nbytes += sum(map(len, files))

    def send_request(digest: str) -> None:
        text = _read_or_reject(result, cache.request_file, digest)
        if text and (
            program_by_request[digest] in remote_listing.programs
            or program_by_request[digest] in sent
        ):
            remote.put(_signature_name(text), keys.sign(_request_statement(digest, text)))
            remote.put(_request_name(digest), text)
            result.requests.append(digest)

    transfers.run(send_program, programs)
    sent = frozenset(result.programs)
    transfers.run(send_request, requests)
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
        request_digests = listed.requests if listed else _digests(remote, "requests")
    else:
        request_digests = requests
    missing = sorted(request_digests - set(cache.stored_programs(requests)))
    result = TransferResult()
    texts: dict[str, bytes] = {}
    programs: dict[str, str] = {}  # program digest by request digest

    def fetch_request(digest: str) -> None:
        with _record_rejections(result):
            text = _read_request(cache, remote, keys, digest)
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

    def read_request(digest: str) -> None:
        text = _read_request(cache, remote, keys, digest)
        if text is None:
            raise UntrustedError(f"{remote.url}: request {digest} is missing")

    def read_program(digest: str) -> None:
        _read_program(remote, keys, digest)

    programs = sorted(listing.programs & {*program_by_request.values()})
    requests = sorted(listing.requests & {*program_by_request})
    quiet = _Transfers(0, lambda *_: None)
    quiet.run(partial(check, read=read_program), programs)
    quiet.run(partial(check, read=read_request), requests)
    return RemoteListing(listing.requests - refused, listing.programs - refused)


def _send_program(
    remote: ObjectStore, keys: KeyStore, digest: str, record: bytes, payload: bytes
) -> None:
    remote.put(_payload_name(record), payload)
    remote.put(_signature_name(record), keys.sign(_program_statement(digest, record, payload)))
    remote.put(_record_name(digest), record)


def _read_request(cache: Cache, remote: ObjectStore, keys: KeyStore, digest: str) -> bytes | None:
    """Return the file of a request, after verifying it; None if the remote cache lacks it."""
    text = remote.get(_request_name(digest), _MAX_REQUEST_BYTES)
    if text is None:
        return None
    label = f"{remote.url}: request {digest}"
    keys.verify(_envelope(remote, text, label), _request_statement(digest, text), label)
    cache.program_of_request_file(text, digest)
    return text


def _read_program(remote: ObjectStore, keys: KeyStore, digest: str) -> tuple[bytes, bytes]:
    """Return record and payload of a program, after verifying them."""
    label = f"{remote.url}: program {digest}"
    record = remote.get(_record_name(digest), _MAX_RECORD_BYTES)
    if record is None:
        raise UntrustedError(f"{label}: its record or payload is missing; push it again")
    signer, statement = keys.signed_statement(_envelope(remote, record, label), label)
    payload = remote.get(_payload_name(record), _payload_bytes(statement, record, digest, label))
    if payload is None:
        raise UntrustedError(f"{label}: its record or payload is missing; push it again")
    if statement != _program_statement(digest, record, payload):
        raise _tampered(label, signer)
    try:
        check_imported(record, payload, digest)
    except UnusableEntry as error:
        raise UntrustedError(f"{label}: {error}") from error
    return record, payload


def _fetch_program(
    cache: Cache, remote: ObjectStore, keys: KeyStore, digest: str, result: TransferResult
) -> None:
    record, payload = _read_program(remote, keys, digest)
    cache.import_program(digest, record, payload)
    result.programs.append(digest)
    result.nbytes += len(record) + len(payload)


def _payload_bytes(statement: object, record: bytes, digest: str, label: str) -> int:
    """Return the size of the payload according to a record, after checking that it was signed.

    Raises:
        UntrustedError: the signed statement is for another record, or the record is not valid.
    """
    signed = statement if isinstance(statement, dict) else {}
    if (signed.get("program"), signed.get("record")) != (digest, _sha256(record)):
        raise UntrustedError(f"{label}: its signature is for other contents; it was tampered with")
    try:
        return decode_record(record, digest)["payload"]["bytes"]
    except UnusableEntry as error:
        raise UntrustedError(f"{label}: {error}") from error


def _tampered(label: str, signer: str) -> UntrustedError:
    return UntrustedError(
        f"{label}: the signature of key {signer!r} is for other contents; it was tampered with"
    )


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


def _envelope(remote: ObjectStore, signed: bytes, label: str) -> bytes:
    envelope = remote.get(_signature_name(signed), MAX_ENVELOPE_BYTES)
    if envelope is None:
        raise UntrustedError(f"{label}: it has no signature")
    return envelope


def _request_name(digest: str) -> str:
    return f"{LAYOUT}/requests/{digest}.json"


def _record_name(digest: str) -> str:
    return f"{LAYOUT}/programs/{digest}.json"


def _payload_name(record: bytes) -> str:
    return f"{LAYOUT}/payloads/{_sha256(record)}"


def _signature_name(signed: bytes) -> str:
    return f"{LAYOUT}/signatures/{_sha256(signed)}"


def _program_statement(digest: str, record: bytes, payload: bytes) -> dict[str, str]:
    return {"program": digest, "record": _sha256(record), "payload": _sha256(payload)}


def _request_statement(digest: str, text: bytes) -> dict[str, str]:
    return {"request": digest, "file": _sha256(text)}


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _digests(remote: ObjectStore, kind: str) -> frozenset[str]:
    """Return the digests that the remote cache lists under a prefix; ignore other names."""
    prefix = f"{LAYOUT}/{kind}/"
    names = (name.removeprefix(prefix) for name in remote.names(prefix) if name.endswith(".json"))
    return frozenset(filter(is_digest, (name.removesuffix(".json") for name in names)))


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
