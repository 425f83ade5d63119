"""Signatures of cached programs, and the public keys that the user trusts.

An executable is code, so a program from a remote cache is loaded only if a trusted key signed it.
Signatures are DSSE envelopes (https://github.com/secure-systems-lab/dsse) with Ed25519 keys, both
from securesystemslib, on which in-toto and TUF are built.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from graphtrain.cache.config_directory import config_directory
from graphtrain.errors import CacheError
from lowering.machine.extras import optional_import

_PAYLOAD_TYPE = "application/vnd.graphtrain.statement+json"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_KEY_ID = re.compile(r"[0-9a-f]{64}")  # SHA-256 of the public key
_MAX_SIGNATURES = 16  # in one envelope; graphtrain writes one
MAX_ENVELOPE_BYTES = 64 * 1024  # bytes of an envelope; a statement has a few hundred


def default_directory() -> Path:
    """Return the key directory: $XDG_CONFIG_HOME/graphtrain/keys, else under ~/.config."""
    return config_directory() / "keys"


class UntrustedError(CacheError):
    """A program or request from a remote cache is not accepted."""


class UnknownSigner(UntrustedError):
    """No key that the user trusts signed it; it may be as its owner wrote it."""


class KeyStore:
    """The user's private signing key, and the public keys whose programs may be loaded."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._private = directory / "private.pem"
        self._public = directory / "public.json"
        self._trusted = directory / "trusted"

    def create(self) -> dict[str, Any]:
        """Create this user's key pair; return the public key.

        Raises:
            CacheError: a key exists already, or the directory is not writable.
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
                f"{self._private} exists; remove it first to create another key"
            ) from None
        except OSError as error:
            raise CacheError(f"{self._directory} cannot be written: {error.strerror}") from error
        return public

    def own_public_key(self) -> dict[str, Any]:
        """Return this user's public key.

        Raises:
            CacheError: there is no key, or it cannot be read.
        """
        if not self._public.exists():
            raise CacheError("there is no signing key; create one: graphtrain cache key new")
        return _read_key(self._public)

    def trust(self, name: str, file: Path) -> None:
        """Trust a public key, so that programs signed with it are accepted.

        Args:
            name: name under which the key is stored.
            file: public key, as printed by `graphtrain cache key show`.

        Raises:
            CacheError: the file is not a public key, or the name is not a valid file name.
        """
        if not _NAME.fullmatch(name):
            raise CacheError(
                f"{name!r} is not a valid key name: use up to 64 letters, digits, dots, dashes and "
                "underscores, beginning with a letter or digit"
            )
        public = _read_key(file)
        self._trusted.mkdir(parents=True, exist_ok=True, mode=0o700)
        (self._trusted / f"{name}.json").write_text(json.dumps(public, indent=1) + "\n")

    def untrust(self, name: str) -> None:
        """Stop trusting the public key of this name.

        Raises:
            CacheError: there is no trusted key of this name.
        """
        path = self._trusted / f"{name}.json"
        if not _NAME.fullmatch(name) or not path.exists():
            names = ", ".join(self.trusted()) or "none"
            raise CacheError(f"no trusted key is named {name!r}; trusted keys: {names}")
        path.unlink()

    def trusted(self) -> dict[str, dict[str, Any]]:
        """Return the trusted public keys by name; this user's own key is named "own"."""
        trusted_keys = {path.stem: _read_key(path) for path in sorted(self._trusted.glob("*.json"))}
        return ({"own": _read_key(self._public)} if self._public.exists() else {}) | trusted_keys

    def sign(self, statement: Mapping[str, str]) -> bytes:
        """Sign a statement; return the DSSE envelope as JSON.

        Raises:
            CacheError: there is no signing key.
        """
        with optional_import("a signature"):
            from securesystemslib.dsse import Envelope

        public = _as_key(self.own_public_key())
        signer = _signing().CryptoSigner.from_priv_key_uri(f"file2:{self._private}", public)
        envelope = Envelope(json.dumps(dict(statement)).encode(), _PAYLOAD_TYPE, {})
        envelope.sign(signer)
        return json.dumps(envelope.to_dict()).encode()

    def verify(self, envelope: bytes, statement: Mapping[str, str], what: str) -> str:
        """Return the name of the trusted key that signed exactly this statement.

        Args:
            envelope: untrusted bytes from the remote cache.
            statement: expected contents of the envelope.
            what: name of the signed object in errors.

        Raises:
            UntrustedError: not an envelope, of another statement, or not signed by a trusted key.
        """
        name, signed = self.signed_statement(envelope, what)
        if signed != dict(statement):
            raise UntrustedError(
                f"{what}: the signature of key {name!r} is for other contents; it was tampered with"
            )
        return name

    def signed_statement(self, envelope: bytes, what: str) -> tuple[str, Any]:
        """Return the name of the trusted key that signed an envelope, and the signed JSON.

        Args:
            envelope: untrusted bytes from the remote cache.
            what: name of the signed object in errors.

        Raises:
            UntrustedError: not an envelope, or the signature of a trusted key is wrong.
            UnknownSigner: not signed by a trusted key.
        """
        with optional_import("a signature"):
            from securesystemslib.dsse import Envelope
            from securesystemslib.exceptions import VerificationError

        try:
            body = _parse_envelope(envelope)
            parsed_envelope = Envelope.from_dict(body)
            statement = json.loads(parsed_envelope.payload)
        except (ValueError, KeyError, TypeError, RecursionError, AttributeError):
            raise UntrustedError(f"{what}: its signature is not a DSSE envelope") from None
        trusted = self.trusted()
        for name, key in trusted.items():
            try:
                parsed_envelope.verify([_as_key(key)], 1)
            except VerificationError:
                continue
            return name, statement
        for name, key in trusted.items():
            if key["keyid"] in parsed_envelope.signatures:
                raise UntrustedError(
                    f"{what}: the signature of key {name!r} is not valid; it was tampered with"
                )
        signers = ", ".join(keyid[:12] for keyid in parsed_envelope.signatures) or "nobody"
        raise UnknownSigner(
            f"{what}: signed by {signers}, which is not a trusted key; to trust it, get the public "
            "key from its owner and run: graphtrain cache key trust NAME FILE"
        )


def _parse_envelope(envelope: bytes) -> dict[str, Any]:
    """Return an envelope whose fields have the types that securesystemslib expects.

    Raises:
        ValueError: it is too large, not JSON, or has other fields.
        RecursionError: its JSON is nested too deeply.
    """
    if len(envelope) > MAX_ENVELOPE_BYTES:
        raise ValueError("too large")
    body = json.loads(envelope)
    signatures = body["signatures"] if isinstance(body, dict) else None
    if (
        not isinstance(signatures, list)
        or len(signatures) > _MAX_SIGNATURES
        or body.get("payloadType") != _PAYLOAD_TYPE
        or not _is_base64(body.get("payload"))
        or not all(map(_is_signature, signatures))
    ):
        raise ValueError("not an envelope of graphtrain")
    return {name: body[name] for name in ("payload", "payloadType", "signatures")}


def _is_signature(signature: object) -> bool:
    return (
        isinstance(signature, dict)
        and signature.keys() == {"keyid", "sig"}
        and isinstance(signature["keyid"], str)
        and _KEY_ID.fullmatch(signature["keyid"]) is not None
        and _is_base64(signature["sig"])
    )


def _is_base64(text: object) -> bool:
    return isinstance(text, str) and text.isascii()


def _read_key(path: Path) -> dict[str, Any]:
    try:
        public = json.loads(path.read_text())
        _as_key(public)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CacheError(
            f"{path} is not a public key as printed by graphtrain cache key show ({error})"
        ) from None
    return public


def _as_key(public: Mapping[str, Any]) -> Any:
    about = dict(public)
    return _signing().SSlibKey.from_dict(about.pop("keyid"), about)


def _signing() -> Any:
    with optional_import("a signature"):
        from securesystemslib import signer
    return signer
