"""Request keys: cache keys of the graphs that a run needs, computed without tracing.

`compile` and `run` both use this module, so their keys always agree.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Sequence
from pathlib import Path

from graphtrain.cache.key import CacheKey
from graphtrain.config.resolve import mesh_shape
from graphtrain.config.schema import Program
from graphtrain.graphs.open_model import open_language_model
from lowering.machine.target import Target
from lowering.machine.toolchain import Toolchain
from sharding_rules.rules import Rules

GRAPHS = ("init", "train", "evaluate")  # the graphs needed to train and evaluate

_ROOT = Path(__file__).parents[2]
# Sources executed by tracing and lowering; the CLI, the training loop and the cache do not affect
# a compiled program.
_SOURCES = (
    "graphtrain/compile/request_keys.py",
    "graphtrain/config/hf_config.py",
    "graphtrain/config/resolve.py",
    "graphtrain/config/schema",
    "graphtrain/graphs",
    "graphtrain/models",
    "lowering",
    "sharding_rules",
)


def request_keys(program: Program, names: Sequence[str] | None = None) -> dict[str, CacheKey]:
    """Return the request key of each graph of a program, by graph name.

    Args:
        program: settings that can change compiled code.
        names: graphs to include; None for GRAPHS.

    Raises:
        ImportedModelError: the configuration or module of a PyTorch model does not exist.
        LoweringError: the target is unknown.
        ShardingError: the rules are unknown, or the mesh does not fill the target.
    """
    target = Target.parse(program.target)
    settings = dataclasses.asdict(program)
    # The key contains what these settings refer to, not their names.
    del settings["target"], settings["rules"], settings["mesh"]
    settings["model"] = open_language_model(program.model).key_ingredients()
    parts = {
        "program": settings,
        "mesh": dict(mesh_shape(program).axes),
        "rules": dataclasses.asdict(Rules.load(program.rules)),
        "sources": source_digests(),
        "target": target.key_parts(),
        "toolchain": dataclasses.asdict(Toolchain.current(target.platform)),
    }
    return {name: CacheKey.of(graph=name, **parts) for name in names or GRAPHS}


@functools.cache
def source_digests() -> dict[str, str]:
    """Return the digest of each source file that can change a program, by its relative path."""
    digests = {}
    for source in _SOURCES:
        path = _ROOT / source
        files = [path] if path.is_file() else [*path.rglob("*.py"), *path.rglob("*.toml")]
        for file in sorted(files):
            name = file.relative_to(_ROOT).as_posix()
            digests[name] = hashlib.sha256(file.read_bytes()).hexdigest()[:16]
    return digests
