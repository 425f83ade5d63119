"""Which graphs a run needs, and the key each is asked for by; nothing is traced.

`compile` and `run` both ask here, so they cannot disagree.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Sequence
from pathlib import Path

from graphtrain.cache.key import CacheKey
from graphtrain.config.resolve import mesh_shape
from graphtrain.config.schema import Program, is_imported
from lowering.machine.target import Target
from lowering.machine.toolchain import Toolchain
from sharding_rules.rules import Rules

GRAPHS = ("init", "train", "evaluate")  # what training and evaluating a program takes

_ROOT = Path(__file__).parents[2]
# What tracing and lowering execute; the command, the loop and the cache are not in a program.
_SOURCES = (
    "graphtrain/compile/request_keys.py",
    "graphtrain/config/hf_config.py",
    "graphtrain/config/resolve.py",
    "graphtrain/config/schema.py",
    "graphtrain/graphs",
    "graphtrain/models",
    "lowering",
    "sharding_rules",
)


def request_keys(program: Program, names: Sequence[str] | None = None) -> dict[str, CacheKey]:
    """The request key of every graph of a program, or of those named.

    Raises:
        ImportedModelError: the configuration or the module of a model of PyTorch is not there.
        LoweringError: no such target.
        ShardingError: no such rules, or a mesh that does not fill the target.
    """
    target = Target.parse(program.target)
    settings = dataclasses.asdict(program)
    # What these name is in the key, not their names.
    del settings["target"], settings["rules"], settings["mesh"]
    if is_imported(program.model):
        from graphtrain.torch_frontend.source import ingredients

        settings["model"] = ingredients(program.model)
    parts = {
        "program": settings,
        "mesh": dict(mesh_shape(program).axes),
        "rules": dataclasses.asdict(Rules.load(program.rules)),
        "sources": source_digests(),
        "target": target.ingredients(),
        "toolchain": dataclasses.asdict(Toolchain.here(target.platform)),
    }
    return {name: CacheKey.of(graph=name, **parts) for name in names or GRAPHS}


@functools.cache
def source_digests() -> dict[str, str]:
    """Digest of each of our files that can change a program, by its path in the source tree."""
    digests = {}
    for source in _SOURCES:
        path = _ROOT / source
        files = [path] if path.is_file() else [*path.rglob("*.py"), *path.rglob("*.toml")]
        for file in sorted(files):
            name = file.relative_to(_ROOT).as_posix()
            digests[name] = hashlib.sha256(file.read_bytes()).hexdigest()[:16]
    return digests
