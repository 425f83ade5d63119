"""Programs to and from a store elsewhere, signed; what is interrupted goes on where it was.

A program goes payload first, then its signature, then its record; a request goes last. So whoever
finds a request finds all of its program. What comes is verified before any byte of it is parsed.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field

from graphtrain.cache.layout import LAYOUT, is_digest
from graphtrain.cache.remote import Remote
from graphtrain.cache.store import Cache
from graphtrain.cache.trust import Keys, default_directory
from graphtrain.errors import CacheError

_AT_ONCE = 8
Observer = Callable[[int, int], None]  # programs and requests done, of how many


@dataclass
class Exchanged:
    """What went or came, and what was refused."""

    programs: list[str] = field(default_factory=list)  # digests
    requests: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)  # reasons
    absent: list[str] = field(default_factory=list)  # requests that the store does not have
    nbytes: int = 0


def push(
    cache: Cache,
    remote: Remote,
    keys: Keys,
    chosen: Iterable[str] | None = None,
    observe: Observer = lambda done, whole: None,
) -> Exchanged:
    """Send what the store does not have.

    Args:
        chosen: digests of requests; all if None.

    Raises:
        CacheError: there is no key to sign with, or the store cannot be written.
    """
    keys.own()
    answers = cache.answers(chosen)
    there_programs = _present(remote, "programs", "/record.json")
    there_requests = _present(remote, "requests", ".json")
    done = Exchanged()
    programs = sorted({program for program in answers.values()} - there_programs)
    requests = sorted(set(answers) - there_requests)
    steps = _Steps(len(programs) + len(requests), observe)

    def send_program(digest: str) -> None:
        record, payload = cache.files(digest)
        name = f"{LAYOUT}/programs/{digest}"
        remote.put(f"{name}/payload", payload)
        remote.put(f"{name}/signature.json", keys.sign(_of_program(digest, record, payload)))
        remote.put(f"{name}/record.json", record)
        done.programs.append(digest)
        done.nbytes += len(record) + len(payload)

    def send_request(digest: str) -> None:
        text = cache.request_file(digest)
        remote.put(f"{LAYOUT}/requests/{digest}.sig", keys.sign(_of_request(digest, text)))
        remote.put(f"{LAYOUT}/requests/{digest}.json", text)
        done.requests.append(digest)

    steps.run(send_program, programs)
    steps.run(send_request, requests)
    return done


def pull(
    cache: Cache,
    remote: Remote,
    keys: Keys,
    chosen: Iterable[str] | None = None,
    observe: Observer = lambda done, whole: None,
) -> Exchanged:
    """Fetch what is not here; what no trusted key has signed is refused, and never interpreted.

    Args:
        chosen: digests of requests; all that the store lists if None.

    Raises:
        CacheError: the store cannot be read, or this one not written.
    """
    wanted = _present(remote, "requests", ".json") if chosen is None else set(chosen)
    missing = sorted(wanted - set(cache.answers(wanted)))
    done = Exchanged()
    texts: dict[str, bytes] = {}
    programs: dict[str, str] = {}  # by request

    def ask(digest: str) -> None:
        with _refusals(done):
            text = remote.get(f"{LAYOUT}/requests/{digest}.json")
            if text is None:
                done.absent.append(digest)
                return
            what = f"{remote.url}: request {digest}"
            envelope = _signature(remote, f"requests/{digest}.sig", what)
            keys.check(envelope, _of_request(digest, text), what)
            programs[digest], texts[digest] = cache.program_in(text, digest), text

    def fetch(digest: str) -> None:
        with _refusals(done):
            _fetch_program(cache, remote, keys, digest, done)

    def keep(digest: str) -> None:
        if cache.holds(programs[digest]):  # else it was refused
            cache.adopt_request(digest, texts[digest])
            done.requests.append(digest)

    _Steps(len(missing), lambda *_: None).run(ask, missing)
    absent = sorted({program for program in programs.values() if not cache.holds(program)})
    _Steps(len(absent), observe).run(fetch, absent)
    for digest in sorted(texts):
        keep(digest)
    return done


def pull_shared(cache: Cache, requests: Iterable[str], say: Callable[[str], None]) -> None:
    """Fetch what is missing from $GRAPHTRAIN_SHARED_CACHE, if that is set.

    Args:
        requests: digests.
        say: called with a line for people, where there is something to say.

    Raises:
        CacheError: it cannot be read.
    """
    url = os.environ.get("GRAPHTRAIN_SHARED_CACHE")
    missing = sorted(set(requests) - set(cache.answers(requests))) if url else []
    if not url or not missing:
        return
    done = pull(cache, Remote(url, make=False), Keys(default_directory()), missing)
    for reason in done.refused:
        say(f"refused: {reason}")
    if done.requests:
        say(f"{len(done.requests)} programs from {url}")


def _fetch_program(cache: Cache, remote: Remote, keys: Keys, digest: str, done: Exchanged) -> None:
    name, what = f"{LAYOUT}/programs/{digest}", f"{remote.url}: program {digest}"
    record, payload = remote.get(f"{name}/record.json"), remote.get(f"{name}/payload")
    if record is None or payload is None:
        raise CacheError(f"{what}: it is not there as a whole; push it again")
    statement = _of_program(digest, record, payload)
    keys.check(_signature(remote, f"programs/{digest}/signature.json", what), statement, what)
    cache.adopt(digest, record, payload)
    done.programs.append(digest)
    done.nbytes += len(record) + len(payload)


@contextmanager
def _refusals(done: Exchanged) -> Iterator[None]:
    """One that cannot be taken does not keep others from coming."""
    try:
        yield
    except CacheError as error:
        done.refused.append(str(error))


def _signature(remote: Remote, name: str, what: str) -> bytes:
    signature = remote.get(f"{LAYOUT}/{name}")
    if signature is None:
        raise CacheError(f"{what}: it is not signed")
    return signature


def _of_program(digest: str, record: bytes, payload: bytes) -> dict[str, str]:
    return {"program": digest, "record": _sha256(record), "payload": _sha256(payload)}


def _of_request(digest: str, text: bytes) -> dict[str, str]:
    return {"request": digest, "file": _sha256(text)}


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _present(remote: Remote, kind: str, suffix: str) -> set[str]:
    """Digests of what the store has whole; names that are none are nobody's of ours."""
    prefix = f"{LAYOUT}/{kind}/"
    found = (
        name.removeprefix(prefix).removesuffix(suffix)
        for name in remote.names(prefix)
        if name.endswith(suffix)
    )
    return {digest for digest in found if is_digest(digest)}


class _Steps:
    """Several at once, counted; the first error ends all that has not begun."""

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
