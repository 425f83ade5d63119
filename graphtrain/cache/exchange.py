"""Push and pull of signed programs to and from a remote cache; interrupted transfers resume.

Objects of a program are written in the order payload, signature, record, and its request last, so
a request is visible only when its program is complete. Payload and signature are named by the
digest of their record: if several hosts push one program at once, the last record wins and stays
consistent. Signatures are verified before any byte of a download is parsed. Object stores list a
thousand names per page, so the two kinds that are listed have prefixes of their own:

    v1/requests/<digest>.json
    v1/programs/<digest>.json (the record)
    v1/payloads/<sha256 of the record>
    v1/signatures/<sha256 of the record or the request>
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from graphtrain.cache.layout import LAYOUT, is_digest
from graphtrain.cache.remote import Remote
from graphtrain.cache.store import Cache
from graphtrain.cache.trust import Keys, Refused, default_directory
from graphtrain.errors import CacheError

_AT_ONCE = 8  # concurrent transfers
T = TypeVar("T")
Observer = Callable[
    [int, int], None
]  # called with the numbers of finished and of all programs and requests


@dataclass
class Exchanged:
    """Result of a push or pull."""

    programs: list[str] = field(default_factory=list)  # digests
    requests: list[str] = field(default_factory=list)  # digests
    refused: list[str] = field(
        default_factory=list
    )  # reasons of the programs and requests that were not transferred
    absent: list[str] = field(default_factory=list)  # requests missing from the remote cache
    nbytes: int = 0  # transferred bytes of records and payloads


@dataclass(frozen=True)
class Listed:
    """Digests in a remote cache; one listing can serve a push and a pull that follow each other."""

    requests: frozenset[str]
    programs: frozenset[str]

    @classmethod
    def of(cls, remote: Remote) -> Listed:
        """List a remote cache.

        Raises:
            CacheError: it cannot be listed.
        """
        with ThreadPoolExecutor(2) as pool:
            return cls(*pool.map(partial(_digests, remote), ("requests", "programs")))


def push(
    cache: Cache,
    remote: Remote,
    keys: Keys,
    chosen: Iterable[str] | None = None,
    observe: Observer = lambda done, whole: None,
    listed: Listed | None = None,
) -> Exchanged:
    """Upload programs and requests that the remote cache lacks; skip damaged ones as refused.

    Args:
        cache: local cache.
        remote: remote cache.
        keys: signing key.
        chosen: digests of requests; None for all.
        observe: called after each transfer.
        listed: contents of the remote cache, if known.

    Raises:
        CacheError: there is no signing key, or the remote cache is not writable.
    """
    keys.own()
    answers = cache.answers(chosen)
    there = listed or Listed.of(remote)
    done = Exchanged()
    programs = sorted({*answers.values()} - there.programs)
    requests = sorted({*answers} - there.requests)
    steps = _Steps(len(programs) + len(requests), observe)

    def send_program(digest: str) -> None:
        files = _readable(done, cache.files, digest)
        if files:
            _send_program(remote, keys, digest, *files)
            done.programs.append(digest)
            done.nbytes += sum(map(len, files))

    def send_request(digest: str) -> None:
        text = _readable(done, cache.request_file, digest)
        if text and (answers[digest] in there.programs or answers[digest] in sent):
            remote.put(_signature(text), keys.sign(_of_request(digest, text)))
            remote.put(_request(digest), text)
            done.requests.append(digest)

    steps.run(send_program, programs)
    sent = frozenset(done.programs)
    steps.run(send_request, requests)
    return done


def pull(
    cache: Cache,
    remote: Remote,
    keys: Keys,
    chosen: Iterable[str] | None = None,
    observe: Observer = lambda done, whole: None,
    listed: Listed | None = None,
) -> Exchanged:
    """Download programs and requests that the local cache lacks.

    Anything not signed by a trusted key is refused and never parsed.

    Args:
        cache: local cache.
        remote: remote cache.
        keys: trusted public keys.
        chosen: digests of requests; None for all that the remote cache lists.
        observe: called after each program.
        listed: contents of the remote cache, if known.

    Raises:
        CacheError: the remote cache cannot be read, or the local cache is not writable.
    """
    chosen = chosen if chosen is None else set(chosen)
    if chosen is None:
        wanted = listed.requests if listed else _digests(remote, "requests")
    else:
        wanted = chosen
    missing = sorted(wanted - set(cache.answers(chosen)))
    done = Exchanged()
    texts: dict[str, bytes] = {}
    programs: dict[str, str] = {}  # program digest by request digest

    def ask(digest: str) -> None:
        with _refusals(done):
            text = remote.get(_request(digest))
            if text is None:
                done.absent.append(digest)
                return
            what = f"{remote.url}: request {digest}"
            keys.check(_envelope(remote, text, what), _of_request(digest, text), what)
            programs[digest], texts[digest] = cache.program_in(text, digest), text

    def fetch(digest: str) -> None:
        with _refusals(done):
            _fetch_program(cache, remote, keys, digest, done)

    def keep(digest: str) -> None:
        if cache.holds(programs[digest]):  # otherwise the program was refused
            cache.adopt_request(digest, texts[digest])
            done.requests.append(digest)

    _Steps(len(missing), lambda *_: None).run(ask, missing)
    absent = sorted({program for program in programs.values() if not cache.holds(program)})
    _Steps(len(absent), observe).run(fetch, absent)
    for digest in sorted(texts):
        keep(digest)
    return done


def pull_shared(cache: Cache, requests: Iterable[str], say: Callable[[str], None]) -> None:
    """Download missing programs from the remote cache $GRAPHTRAIN_SHARED_CACHE, if it is set.

    Args:
        cache: local cache.
        requests: digests of the requests needed.
        say: called with each log line.

    Raises:
        CacheError: the remote cache cannot be read.
    """
    url = os.environ.get("GRAPHTRAIN_SHARED_CACHE")
    missing = sorted(set(requests) - set(cache.answers(requests))) if url else []
    if not url or not missing:
        return
    done = pull(cache, Remote(url, make=False), Keys(default_directory()), missing)
    for reason in done.refused:
        say(f"refused: {reason}")
    if done.requests:
        say(f"fetched {len(done.requests)} programs from {url}")


def _send_program(remote: Remote, keys: Keys, digest: str, record: bytes, payload: bytes) -> None:
    remote.put(_payload(record), payload)
    remote.put(_signature(record), keys.sign(_of_program(digest, record, payload)))
    remote.put(_record(digest), record)


def _fetch_program(cache: Cache, remote: Remote, keys: Keys, digest: str, done: Exchanged) -> None:
    what = f"{remote.url}: program {digest}"
    record = remote.get(_record(digest))
    payload = None if record is None else remote.get(_payload(record))
    if record is None or payload is None:
        raise Refused(f"{what}: its record or payload is missing; push it again")
    keys.check(_envelope(remote, record, what), _of_program(digest, record, payload), what)
    cache.adopt(digest, record, payload)
    done.programs.append(digest)
    done.nbytes += len(record) + len(payload)


@contextmanager
def _refusals(done: Exchanged) -> Iterator[None]:
    """Record a refusal, so that the other transfers continue."""
    try:
        yield
    except Refused as error:
        done.refused.append(str(error))


def _readable(done: Exchanged, read: Callable[[str], T], digest: str) -> T | None:
    """Read a local entry to upload; record a refusal and return None if it is damaged."""
    try:
        return read(digest)
    except CacheError as error:
        done.refused.append(str(error))
        return None


def _envelope(remote: Remote, signed: bytes, what: str) -> bytes:
    envelope = remote.get(_signature(signed))
    if envelope is None:
        raise Refused(f"{what}: it has no signature")
    return envelope


def _request(digest: str) -> str:
    return f"{LAYOUT}/requests/{digest}.json"


def _record(digest: str) -> str:
    return f"{LAYOUT}/programs/{digest}.json"


def _payload(record: bytes) -> str:
    return f"{LAYOUT}/payloads/{_sha256(record)}"


def _signature(signed: bytes) -> str:
    return f"{LAYOUT}/signatures/{_sha256(signed)}"


def _of_program(digest: str, record: bytes, payload: bytes) -> dict[str, str]:
    return {"program": digest, "record": _sha256(record), "payload": _sha256(payload)}


def _of_request(digest: str, text: bytes) -> dict[str, str]:
    return {"request": digest, "file": _sha256(text)}


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _digests(remote: Remote, kind: str) -> frozenset[str]:
    """Return the digests that the remote cache lists under a prefix; ignore other names."""
    prefix = f"{LAYOUT}/{kind}/"
    names = (name.removeprefix(prefix) for name in remote.names(prefix) if name.endswith(".json"))
    return frozenset(filter(is_digest, (name.removesuffix(".json") for name in names)))


class _Steps:
    """Concurrent transfers with a progress count; the first error cancels those not started."""

    def __init__(self, whole: int, observe: Observer) -> None:
        self._whole, self._observe, self._done = whole, observe, 0

    def run(self, action: Callable[[str], None], digests: list[str]) -> None:
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            waiting = [pool.submit(action, digest) for digest in digests]
            try:
                for one in as_completed(waiting):
                    one.result()
                    self._done += 1
                    self._observe(self._done, self._whole)
            finally:
                pool.shutdown(cancel_futures=True)
