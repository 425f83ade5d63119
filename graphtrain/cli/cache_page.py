"""Lines of `graphtrain cache show`: the facts of one program, in words."""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from graphtrain.cache import CacheEntry
from graphtrain.cache.descriptions import describe_settings
from graphtrain.cache.sizes import format_size

_DIGITS = 12  # shown of the digest of a request
_REQUESTS = 5  # shown of a program
_PARAMETERS = ("state/parameters/", "parameters/")  # arrays of a graph that are parameters


def program_page(
    facts: Mapping[str, Any], entry: CacheEntry, *, pinned: bool
) -> Iterator[tuple[str, str]]:
    """Yield names and values of the facts of a program; what is not known is left out.

    Args:
        facts: the record, as `Cache.describe` returns it.
        entry: the program in a listing.
        pinned: whether gc never removes it.
    """
    lines = {
        "program": entry.program,
        "graph": entry.graph,
        "target": entry.target,
        "configuration": entry.origin.configuration,
        **_settings(facts, entry),
        "versions": _versions(facts),
        "size": _size(facts, entry),
        "memory": _memory(facts),
        "compiled": _compiled(facts, entry),
        "last used": f"{utc_minute(entry.last_used)} UTC",
        "pinned": "yes: gc does not remove it" if pinned else "no",
    }
    yield from ((name, text) for name, text in lines.items() if text)
    yield from _requests(facts["requests"])


def utc_minute(seconds: float) -> str:
    """Return a time in UTC, to the minute."""
    return time.strftime("%Y-%m-%d %H:%M", time.gmtime(seconds))


def _settings(facts: Mapping[str, Any], entry: CacheEntry) -> dict[str, str]:
    settings = vars(describe_settings(entry.settings))
    parameters = _parameters(facts["record"])
    if parameters:
        counted = f"{parameters:,} parameters"
        settings |= {"model": ", ".join(filter(None, [settings["model"], counted]))}
    return settings


def _parameters(record: Mapping[str, Any]) -> int:
    """Return the number of parameters among the inputs of a graph, or else its outputs."""
    counts = (_count(record.get(arrays)) for arrays in ("inputs", "outputs"))
    return next(filter(None, counts), 0)


def _count(arrays: object) -> int:
    if not isinstance(arrays, Mapping):
        return 0
    try:
        shapes = [one["shape"] for name, one in arrays.items() if name.startswith(_PARAMETERS)]
        return sum(map(math.prod, shapes))
    except (KeyError, TypeError):  # not a record of ours
        return 0


def _versions(facts: Mapping[str, Any]) -> str:
    toolchain = facts["key"].get("toolchain")
    versions = toolchain.get("versions") if isinstance(toolchain, Mapping) else None
    known = versions.items() if isinstance(versions, Mapping) else ()
    return ", ".join(f"{name} {one}" for name, one in known)


def _size(facts: Mapping[str, Any], entry: CacheEntry) -> str:
    executable = facts["payload"]["bytes"]
    return (
        f"{format_size(entry.nbytes)}: executable {format_size(executable)}, record "
        f"{format_size(entry.nbytes - executable)}"
    )


def _memory(facts: Mapping[str, Any]) -> str:
    memory = facts["record"].get("memory")
    peak = memory.get("peak") if isinstance(memory, Mapping) else None
    return f"{format_size(peak)} per device at the peak" if isinstance(peak, int) else ""


def _compiled(facts: Mapping[str, Any], entry: CacheEntry) -> str:
    seconds = facts["record"].get("compile_seconds")
    took = f", in {seconds:.1f} s" if isinstance(seconds, int | float) else ""
    by = f", by {entry.origin.user}" if entry.origin.user else ""
    return f"{facts['created'].replace('T', ' ').removesuffix('Z')} UTC{took}{by}"


def _requests(requests: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yield the requests that a program answers, newest first."""
    newest = sorted(requests, key=lambda one: one["created"], reverse=True)
    for index, one in enumerate(newest[:_REQUESTS]):
        day = one["created"].replace("T", " ").removesuffix("Z")
        words = [one["digest"][:_DIGITS], f"{day} UTC", one["user"], one["configuration"]]
        yield "" if index else "used by", "  ".join(filter(None, words))
    if len(newest) > _REQUESTS:
        yield "", f"and {len(newest) - _REQUESTS} more; --json lists them"
