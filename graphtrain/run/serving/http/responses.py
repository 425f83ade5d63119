"""Answers of OpenAI's interface: whole, or as the chunks of a stream."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

from graphtrain.data.tokenizers.protocol import Tokenizer
from graphtrain.run.serving.detokenizer import IncrementalDetokenizer
from graphtrain.run.serving.engine_protocol import TokenChoice
from graphtrain.run.serving.sequence import FinishReason, TextToken, Usage

_LEAST_LOG_PROB = -9999.0  # JSON has no infinity
_REPLACEMENT = "\ufffd"


class Answer:
    """Fields that the answer to one request and all its chunks have.

    Args:
        kind: "text_completion" or "chat.completion".
        model: Name of the model.
        tokenizer: Decodes the tokens of log-probabilities.
    """

    def __init__(self, kind: str, model: str, tokenizer: Tokenizer) -> None:
        prefix = "cmpl-" if kind == "text_completion" else "chatcmpl-"
        self._kind, self._model = kind, model
        self._id, self._created = prefix + secrets.token_hex(12), int(time.time())
        self._decode = tokenizer.decode
        self._text_of = lru_cache(10_000)(lambda token: tokenizer.decode([token]))
        self._piece_bytes = tokenizer.piece_bytes

    def whole(self, choices: Sequence[Any], usage: dict[str, Any]) -> dict[str, Any]:
        return self._object(self._kind, choices) | {"usage": usage}

    def chunk(self, choices: Sequence[Any], usage: dict[str, Any] | None = None) -> dict[str, Any]:
        is_chat = self._kind == "chat.completion"
        body = self._object(f"{self._kind}.chunk" if is_chat else self._kind, choices)
        return body if usage is None else body | {"usage": usage}

    def _object(self, kind: str, choices: Sequence[Any]) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }

    def completion_logprobs(
        self, tokens: Iterable[TextToken], count: int, shift: int = 0
    ) -> dict[str, Any]:
        """Return log-probabilities of generated tokens; `shift` characters precede the text."""
        tokens = tuple(tokens)
        pairs = [(token.choice, token.offset + shift) for token in tokens]
        texts = [
            self._label(token.choice.token) if token.cut_text is None else token.cut_text
            for token in tokens
        ]
        return self._completion_logprobs(pairs, count) | {"tokens": texts}

    def prompt_logprobs(
        self, prompt: Sequence[int], scores: Sequence[TokenChoice | None], count: int
    ) -> dict[str, Any]:
        """Return log-probabilities of the tokens of a prompt; the first has none.

        A token that ends in the midst of a character adds no character to the offsets.
        """
        pairs: list[tuple[TokenChoice | None, int]] = []
        offset, texts, detokenizer = 0, [], IncrementalDetokenizer(self._decode, ())
        for token, score in zip(prompt, scores, strict=True):
            added = detokenizer.push(token)
            pairs.append((score, offset + detokenizer.begin))
            texts.append(self._label(token))
            offset += len(added)
        result = self._completion_logprobs(pairs, count)
        return result | {"tokens": texts}

    def _completion_logprobs(
        self, pairs: Sequence[tuple[TokenChoice | None, int]], count: int
    ) -> dict[str, Any]:
        choices = [choice for choice, _ in pairs]
        return {
            "tokens": [choice and self._label(choice.token) for choice in choices],
            "token_logprobs": [choice and _finite(choice.log_prob) for choice in choices],
            "top_logprobs": [choice and self._top(choice, count) for choice in choices],
            "text_offset": [offset for _, offset in pairs],
        }

    def _top(self, choice: TokenChoice, count: int) -> dict[str, float]:
        """Return log-probabilities by text: the most likely tokens and the one that was chosen."""
        pairs = [*reversed(choice.top[:count]), (choice.token, choice.log_prob)]
        # Of tokens with the same text, the last one counts: the most likely, or the chosen one.
        return {self._label(token): _finite(log_prob) for token, log_prob in pairs}

    def _label(self, token: int) -> str:
        """Return the text of a token; of a part of a character its bytes, as OpenAI writes them."""
        text = self._text_of(token)
        data = self._bytes_of(token, text)
        if data is None:
            return text
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def _bytes_of(self, token: int, text: str) -> bytes | None:
        """Return the bytes of a token, whose text has U+FFFD in place of parts of characters."""
        return self._piece_bytes(token) if _REPLACEMENT in text else text.encode()

    def chat_logprobs(self, tokens: Iterable[TextToken], count: int) -> dict[str, Any]:
        content = [
            self._chat_token(token.choice.token, self._visible_text(token), token.choice.log_prob)
            | {"top_logprobs": [self._top_token(*top) for top in token.choice.top[:count]]}
            for token in tokens
        ]
        return {"content": content, "refusal": None}

    def _top_token(self, token: int, log_prob: float) -> dict[str, Any]:
        return self._chat_token(token, self._text_of(token), log_prob)

    def _visible_text(self, token: TextToken) -> str:
        """Return the text of a token as far as the answer has it: up to a stop string."""
        return self._text_of(token.choice.token) if token.cut_text is None else token.cut_text

    def _chat_token(self, token: int, text: str, log_prob: float) -> dict[str, Any]:
        data = self._bytes_of(token, text)
        numbers = None if data is None else list(data)
        return {"token": text, "logprob": _finite(log_prob), "bytes": numbers}


def completion_choice(
    index: int, text: str, logprobs: dict[str, Any] | None, reason: FinishReason | None
) -> dict[str, Any]:
    """Return a choice of a completion, whole or a piece of it."""
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}


def chat_choice(
    index: int, text: str, logprobs: dict[str, Any] | None, reason: FinishReason | None
) -> dict[str, Any]:
    """Return a choice of an answer."""
    message = {"role": "assistant", "content": text, "refusal": None}
    return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}


def chat_chunk_choice(
    index: int,
    delta: dict[str, Any],
    logprobs: dict[str, Any] | None = None,
    reason: FinishReason | None = None,
) -> dict[str, Any]:
    """Return a piece of an answer."""
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}


def usage_of(prompts: Iterable[Sequence[int]], usages: Iterable[Usage | None]) -> dict[str, Any]:
    """Return the usage of a request: each prompt counts once, however many samples it has."""
    ended = [usage for usage in usages if usage is not None]
    prompt_tokens = sum(map(len, prompts))
    generated = sum(usage.generated_tokens for usage in ended)
    cached = min(prompt_tokens, sum(usage.cached_tokens for usage in ended))
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": generated,
        "total_tokens": prompt_tokens + generated,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def joined_logprobs(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Return the log-probabilities of a prompt and of the text that follows it."""
    return {name: first[name] + second[name] for name in first}


def _finite(log_prob: float) -> float:
    return max(float(log_prob), _LEAST_LOG_PROB)
