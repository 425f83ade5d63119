"""Consistency of a tokenizer.json in itself: a published tokenizer has no digest to compare with.

Damage to an id, to a merge or to a token that a merge makes contradicts the rest of the file.
Damage to settings, or to a token that no merge makes, gives another consistent tokenizer, and is
not found.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from graphtrain.errors import DataError
from sharding_rules.documents import DocumentError, parse_object

_MAX_ID = 1 << 24  # the library takes time and memory for every number up to the largest id


def check_tokenizer(definition: bytes, name: str) -> None:
    """Check ids, merges and added tokens of a tokenizer.json against each other.

    Args:
        definition: Content of the file.
        name: Path for error messages.

    Raises:
        DataError: they contradict each other; the message names a token.
    """
    try:
        contents = parse_object(definition)
        _check(contents)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        reason = f"an entry has another type than it should have ({str(error)[:100]})"
        if isinstance(error, _Problem | DocumentError):
            reason = str(error)
        elif isinstance(error, KeyError):
            reason = f"the entry {error} is missing"
        raise DataError(
            f"{name}: not a tokenizer, or damaged: {reason}; get the file again"
        ) from None


def vocabulary_problem(definition: bytes, embedding: int) -> str | None:
    """Return how the ids of a sound tokenizer.json do not fit an embedding; None if they do.

    An embedding may have more rows than there are ids, and usually has, for padding.

    Args:
        definition: Content of the file.
        embedding: Number of rows of the embedding.
    """
    ids = _ids(parse_object(definition))
    largest, missing = max(ids.values(), default=-1), _first_gap(ids.values())
    if largest >= embedding:
        token = next(token for token, token_id in ids.items() if token_id == largest)
        return f"token {token!r:.80} has id {largest}, but the embedding has {embedding} rows"
    if missing is not None:
        return f"no token has id {missing}, although ids up to {largest} are used"
    return None


class _Problem(ValueError):
    """Contradiction, in words for the user."""


def _check(contents: Mapping[str, Any]) -> None:
    ids = _ids(contents)
    model = contents["model"]
    if isinstance(model.get("vocab"), dict):
        _check_merges(model, ids)


def check_ids(ids: Mapping[str, Any]) -> None:
    """Raise ValueError unless every token has an id of its own, which is not very large."""
    if (
        set(map(type, ids.values())) <= {int}
        and len(set(ids.values())) == len(ids)
        and (not ids or (min(ids.values()) >= 0 and max(ids.values()) < _MAX_ID))
    ):
        return  # a large vocabulary is checked in 0.1 s; the loop only finds what to name
    seen: dict[int, str] = {}
    for token, token_id in ids.items():
        if type(token_id) is not int or not 0 <= token_id < _MAX_ID:
            raise _Problem(f"token {token!r:.80} has the id {token_id!r:.80}")
        if (other := seen.setdefault(token_id, token)) != token:
            raise _Problem(f"the tokens {other!r:.80} and {token!r:.80} both have id {token_id}")


def _ids(contents: Mapping[str, Any]) -> dict[str, int]:
    """Return the id of each token, also of those that were added to the vocabulary."""
    vocab = contents["model"]["vocab"]
    if isinstance(vocab, list):  # Unigram: pieces with their scores, in the order of the ids
        ids = {piece: index for index, (piece, _) in enumerate(vocab)}
    else:
        ids = dict(vocab)
    for entry in contents.get("added_tokens") or ():
        token, token_id = entry["content"], entry["id"]
        if ids.setdefault(token, token_id) != token_id:
            raise _Problem(
                f"token {token!r:.80} has id {ids[token]} in the vocabulary and id "
                f"{token_id!r:.80} among the added tokens"
            )
    check_ids(ids)
    return ids


def _check_merges(model: Mapping[str, Any], ids: Mapping[str, int]) -> None:
    prefix = model.get("continuing_subword_prefix") or ""
    for left, right in _merges(model.get("merges") or ()):
        for token in (left, right, left + right.removeprefix(prefix)):
            if token not in ids:
                raise _Problem(f"a merge needs the token {token!r:.80}, which is not there")


def _merges(merges: Iterable[Any]) -> Iterator[tuple[str, str]]:
    for merge in merges:
        if isinstance(merge, str) and merge.startswith("#version"):
            continue
        left, right = merge.split(" ") if isinstance(merge, str) else merge
        yield left, right


def _first_gap(ids: Iterable[int]) -> int | None:
    return next((want for want, found in enumerate(sorted(ids)) if want != found), None)
