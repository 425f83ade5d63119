"""Authentication of cache entries: a user loads only programs that the same user stored.

A compiled program is code, and a cache can come with a cloned repository or lie where others can
write. Every entry therefore has a message authentication code (HMAC-SHA256) with a secret of the
user. Its absence or another user's code makes an entry foreign: it counts as missing. Caches that
the user has named as trusted are exempt, for example the cache of a group.
"""

import contextlib
import hmac
import os
import stat
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

from graphtrain.cache.config_directory import config_directory
from graphtrain.errors import CacheError

TRUSTED_CACHES = "GRAPHTRAIN_TRUSTED_CACHES"  # environment variable: directories, separated by ":"
_SECRET_BYTES = 32


class EntryAuthenticator:
    """Message authentication codes of the entries of one cache directory."""

    def __init__(self, root: Path) -> None:
        self._root = root

    @cached_property
    def trusts_directory(self) -> bool:
        """True if the user has named this cache as trusted, so that foreign entries are loaded."""
        return os.path.realpath(self._root) in trusted_caches()

    @cached_property
    def _secret(self) -> bytes | None:
        return _read_secret(_secret_path())

    def code(self, *message: str) -> str:
        """Return the code of a message; the secret is created on first use.

        The code is empty, which authenticates nothing, if the secret cannot be created and the
        cache is trusted anyway.

        Raises:
            CacheError: the secret cannot be read or created.
        """
        try:
            if self._secret is None:
                self._secret = _create_secret(_secret_path())
        except CacheError:
            if self.trusts_directory:
                return ""
            raise
        return hmac.digest(self._secret, "\0".join(message).encode(), "sha256").hex()

    def is_own(self, code: str, *message: str) -> bool:
        """Return whether `code` is this user's code of the message. The secret is never created.

        Raises:
            CacheError: the secret exists but cannot be used.
        """
        try:
            if self._secret is None:
                return False
        except CacheError:
            if self.trusts_directory:
                return False
            raise
        return hmac.compare_digest(code.encode(errors="replace"), self.code(*message).encode())

    def explanation(self) -> str:
        """Return why foreign entries are not loaded, and what the user can do."""
        return (
            f"{self._root} contains programs that this user did not compile here; they are not "
            "loaded, because a program is code that runs with your rights. Compile them again, or, "
            "if you trust everyone who can write to that directory, run: graphtrain cache trust "
            f"{self._root}"
        )


def trusted_caches() -> frozenset[str]:
    """Return the directories whose programs the user loads whoever stored them, resolved.

    Raises:
        CacheError: the list cannot be read.
    """
    named = os.environ.get(TRUSTED_CACHES, "").split(os.pathsep)
    with contextlib.suppress(CacheError):  # without a home directory there is no list either
        named += _read_list(config_directory() / "trusted_caches")
    return frozenset(os.path.realpath(os.path.expanduser(path)) for path in named if path)


def trust_cache(root: Path) -> Path:
    """Load every program of a cache directory from now on, whoever stored it.

    Returns:
        The resolved directory.

    Raises:
        CacheError: there is no such directory, or the configuration directory is not writable.
    """
    resolved = Path(os.path.realpath(root.expanduser()))
    if not resolved.is_dir() or "\n" in str(resolved):
        raise CacheError(f"{root} is not a directory")
    _write_list({*_listed(), str(resolved)})
    return resolved


def untrust_cache(root: Path) -> Path:
    """Stop trusting a cache directory; return the resolved directory.

    Raises:
        CacheError: it was not trusted, or the configuration directory is not writable.
    """
    resolved = os.path.realpath(root.expanduser())
    if resolved not in _listed():
        raise CacheError(f"{resolved} is not a trusted cache; run: graphtrain cache trust --list")
    _write_list(_listed() - {resolved})
    return Path(resolved)


def _listed() -> set[str]:
    return set(_read_list(config_directory() / "trusted_caches"))


def _read_list(path: Path) -> list[str]:
    try:
        return path.read_text(errors="surrogateescape").splitlines()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CacheError(f"cannot read {path}: {error.strerror}") from error


def _write_list(directories: set[str]) -> None:
    path = config_directory() / "trusted_caches"
    text = "".join(f"{directory}\n" for directory in sorted(directories))
    with _config_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        temporary = path.with_name(f"{path.name}.{os.getpid()}")
        temporary.write_text(text, errors="surrogateescape")
        temporary.replace(path)


def _secret_path() -> Path:
    return config_directory() / "cache_secret"


def _read_secret(path: Path) -> bytes | None:
    """Return the secret, or None if there is none.

    Raises:
        CacheError: it cannot be read, is damaged, or other users can read it.
    """
    try:
        with open(path, "rb") as file:
            mode, text = os.fstat(file.fileno()).st_mode, file.read(4 * _SECRET_BYTES).strip()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise CacheError(
            f"cannot read {path}, which proves that cached programs are yours: {error.strerror}; "
            "if another user made it, for example root with sudo, remove it and compile again"
        ) from error
    if stat.S_IMODE(mode) & 0o077:
        raise CacheError(
            f"other users can read {path} (mode {stat.S_IMODE(mode):o}), and could forge cached "
            "programs with it; remove it and compile again"
        )
    try:
        secret = bytes.fromhex(text.decode())
    except ValueError:
        secret = b""
    if len(secret) != _SECRET_BYTES:
        raise CacheError(f"{path} is damaged; remove it and compile again")
    return secret


def _create_secret(path: Path) -> bytes:
    """Create the secret, unless another process has just created it; return it."""
    with _config_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        temporary = path.with_name(f"{path.name}.{os.getpid()}.{os.urandom(4).hex()}")
        try:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w") as file:
                file.write(os.urandom(_SECRET_BYTES).hex() + "\n")
                file.flush()
                os.fsync(file.fileno())
            with contextlib.suppress(FileExistsError):  # another process was first
                os.link(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    secret = _read_secret(path)
    if secret is None:
        raise CacheError(f"{path} was removed while it was created; run the command again")
    return secret


@contextlib.contextmanager
def _config_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CacheError(
            f"cannot write {path}, which proves that cached programs are yours: "
            f"{error.strerror}; set XDG_CONFIG_HOME to a directory that only you can write, or, if "
            f"only you can write to the cache, set {TRUSTED_CACHES} to the cache directory"
        ) from error
