"""The executables of a program, from the cache, or why they are not there."""

from collections.abc import Mapping, Sequence
from typing import Any

import lowering
from graphtrain.cache import Cache
from graphtrain.config.schema import Program
from graphtrain.errors import MissingProgram
from graphtrain.key import CacheKey
from graphtrain.requests import request_keys
from lowering.target import Target


def load_executables(
    program: Program, cache: Cache, names: Sequence[str], remedy: str
) -> dict[str, Any]:
    """Load the named graphs of a program; nothing is traced.

    Args:
        remedy: the command that would compile them, for the error.

    Raises:
        MissingProgram: a graph was not compiled; says which ingredient of its key differs.
        LoweringError: a program was compiled for another processor.
    """
    keys = request_keys(program)
    artifacts = {name: cache.find(keys[name]) for name in names}
    missing = [name for name, artifact in artifacts.items() if artifact is None]
    if missing:
        reasons = _reasons(cache, {name: keys[name] for name in missing})
        raise MissingProgram("\n".join([*reasons, f"run: {remedy}"]))
    target = Target.parse(program.target)
    backend = lowering.backend(target)
    return {name: backend.load(artifact, target) for name, artifact in artifacts.items()}


def _reasons(cache: Cache, missing: Mapping[str, CacheKey]) -> list[str]:
    """Why graphs are missing; what several have in common is said once."""
    explanations = {name: cache.explain(key) for name, key in missing.items()}
    alike: dict[tuple[str, ...], list[str]] = {}
    for name, explanation in explanations.items():
        alike.setdefault(explanation.lines or (name,), []).append(name)
    return [
        f"no compiled {' and '.join(names)} step: {explanations[names[0]]}"
        for names in alike.values()
    ]
