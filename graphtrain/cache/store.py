"""Store of compiled programs: the cache, its entries and their leases."""

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
    searches,
    stored_requests,
    summaries,
    verify,
)
from graphtrain.cache.authentication import EntryAuthenticator
from graphtrain.cache.key import CacheKey
from graphtrain.cache.layout import StorePaths, digest_of
from graphtrain.cache.permissions import check_permissions
from graphtrain.cache.programs import (
    CacheWarning,
    DamagedEntry,
    ForeignEntry,
    OtherSchemaVersion,
    UnusableEntry,
    exists,
)
from graphtrain.cache.trust import UntrustedError
from graphtrain.cache.writing import (
    quarantine,
    replace_file,
    sync_directory,
    temporary_directory,
    write_errors,
    write_file,
)
from graphtrain.errors import CacheError
from lowering.artifact import Artifact
from lowering.machine.leases import DEFAULT_TIMING, LeaseTiming

_RENAME_ATTEMPTS = 3  # an attempt fails only if another process has just stored the same program


def default_root() -> Path:
    """Return the cache directory: $GRAPHTRAIN_CACHE, else cache/ under the current directory."""
    named = os.environ.get("GRAPHTRAIN_CACHE")
    return Path(named).expanduser() if named else Path("cache")


class Cache:
    """Cache of compiled programs, and of the program that each request resolves to.

    Several processes and hosts may use one cache directory. Entries are immutable: each is created
    atomically by one rename, and its checksums are verified before every use. Payloads are
    executable code, so only entries that this user stored are loaded, unless the user trusts the
    directory (`graphtrain.cache.authentication`). All others count as absent.
    """

    def __init__(self, root: Path, pace: LeaseTiming = DEFAULT_TIMING) -> None:
        """Open the cache at root; the directory is created by the first write.

        Args:
            root: cache directory.
            pace: heartbeat interval and expiry of the leases.

        Raises:
            CacheError: other users can write to the directory, and this user does not trust it.
        """
        self.root = root
        self._pace = pace
        self._layout = StorePaths(root)
        self._authenticator = EntryAuthenticator(root)
        self._warned_of_foreign = False
        check_permissions(self._layout, self._authenticator)

    def put(self, key: CacheKey, artifact: Artifact) -> None:
        """Store a program, unless a valid entry with the same key exists.

        Raises:
            CacheError: the disk is full, or the cache is not writable; no partial entry remains.
            TypeError: the artifact's record is not JSON.
        """
        if self.get(key) is not None:
            return
        self._store(key.digest, programs.encode(key, artifact), artifact.payload)

    def get(self, key: CacheKey | str) -> Artifact | None:
        """Return the program with this key or digest after verifying it, or None if absent.

        A damaged entry is moved to quarantine/ (if permissions allow) with a CacheWarning, and
        counts as absent. An entry of another user or schema version is ignored with a CacheWarning.

        Raises:
            CacheError: the cache cannot be read, or the string is not a digest.
        """
        digest = digest_of(key)
        directory = self._layout.program(digest)
        if not exists(directory):
            return None
        try:
            artifact = programs.read(directory, digest, self._authenticator)
        except ForeignEntry:
            self._warn_of_foreign()
            return None
        except OtherSchemaVersion as reason:
            warnings.warn(f"{directory} is ignored: {reason}", CacheWarning, stacklevel=2)
            return None
        except DamagedEntry as reason:
            self._quarantine(digest, reason)
            return None
        with suppress(OSError):  # the cache may be read-only or owned by another user
            os.utime(directory / programs.PAYLOAD)  # time of last use, for garbage collection
        return artifact

    def record_request(
        self,
        request: CacheKey,
        program: CacheKey | str,
        *,
        graph: str = "",
        origin: stored_requests.Origin | None = None,
    ) -> None:
        """Record which program a request resolves to, replacing any earlier record.

        Args:
            request: request key, computed without tracing.
            program: key or digest of a stored program.
            graph: graph name for `list` and `explain`; by default the request's part "graph".
            origin: who asked for the program; None for this user.

        Raises:
            CacheError: the disk is full, or the cache is not writable.
        """
        graph = graph or str(request.part("graph") or "")
        code = stored_requests.authenticate(self._authenticator, request.digest, digest_of(program))
        origin = origin or stored_requests.Origin(user=stored_requests.current_user())
        data = stored_requests.encode(request, digest_of(program), graph, code, origin)
        path = self._layout.request(request.digest)
        with write_errors(path, len(data)):
            replace_file(self._layout, path, data)

    def get_by_request(self, request: CacheKey) -> Artifact | None:
        """Return the program that a request resolves to, or None; verifies it as `get` does."""
        digest = self._resolve_request(request)
        return None if digest is None else self.get(digest)

    def program_digest(self, request: CacheKey) -> str | None:
        """Return the digest of the program that `find` would return, after the same checks."""
        digest = self._resolve_request(request)
        return digest if digest and self.get(digest) else None

    def contains(self, request: CacheKey) -> bool:
        """Return whether `find` would return a program, without reading its payload."""
        digest = self._resolve_request(request)
        return digest is not None and self.contains_program(digest)

    def lock(
        self, key: CacheKey | str, *, on_wait: Callable[[str], None] | None = None
    ) -> AbstractContextManager[None]:
        """Acquire the lease of a key, waiting if necessary, so that only one process compiles it.

        Look the program up again once the lease is acquired: its previous owner may have stored it.

        Args:
            key: key of a request or a program, or its digest.
            on_wait: called once with a description of the current owner, if there is one.

        Raises:
            CacheError: the cache is not writable.
        """
        return leases.hold_lease(self._layout, digest_of(key), on_wait, self._pace)

    def lease(self, key: CacheKey | str) -> leases.CacheLease:
        """Return the lease of a key without acquiring it; use it to poll instead of waiting."""
        return leases.CacheLease(self._layout.lease(digest_of(key)), self._pace)

    def list(self) -> tuple[entries.CacheEntry, ...]:
        """Return all stored programs with their requests, most recently used first."""
        return tuple(entries.list_entries(self._layout))

    def resolve(self, prefix: str) -> str:
        """Return the digest of the one program whose digest, or request digest, has this prefix.

        Raises:
            CacheError: no program or several match.
        """
        return entries.resolve(self._layout, prefix)

    def describe(self, prefix: str) -> dict[str, Any]:
        """Return the full record of the program that `resolve` returns, and its requests.

        Raises:
            CacheError: no program or several match the prefix, or the record cannot be used.
        """
        return entries.describe(self._layout, self.resolve(prefix))

    def stored_programs(self, chosen: Iterable[str] | None = None) -> dict[str, str]:
        """Map request digests to program digests, for the programs stored in this cache.

        The programs of `chosen` requests are checked as by `contains_program`. Without `chosen`,
        only the existence of each entry is checked: entries are created atomically, and later
        damage is detected when an entry is read.

        Args:
            chosen: request digests; None for all requests.
        """
        requests = summaries.read_summaries(self._layout, chosen)
        stored = frozenset(stored_requests.list_digests(self._layout.programs))
        is_stored = stored.__contains__ if chosen is None else self.contains_program
        return {
            request.digest: request.program
            for request in requests
            if stored_requests.may_use(self._authenticator, request) and is_stored(request.program)
        }

    def contains_program(self, digest: str) -> bool:
        """Return whether a program is stored, checking its record and payload size."""
        directory = self._layout.program(digest)
        try:
            programs.check(directory, digest, self._authenticator, contents=False)
        except ForeignEntry:
            self._warn_of_foreign()
            return False
        except UnusableEntry:
            return False
        return True

    def program_files(self, digest: str) -> tuple[bytes, bytes]:
        """Return the record and payload of a program as stored, after verifying them.

        Raises:
            CacheError: the entry is missing, damaged, or of another version.
        """
        directory = self._layout.program(digest)
        try:
            record = programs.read_bytes(directory / programs.RECORD)
            return record, programs.read(directory, digest, self._authenticator).payload
        except UnusableEntry as error:
            raise CacheError(f"{directory} cannot be used: {error}") from error

    def import_program(self, digest: str, record: bytes, payload: bytes) -> None:
        """Store a program from a remote cache whose signature the caller has verified.

        Raises:
            UntrustedError: record and payload do not match each other or the digest.
            CacheError: the disk is full, or the cache is not writable.
        """
        try:
            programs.check_imported(record, payload, digest)
        except UnusableEntry as error:
            raise UntrustedError(f"program {digest} from the remote cache: {error}") from error
        self._store(digest, record, payload)

    def request_file(self, digest: str) -> bytes:
        """Return the bytes of a stored request.

        Raises:
            CacheError: the request is missing or cannot be read.
        """
        path = self._layout.request(digest)
        try:
            return programs.read_bytes(path)
        except UnusableEntry as error:
            raise CacheError(f"{path} cannot be used: {error}") from error

    def program_of_request_file(self, text: bytes, digest: str) -> str:
        """Return the digest of the program that a request file from a remote cache names.

        Raises:
            UntrustedError: `text` is not a request file, or belongs to another digest.
        """
        try:
            stored = stored_requests.decode(text, digest)
            if stored.key.digest != digest:
                raise DamagedEntry("the request's contents belong to another digest")
        except (UnusableEntry, TypeError) as error:
            raise UntrustedError(f"request {digest} from the remote cache: {error}") from error
        return stored.program

    def import_request(self, digest: str, text: bytes) -> None:
        """Store a request from a remote cache that has been verified; store its program first."""
        stored = stored_requests.decode(text, digest)
        self.record_request(stored.key, stored.program, graph=stored.graph, origin=stored.origin)

    def verify(self, *, repair: bool = False) -> verify.VerificationReport:
        """Verify the checksums of every entry and report the problems.

        With `repair`, damaged programs and requests, and requests whose program is missing, are
        moved to quarantine.
        """
        return verify.verify(self._layout, self._authenticator, repair=repair)

    def gc(
        self,
        *,
        max_bytes: int | None = None,
        max_age_days: float | None = None,
        other_toolchains: bool = False,
        keep: Collection[str] = (),
        dry_run: bool = False,
    ) -> collect.CollectionResult:
        """Remove programs that exceed the limits, then leftover files.

        Leftovers are requests without a program, temporary files of killed processes, and all of
        quarantine. Programs are removed least recently used first; leased ones are never removed.

        Args:
            max_bytes: maximum total size of the remaining programs.
            max_age_days: maximum days since last use; older failures are removed too.
            other_toolchains: also remove programs compiled with package versions other than those
                installed on this machine.
            keep: digests of programs or requests to retain regardless of the limits.
            dry_run: remove nothing, and return what would be removed.
        """
        return collect.collect(
            self._layout,
            max_bytes=max_bytes,
            max_age_days=max_age_days,
            other_toolchains=other_toolchains,
            keep={*keep, *pins.pinned(self._layout)},
            dry_run=dry_run,
        )

    def pin(self, prefix: str) -> str:
        """Exempt a program from garbage collection; return its digest.

        Raises:
            CacheError: no program or several match the prefix, or the cache is not writable.
        """
        digest = self.resolve(prefix)
        pins.pin(self._layout, digest)
        return digest

    def unpin(self, prefix: str) -> str:
        """Make a pinned program subject to garbage collection again; return its digest.

        Raises:
            CacheError: no program or several match the prefix, or the cache is not writable.
        """
        digest = self.resolve(prefix)
        pins.unpin(self._layout, digest)
        return digest

    def pinned(self) -> frozenset[str]:
        """Return the digests of the programs that garbage collection never removes."""
        return pins.pinned(self._layout)

    def explain_all(self, asked: Mapping[str, CacheKey]) -> dict[str, explain.Explanation]:
        """Explain several requests, by label, with one pass over the cache."""
        return explain.explain(self._layout, self._authenticator, asked)

    def explain(self, request: CacheKey, *, graph: str = "") -> explain.Explanation:
        """Explain why `find` hits or misses: compare with the most similar stored requests."""
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
        """Store the program text and log of a failed compilation; return their directory.

        Args:
            key: key or digest of the request.
            name: graph name.
            text: program text (StableHLO).
            log: compiler log.
            reason: "error" and "kind" of a deterministic failure; empty for a transient one.

        Raises:
            CacheError: the disk is full, or the cache is not writable.
        """
        return failures.store_failure(self._layout, digest_of(key), name, text, log, reason)

    def stored_failure(self, request: CacheKey, name: str) -> failures.StoredFailure | None:
        """Return the stored deterministic failure of a request, or None."""
        return failures.read_failure(self._layout, request.digest, name)

    def store_search(self, key: CacheKey, settings: Mapping[str, Any]) -> None:
        """Store the settings that a search chose for a program; the last search counts.

        Raises:
            CacheError: the disk is full, the cache is not writable, or the secret of this user
                cannot be read or created.
        """
        searches.store(self._layout, self._authenticator, key, settings)

    def stored_search(self, key: CacheKey) -> dict[str, Any] | None:
        """Return the settings that the last search chose for a program, or None.

        Damaged ones, and those of another user, count as none, with a CacheWarning.
        """
        return searches.read(self._layout, self._authenticator, key)

    def store_bundle(
        self, key: CacheKey, request: CacheKey, name: str, files: Mapping[str, bytes]
    ) -> Path:
        """Store the compiler input of a program, to compile on another machine; return its path.

        Raises:
            CacheError: the disk is full, or the cache is not writable.
        """
        return bundles.store(self._layout, key, request, name, files)

    def _resolve_request(self, request: CacheKey) -> str | None:
        path = self._layout.request(request.digest)
        if not exists(path):
            return None
        try:
            stored = stored_requests.read_asked(path, request)
        except UnusableEntry as reason:
            warnings.warn(f"{path} is ignored: {reason}", CacheWarning, stacklevel=3)
            return None
        if not stored_requests.may_use(self._authenticator, stored):
            self._warn_of_foreign()
            return None
        return stored.program

    def _warn_of_foreign(self) -> None:
        """Warn, once for a whole cache, that entries of others are not loaded."""
        if not self._warned_of_foreign:
            self._warned_of_foreign = True
            warnings.warn(self._authenticator.explanation(), CacheWarning, stacklevel=4)

    def _store(self, digest: str, record: bytes, payload: bytes) -> None:
        """Create an entry of this user by one rename."""
        path = self._layout.program(digest)
        code = programs.authenticate(self._authenticator, digest, record)
        with write_errors(path, len(record) + len(payload)):
            path.parent.mkdir(parents=True, exist_ok=True)
            with temporary_directory(self._layout) as temporary:
                write_file(temporary / programs.RECORD, record)
                write_file(temporary / programs.PAYLOAD, payload)
                write_file(temporary / programs.CODE, code)
                sync_directory(temporary)
                self._install(temporary, digest)

    def _install(self, temporary: Path, digest: str) -> None:
        """Rename an entry into place, unless another process has stored a valid one first."""
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
            quarantine(
                self._layout, path, "replaced: it could not be used"
            )  # foreign, or of another schema version
        raise CacheError(
            f"cannot write {path}: other processes keep storing an invalid entry there"
        )

    def _quarantine(self, digest: str, reason: DamagedEntry) -> None:
        path = self._layout.program(digest)
        if not exists(path):
            return  # another process removed it during the read: not damaged
        moved = quarantine(self._layout, path, str(reason))
        where = f"moved to {moved}" if moved else "it could not be moved to quarantine"
        warnings.warn(f"{path} is damaged: {reason}; {where}", CacheWarning, stacklevel=3)
