"""Which graphs a run needs, and the key each is asked for by; nothing is traced.

`compile` and `run` both ask here, so they cannot disagree.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Sequence
from pathlib import Path

from graphtrain.cache.key import CacheKey
from graphtrain.config.schema import Program, check_pipeline, is_imported
from graphtrain.errors import PlanError
from lowering.machine.target import Target
from lowering.machine.toolchain import Toolchain
from sharding_rules.mesh import MeshShape
from sharding_rules.pipeline import Stages
from sharding_rules.rules import Rules

GRAPHS = ("init", "train", "evaluate")  # what training and evaluating a program takes

_ROOT = Path(__file__).parents[2]
# What tracing and lowering execute; the command, the loop and the cache are not in a program.
_SOURCES = (
    "graphtrain/graphs/dispatch.py",
    "graphtrain/models/chunked_loss.py",
    "graphtrain/models/chunk_size.py",
    "graphtrain/config/schema.py",
    "graphtrain/graphs/deferred_reduction.py",
    "graphtrain/models/shapes.py",
    "graphtrain/graphs/decode.py",
    "graphtrain/models/loss.py",
    "graphtrain/models",
    "graphtrain/graphs/objectives.py",
    "graphtrain/graphs/optimizer.py",
    "graphtrain/graphs/pipelined.py",
    "graphtrain/compile/request_keys.py",
    "graphtrain/graphs/build.py",
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


def mesh_shape(program: Program) -> MeshShape:
    """The mesh of a program, with the axis that takes the rest of the target's devices."""
    sizes = dataclasses.asdict(program.mesh)
    return MeshShape.resolve(sizes, Target.parse(program.target).devices)


def stages_of(program: Program) -> Stages | None:
    """How the layers of a program are divided among stages; None where it is no pipeline.

    Raises:
        LoweringError: no such target.
        ShardingError: layers or microbatches that the stages cannot take.
    """
    stages = mesh_shape(program).axes.get("stage", 1)
    if stages == 1 or "stage" not in Rules.load(program.rules).activations.get("stages", ()):
        return None
    return check_pipeline(program, stages)


def rows_of_layers(program: Program) -> tuple[int | None, ...]:
    """The layer in each row of the stacks that a run keeps; none in a row that fills a stage.

    Raises:
        PlanError: the model is one of PyTorch, whose layers have no rows of ours.
    """
    if is_imported(program.model):
        raise PlanError(
            "this knows the layers of the native decoder, not those of model.torch or model.hf; "
            "their checkpoints go into any mesh when a run goes on from them"
        )
    stages = stages_of(program)
    return tuple(range(program.model.layers)) if stages is None else stages.rows


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
