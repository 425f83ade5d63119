"""Samples and spikes of a run, as a page shows them: lines that are damaged are left out."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

_MAX_TEXT = 4000  # characters of a sample


def parse_sample(line: bytes) -> Mapping[str, Any] | None:
    """Return step, prompt and text in a line of samples.jsonl; None if it is damaged."""
    found = _object(line)
    if found is None or not _is_step(found.get("step")) or not isinstance(found.get("text"), str):
        return None
    prompt = _prompt(found.get("prompt"))
    return {
        "step": found["step"],
        "prompt": _shortened(prompt),
        "text": _shortened(found["text"]),
    }


def parse_spike(line: bytes) -> Mapping[str, Any] | None:
    """Return the facts in a line of spikes.jsonl; None if it is damaged."""
    found = _object(line)
    if found is None or not _is_step(found.get("step")):
        return None
    documents = found.get("documents")
    lists = documents.values() if isinstance(documents, dict) else ()
    names = ("loss", "grad_norm", "loss_limit", "grad_norm_limit", "checkpoint")
    return {
        "step": found["step"],
        "on_spike": str(found.get("on_spike"))[:20],
        "documents": sum(len(one) for one in lists if isinstance(one, list)),
        **{name: _number(found.get(name)) for name in names},
    }


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _is_step(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _number(value: Any) -> float | int | None:
    if type(value) is int and value.bit_length() < 64:
        return value
    return value if type(value) is float and math.isfinite(value) else None


def _prompt(prompt: Any) -> str:
    """Return a prompt as text: one of a conversation has a line for each message."""
    if isinstance(prompt, str):
        return prompt
    messages = prompt if isinstance(prompt, list) else []
    return "\n".join(
        f"{one.get('role')}: {one.get('content')}" for one in messages if isinstance(one, dict)
    )


def _shortened(text: str) -> str:
    """Return a text without its rest, and without lone surrogates, which no answer can contain."""
    text = text.encode("utf-8", "replace").decode()
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}..."
