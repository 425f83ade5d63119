"""Who signed a program, and whom this user trusts: an executable is code.

Envelopes are DSSE (https://github.com/secure-systems-lab/dsse), keys Ed25519; both by
securesystemslib, which in-toto and TUF are built on.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from graphtrain.errors import CacheError

_PAYLOAD_TYPE = "application/vnd.graphtrain.statement+json"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_LARGEST = 64 * 1024  # bytes of an envelope; a statement is a few hundred


def default_directory() -> Path:
    """$XDG_CONFIG_HOME/graphtrain/keys, else under ~/.config."""
    home = os.environ.get("XDG_CONFIG_HOME")
    return (Path(home) if home else Path.home() / ".config") / "graphtrain" / "keys"


class Refused(CacheError):
    """Something from elsewhere may not be taken."""


class Keys:
    """A private key to sign with, and the public keys of those whose programs may run here."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._private = directory / "private.pem"
        self._public = directory / "public.json"
        self._trusted = directory / "trusted"

    def new(self) -> dict[str, Any]:
        """Make this user's key pair; return the public half.

        Raises:
            CacheError: there is one already, or it cannot be written.
        """
        signer = _signing().CryptoSigner.generate_ed25519()
        public = signer.public_key.to_dict() | {"keyid": signer.public_key.keyid}
        try:
            self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            descriptor = os.open(self._private, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(signer.private_bytes)
            self._public.write_text(json.dumps(public, indent=1) + "\n")
        except FileExistsError:
            raise CacheError(
                f"{self._private} exists; remove it to begin with another key"
            ) from None
        except OSError as error:
            raise CacheError(f"{self._directory} cannot be written: {error.strerror}") from error
        return public

    def own(self) -> dict[str, Any]:
        """The public half of this user's key.

        Raises:
            CacheError: there is none.
        """
        if not self._public.exists():
            raise CacheError("there is no key to sign with; make one: graphtrain cache key new")
        return _read_key(self._public)

    def trust(self, name: str, file: Path) -> None:
        """Let programs signed with a public key run here.

        Raises:
            CacheError: the file is no public key, or the name is none for a file.
        """
        if not _NAME.fullmatch(name):
            raise CacheError(f"{name!r} cannot name a key: use letters, digits, dots and dashes")
        public = _read_key(file)
        self._trusted.mkdir(parents=True, exist_ok=True, mode=0o700)
        (self._trusted / f"{name}.json").write_text(json.dumps(public, indent=1) + "\n")

    def untrust(self, name: str) -> None:
        """Let them no longer.

        Raises:
            CacheError: there is no such name.
        """
        path = self._trusted / f"{name}.json"
        if not _NAME.fullmatch(name) or not path.exists():
            known = ", ".join(self.trusted()) or "none"
            raise CacheError(f"no trusted key is named {name!r}; there are: {known}")
        path.unlink()

    def trusted(self) -> dict[str, dict[str, Any]]:
        """Public keys by name; this user's own is trusted as "own"."""
        found = {path.stem: _read_key(path) for path in sorted(self._trusted.glob("*.json"))}
        return ({"own": _read_key(self._public)} if self._public.exists() else {}) | found

    def sign(self, statement: Mapping[str, str]) -> bytes:
        """An envelope around a statement.

        Raises:
            CacheError: there is no key to sign with.
        """
        from securesystemslib.dsse import Envelope

        public = _as_key(self.own())
        signer = _signing().CryptoSigner.from_priv_key_uri(f"file2:{self._private}", public)
        envelope = Envelope(json.dumps(dict(statement)).encode(), _PAYLOAD_TYPE, {})
        envelope.sign(signer)
        return json.dumps(envelope.to_dict()).encode()

    def check(self, envelope: bytes, statement: Mapping[str, str], what: str) -> str:
        """The name of the trusted key that signed exactly this statement.

        Args:
            envelope: from elsewhere, and perhaps hostile.

        Raises:
            Refused: it is no envelope, of another statement, or signed by nobody trusted.
        """
        from securesystemslib.dsse import Envelope
        from securesystemslib.exceptions import VerificationError

        try:
            if len(envelope) > _LARGEST:
                raise ValueError
            given = Envelope.from_dict(json.loads(envelope))
            signed = json.loads(given.payload)
        except (ValueError, KeyError, TypeError, RecursionError, AttributeError):
            raise Refused(f"{what}: its signature is no DSSE envelope") from None
        for name, key in self.trusted().items():
            try:
                given.verify([_as_key(key)], 1)
            except VerificationError:
                continue
            if given.payload_type != _PAYLOAD_TYPE or signed != dict(statement):
                raise Refused(f"{what}: {name} signed something else; it was tampered with")
            return name
        signers = ", ".join(keyid[:12] for keyid in given.signatures) or "nobody"
        raise Refused(
            f"{what}: signed by {signers}, whom you do not trust; if you should, get the public "
            "key from its owner: graphtrain cache key trust NAME FILE"
        )


def _read_key(path: Path) -> dict[str, Any]:
    try:
        public = json.loads(path.read_text())
        _as_key(public)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CacheError(
            f"{path} is no public key of graphtrain cache key show ({error})"
        ) from None
    return public


def _as_key(public: Mapping[str, Any]) -> Any:
    about = dict(public)
    return _signing().SSlibKey.from_dict(about.pop("keyid"), about)


def _signing() -> Any:
    try:
        from securesystemslib import signer
    except ModuleNotFoundError:
        raise CacheError("signatures need: pip install 'graphtrain[share]'") from None
    return signer
