"""Signed objects of a remote cache: their names, what is signed, and their verification.

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

from graphtrain.cache.layout import LAYOUT, is_digest
from graphtrain.cache.programs import (
    MAX_JSON_BYTES,
    UnusableEntry,
    check_imported,
    decode_record,
)
from graphtrain.cache.remote import ObjectStore
from graphtrain.cache.store import Cache
from graphtrain.cache.trust import MAX_ENVELOPE_BYTES, KeyStore, UntrustedError

_MAX_REQUEST_BYTES = 16 * 1024 * 1024  # a request has a few hundred kilobytes
_MAX_RECORD_BYTES = MAX_JSON_BYTES


def list_digests(remote: ObjectStore, kind: str) -> frozenset[str]:
    """Return the digests that the remote cache lists under a prefix; ignore other names."""
    prefix = f"{LAYOUT}/{kind}/"
    names = (name.removeprefix(prefix) for name in remote.names(prefix) if name.endswith(".json"))
    return frozenset(filter(is_digest, (name.removesuffix(".json") for name in names)))


def send_program(
    remote: ObjectStore, keys: KeyStore, digest: str, record: bytes, payload: bytes
) -> None:
    """Upload the payload of a program, its signature and its record, in this order."""
    remote.put(_payload_name(record), payload)
    remote.put(_signature_name(record), keys.sign(_program_statement(digest, record, payload)))
    remote.put(_record_name(digest), record)


def send_request(remote: ObjectStore, keys: KeyStore, digest: str, text: bytes) -> None:
    """Upload the file of a request and its signature."""
    remote.put(_signature_name(text), keys.sign(_request_statement(digest, text)))
    remote.put(_request_name(digest), text)


def read_request(cache: Cache, remote: ObjectStore, keys: KeyStore, digest: str) -> bytes | None:
    """Return the file of a request, after verifying it; None if the remote cache lacks it."""
    text = remote.get(_request_name(digest), _MAX_REQUEST_BYTES)
    if text is None:
        return None
    label = f"{remote.url}: request {digest}"
    keys.verify(_envelope(remote, text, label), _request_statement(digest, text), label)
    cache.program_of_request_file(text, digest)
    return text


def read_program(remote: ObjectStore, keys: KeyStore, digest: str) -> tuple[bytes, bytes]:
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
