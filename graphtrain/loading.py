"""The executables of a program, from the cache, or why they are not there."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lowering
from graphtrain.cache import Cache
from graphtrain.config.schema import Program
from graphtrain.errors import MissingProgram
from graphtrain.key import CacheKey
from graphtrain.requests import request_keys
from lowering.target import Target


def load_executables(
    program: Program, cache: Cache, names: Sequence[str], config: Path
) -> dict[str, Any]:
    """Load the named graphs of a program; nothing is traced.

    Raises:
        MissingProgram: a graph was not compiled; says which ingredient of its key differs.
        LoweringError: a program was compiled for another processor.
    """
    keys = request_keys(program)
    artifacts = {name: cache.find(keys[name]) for name in names}
    missing = [name for name, artifact in artifacts.items() if artifact is None]
    if missing:
        raise MissingProgram(
            _explain(program, cache, {name: keys[name] for name in missing}, config)
        )
    target = Target.parse(program.target)
    backend = lowering.backend(target)
    return {name: backend.load(artifact, target) for name, artifact in artifacts.items()}


def _explain(program: Program, cache: Cache, missing: Mapping[str, CacheKey], config: Path) -> str:
    lines = [f"no compiled program for {config} on {program.target}:"]
    lines += [f"{name}: {cache.explain(key)}" for name, key in missing.items()]
    lines.append(f"run: graphtrain compile {config} --target {program.target}")
    return "\n".join(lines)
