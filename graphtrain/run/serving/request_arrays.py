"""Sampling parameters of a request as the arrays that the programs take."""

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from graphtrain.config.schema.serve import STOP_TOKENS
from graphtrain.errors import GraphtrainError
from graphtrain.run.serving.engine_protocol import SamplingParameters

_NEVER = -1e30  # added to the logits of tokens that the tokenizer does not have


def request_arrays(
    sampling: SamplingParameters, prompt: Sequence[int], vocab: int, tokens: int
) -> dict[str, Any]:
    """Return the arrays of `graphs.sampling.request_specs`.

    Args:
        sampling: How tokens are chosen.
        prompt: Token ids of the prompt, which the repetition penalty counts.
        vocab: Rows of the model's embedding.
        tokens: Number of tokens of the tokenizer; no other is chosen.

    Raises:
        GraphtrainError: there are too many stop tokens, or a bias is of no token.
    """
    if len(sampling.stop_tokens) > STOP_TOKENS:
        raise GraphtrainError(
            f"{len(sampling.stop_tokens)} stop tokens; at most {STOP_TOKENS} are supported"
        )
    bias = np.zeros(vocab, np.float32)
    bias[tokens:] = _NEVER
    for token, value in sampling.logit_bias.items():
        if not 0 <= token < tokens:
            raise GraphtrainError(f"logit_bias: token {token} is not in the vocabulary")
        bias[token] = value
    stop = np.full(STOP_TOKENS, -1, np.int32)
    stop[: len(sampling.stop_tokens)] = sampling.stop_tokens
    return {
        "temperature": np.float32(sampling.temperature),
        "top_k": np.int32(min(sampling.top_k, vocab)),
        "top_p": np.float32(sampling.top_p),
        "min_p": np.float32(sampling.min_p),
        "repetition_penalty": np.float32(sampling.repetition_penalty),
        "presence_penalty": np.float32(sampling.presence_penalty),
        "frequency_penalty": np.float32(sampling.frequency_penalty),
        "seed": _seed_word(sampling.seed),
        "remaining": np.int32(min(sampling.max_tokens, 2**30)),
        "stop": stop,
        "bias": bias,
        "prompt": np.bincount(np.asarray(prompt, np.int64), minlength=vocab).astype(np.int32),
    }


def _seed_word(seed: int) -> np.uint32:
    """Return the 32 bits that a program takes: the seed, or a digest of one that has more."""
    if 0 <= seed < 2**32:
        return np.uint32(seed)
    digest = hashlib.blake2b(str(seed).encode(), digest_size=4).digest()
    return np.uint32(int.from_bytes(digest, "little"))
