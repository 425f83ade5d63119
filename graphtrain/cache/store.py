"""Cache: the store of compiled programs."""

import errno
import os
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

from graphtrain.cache import (
    bundles,
    collect,
    entries,
    explain,
    failures,
    leases,
    pins,
    programs,
    requests,
    summaries,
    verify,
)
from graphtrain.cache.key import CacheKey
from graphtrain.cache.layout import Layout, digest_of
from graphtrain.cache.programs import CacheWarning, Damaged, OtherVersion, Unusable, is_present
from graphtrain.cache.trust import Refused
from graphtrain.cache.writing import (
    quarantine,
    replace_file,
    sync_directory,
    temporary_directory,
    write_file,
    writing,
)
from graphtrain.errors import CacheError
from lowering.artifact import Artifact

_RENAME_ATTEMPTS = 3  # each loses only to another process that has just stored the same program


def default_root() -> Path:
    """$GRAPHTRAIN_CACHE, else cache/ under the current directory."""
    named = os.environ.get("GRAPHTRAIN_CACHE")
    return Path(named).expanduser() if named else Path("cache")


class Cache:
    """Compiled programs by key, and which program answers which request.

    Processes and machines may share a store. Nothing in it is edited: an entry appears whole, by
    one rename, and is checked before every use. Its payloads are code, so use only a store that
    nobody else can write.
    """

    def __init__(self, root: Path, pace: leases.Pace = leases.PACE) -> None:
        """Open the store at root; nothing is made there before the first write."""
        self.root = root
        self._pace = pace
        self._layout = Layout(root)

    def put(self, key: CacheKey, artifact: Artifact) -> None:
        """Store a program, unless a sound one is stored under its key already.

        Raises:
            CacheError: the disk is full, or the store cannot be written; nothing partial remains.
            TypeError: the artifact's record is not JSON.
        """
        if self.get(key) is not None:
            return
        record = programs.encode(key, artifact)
        path = self._layout.program(key.digest)
        with writing(path, len(record) + len(artifact.payload)):
            path.parent.mkdir(parents=True, exist_ok=True)
            with temporary_directory(self._layout) as temporary:
                write_file(temporary / programs.RECORD, record)
                write_file(temporary / programs.PAYLOAD, artifact.payload)
                sync_directory(temporary)
                self._install(temporary, key.digest)

    def get(self, key: CacheKey | str) -> Artifact | None:
        """The program of a key or digest, checked to be what was stored, or None.

        What cannot be used is moved to quarantine/ (where that is allowed) with a CacheWarning,
        and is then absent.

        Raises:
            CacheError: the store cannot be read, or a string is not a digest.
        """
        digest = digest_of(key)
        directory = self._layout.program(digest)
        if not is_present(directory):
            return None
        try:
            artifact = programs.read(directory, digest)
        except OtherVersion as reason:
            warnings.warn(f"{directory} is ignored: {reason}", CacheWarning, stacklevel=2)
            return None
        except Damaged as reason:
            self._set_aside(digest, reason)
            return None
        with suppress(OSError):  # the store may be read-only, or another user's
            os.utime(directory / programs.PAYLOAD)  # last used, for gc
        return artifact

    def link(self, request: CacheKey, program: CacheKey | str, *, graph: str = "") -> None:
        """Remember which program answers a request, in place of what was remembered before.

        Args:
            request: what was asked for.
            program: the key or digest of a stored program.
            graph: the name to list and explain it by; by default the request's part "graph".

        Raises:
            CacheError: the disk is full, or the store cannot be written.
        """
        graph = graph or str(request.part("graph") or "")
        data = requests.encode(request, digest_of(program), graph)
        path = self._layout.request(request.digest)
        with writing(path, len(data)):
            replace_file(self._layout, path, data)

    def find(self, request: CacheKey) -> Artifact | None:
        """The program that answers a request, or None; as get."""
        digest = self._answer(request)
        return None if digest is None else self.get(digest)

    def program_of(self, request: CacheKey) -> str | None:
        """The digest of the program that find would return, checked as find does."""
        digest = self._answer(request)
        return digest if digest and self.get(digest) else None

    def has(self, request: CacheKey) -> bool:
        """Whether find would find a program, without reading its payload."""
        digest = self._answer(request)
        return digest is not None and self.holds(digest)

    def lock(
        self, key: CacheKey | str, *, on_wait: Callable[[str], None] | None = None
    ) -> AbstractContextManager[None]:
        """Hold the lease of a key, so that only one process compiles it, after waiting for it.

        Look in the store again once it is held: the last owner may have stored the program.

        Args:
            key: of a request or a program, or its digest.
            on_wait: called once with a description of the owner, if there is one to wait for.

        Raises:
            CacheError: the store cannot be written.
        """
        return leases.hold(self._layout, digest_of(key), on_wait, self._pace)

    def lease(self, key: CacheKey | str) -> leases.Lease:
        """The lease of a key, not yet acquired: lock for those who have other things to do."""
        return leases.Lease(self._layout.lease(digest_of(key)), self._pace)

    def list(self) -> tuple[entries.Entry, ...]:
        """Every stored program with the requests it answers, last used first."""
        return tuple(entries.list_entries(self._layout))

    def resolve(self, prefix: str) -> str:
        """The digest of the one program that a prefix of its own or its request's digest means.

        Raises:
            CacheError: it means none or several.
        """
        return entries.resolve(self._layout, prefix)

    def describe(self, prefix: str) -> dict[str, Any]:
        """Everything recorded of the program that resolve finds, and the requests it answers.

        Raises:
            CacheError: prefix means no program or several, or the record cannot be used.
        """
        return entries.describe(self._layout, self.resolve(prefix))

    def answers(self, chosen: Iterable[str] | None = None) -> dict[str, str]:
        """The program of every request, or of chosen ones, by digest, where it is here.

        Chosen ones are checked as has does. Of thousands only the names are: an entry is whole
        or absent, and what was damaged since is found by whoever reads it.
        """
        found = summaries.read_summaries(self._layout, chosen)
        stored = frozenset(requests.digests(self._layout.programs))
        is_here = stored.__contains__ if chosen is None else self.holds
        return {one.digest: one.program for one in found if is_here(one.program)}

    def holds(self, digest: str) -> bool:
        """Whether a program is here, as has says it."""
        try:
            programs.check(self._layout.program(digest), digest, contents=False)
        except Unusable:
            return False
        return True

    def files(self, digest: str) -> tuple[bytes, bytes]:
        """Record and payload of a program as they are stored, checked.

        Raises:
            CacheError: they cannot be used.
        """
        directory = self._layout.program(digest)
        try:
            programs.check(directory, digest, contents=True)
            return (
                programs.read_bytes(directory / programs.RECORD),
                programs.read_bytes(directory / programs.PAYLOAD),
            )
        except Unusable as error:
            raise CacheError(f"{directory} cannot be used: {error}") from error

    def adopt(self, digest: str, record: bytes, payload: bytes) -> None:
        """Store a program that was made elsewhere, once somebody has said that it may be trusted.

        Raises:
            Refused: record and payload do not belong together.
            CacheError: the disk is full, or the store cannot be written.
        """
        path = self._layout.program(digest)
        with writing(path, len(record) + len(payload)):
            path.parent.mkdir(parents=True, exist_ok=True)
            with temporary_directory(self._layout) as temporary:
                write_file(temporary / programs.RECORD, record)
                write_file(temporary / programs.PAYLOAD, payload)
                sync_directory(temporary)
                try:
                    programs.check(temporary, digest, contents=True)
                except Unusable as error:
                    raise Refused(f"program {digest} from elsewhere: {error}") from error
                self._install(temporary, digest)

    def request_file(self, digest: str) -> bytes:
        """A request as it is stored.

        Raises:
            CacheError: it cannot be read.
        """
        path = self._layout.request(digest)
        try:
            return programs.read_bytes(path)
        except Unusable as error:
            raise CacheError(f"{path} cannot be used: {error}") from error

    def program_in(self, text: bytes, digest: str) -> str:
        """The program that the file of a request from elsewhere names.

        Raises:
            Refused: it is no request, or another one.
        """
        try:
            stored = requests.decode(text, digest)
            if stored.key.digest != digest:
                raise Damaged("request is of another digest")
        except (Unusable, TypeError) as error:
            raise Refused(f"request {digest} from elsewhere: {error}") from error
        return stored.program

    def adopt_request(self, digest: str, text: bytes) -> None:
        """Store the file of a request from elsewhere; its program first."""
        path = self._layout.request(digest)
        with writing(path, len(text)):
            replace_file(self._layout, path, text)

    def verify(self, *, repair: bool = False) -> verify.Report:
        """Read every byte stored and say what is wrong.

        With repair, damaged programs go to quarantine, and requests that lead nowhere are removed.
        """
        return verify.verify(self._layout, repair=repair)

    def gc(
        self,
        *,
        max_bytes: int | None = None,
        max_age_days: float | None = None,
        other_toolchains: bool = False,
        keep: Collection[str] = (),
    ) -> collect.Collected:
        """Remove programs that are too old or too many, then what is left over.

        Left over are requests without a program, what killed processes left behind, and everything
        in quarantine. Programs go in the order of their last use; leased ones never.

        Args:
            max_bytes: how much may remain stored.
            max_age_days: since last used; failures older than that go too.
            other_toolchains: those made by other versions than are installed here go too.
            keep: digests of programs or requests that stay in any case.
        """
        return collect.collect(
            self._layout,
            max_bytes=max_bytes,
            max_age_days=max_age_days,
            other_toolchains=other_toolchains,
            keep={*keep, *pins.pinned(self._layout)},
        )

    def pin(self, prefix: str) -> str:
        """Keep a program whatever limits gc is given; return its digest.

        Raises:
            CacheError: prefix means no program or several, or the store cannot be written.
        """
        digest = self.resolve(prefix)
        pins.pin(self._layout, digest)
        return digest

    def unpin(self, prefix: str) -> str:
        """Let it go again; return its digest.

        Raises:
            CacheError: prefix means no program or several, or the store cannot be written.
        """
        digest = self.resolve(prefix)
        pins.unpin(self._layout, digest)
        return digest

    def pinned(self) -> frozenset[str]:
        """Digests of the programs that gc leaves alone."""
        return pins.pinned(self._layout)

    def explain_all(self, asked: Mapping[str, CacheKey]) -> dict[str, explain.Explanation]:
        """As explain, of several requests by the names of their graphs; reads the store once."""
        return explain.explain(self._layout, asked)

    def explain(self, request: CacheKey, *, graph: str = "") -> explain.Explanation:
        """Why find finds a program or none: the stored requests of that graph nearest to this."""
        graph = graph or str(request.part("graph") or "")
        return self.explain_all({graph: request})[graph]

    def store_failure(
        self,
        key: CacheKey | str,
        name: str,
        text: str,
        log: str,
        reason: Mapping[str, str] = MappingProxyType({}),
    ) -> Path:
        """Keep the program text and log of a graph that did not compile; return their directory.

        Args:
            reason: error and kind of a failure that would be the same again; empty for others.

        Raises:
            CacheError: the disk is full, or the store cannot be written.
        """
        return failures.store_failure(self._layout, digest_of(key), name, text, log, reason)

    def failure(self, request: CacheKey, name: str) -> failures.Failure | None:
        """Why a graph did not compile before, where it would not now either."""
        return failures.read_failure(self._layout, request.digest, name)

    def store_bundle(
        self, key: CacheKey, request: CacheKey, name: str, files: Mapping[str, bytes]
    ) -> Path:
        """Keep what a compiler that is not here would be given; return the directory.

        Raises:
            CacheError: the disk is full, or the store cannot be written.
        """
        return bundles.store(self._layout, key, request, name, files)

    def _answer(self, request: CacheKey) -> str | None:
        path = self._layout.request(request.digest)
        if not is_present(path):
            return None
        try:
            stored = requests.read(path)
            if stored.key != request:
                raise Damaged("request is not as it was written")
        except Unusable as reason:
            warnings.warn(f"{path} is ignored: {reason}", CacheWarning, stacklevel=3)
            return None
        return stored.program

    def _install(self, temporary: Path, digest: str) -> None:
        """Rename an entry into place, unless another process put a sound one there first."""
        path = self._layout.program(digest)
        for _ in range(_RENAME_ATTEMPTS):
            try:
                os.rename(temporary, path)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                    raise
            else:
                sync_directory(path.parent)
                return
            if self.get(digest) is not None:
                return
            quarantine(self._layout, path, "replaced: it could not be used")  # another version
        raise CacheError(f"cannot write {path}: other processes keep storing what cannot be used")

    def _set_aside(self, digest: str, reason: Damaged) -> None:
        path = self._layout.program(digest)
        if not is_present(path):
            return  # removed by another process while it was read, which is no damage
        moved = quarantine(self._layout, path, str(reason))
        where = f"moved to {moved}" if moved else "left there, since it cannot be moved"
        warnings.warn(f"{path} is damaged: {reason}; {where}", CacheWarning, stacklevel=3)
