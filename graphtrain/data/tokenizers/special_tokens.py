"""Tokens at both ends of a document: those that a tokenizer adds, and those of --bos and --no-bos.

BOS is written as transformers writes it: by the post-processor of tokenizer.json, else by
add_bos_token of tokenizer_config.json.
"""

from typing import Any

import numpy as np

from graphtrain.data.tokenizers.protocol import Tokenizer
from graphtrain.errors import DataError
from sharding_rules.documents import DocumentError, parse_object

TOKENIZER_CONFIG = "tokenizer_config.json"  # file next to a tokenizer


def document_prefix(tokenizer: Tokenizer, bos: bool | None) -> tuple[int, ...]:
    """Return the token ids that begin a document or a prompt.

    Args:
        tokenizer: The tokenizer.
        bos: Begin with the beginning-of-sequence token. None: if the tokenizer does so by itself.

    Raises:
        DataError: the token is required, and the tokenizer has none.
    """
    if bos is None or (bos and tokenizer.prefix):
        return tokenizer.prefix
    if not bos:
        return ()
    if tokenizer.bos is None:
        raise DataError(
            "the tokenizer has no beginning-of-sequence token; omit --bos, or name the token as "
            f"bos_token in its {TOKENIZER_CONFIG}"
        )
    return (tokenizer.bos,)


def end_document(
    text: str, tokens: np.ndarray, spans: np.ndarray, tokenizer: Tokenizer, is_trained: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Append what the tokenizer puts after a text by itself, as processors of transformers do.

    They add neither BOS nor EOS to a conversation that begins with the text of BOS.

    Args:
        text: Conversation, as the chat template writes it.
        tokens: Its tokens.
        spans: Begin and end of each span to train on: (2 * spans,).
        tokenizer: Has the suffix.
        is_trained: Whether to train on the suffix.

    Returns:
        The tokens and the spans.

    Source: `apply_chat_template` of ProcessorMixin of transformers
    """
    begin, suffix = tokenizer.special.get("bos_token"), tokenizer.suffix
    if not suffix or (begin and text.startswith(begin)):
        return tokens, spans
    if is_trained:
        spans = np.append(spans, np.array([len(tokens), len(tokens) + len(suffix)], np.int32))
    return np.append(tokens, np.array(suffix, np.int32)), spans


def added_bos(config: bytes, name: str, default: str) -> str | None:
    """Return the token that add_bos_token of a tokenizer_config.json puts before a text, if any.

    Applies to tokenizers without a tokenizer.json, whose post-processor would decide.

    Args:
        config: Content of the tokenizer_config.json.
        name: Path for error messages.
        default: BOS of a tokenizer whose config names none.

    Raises:
        DataError: `config` is not a JSON object, or its bos_token is not a token.
    """
    fields = read_companion(config, name)
    if fields.get("add_bos_token") is not True:
        return None
    return token_text(fields, "bos_token", name) or default


def token_text(fields: dict[str, Any], role: str, name: str) -> str | None:
    """Return the text of a special token in a tokenizer_config.json; None if it has none.

    Args:
        fields: Content of the file.
        role: Name of the entry, for example eos_token.
        name: Path for error messages.

    Raises:
        DataError: the entry is not a token.
    """
    token = fields.get(role)
    text = token.get("content") if isinstance(token, dict) else token
    if text is not None and not isinstance(text, str):
        raise DataError(f"{name}: {role} = {token!r:.80} is not a token")
    return text


def read_companion(content: bytes, name: str) -> dict[str, Any]:
    """Parse a JSON file next to a tokenizer.

    Raises:
        DataError: the content is not a JSON object.
    """
    try:
        return parse_object(content)
    except DocumentError as error:
        raise DataError(f"{name}: not JSON of a tokenizer ({error})") from None
