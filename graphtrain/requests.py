"""Request keys: cache keys of the graphs that a run needs, computed without tracing.

`compile` and `run` both use this module, so their keys always agree.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Sequence
from pathlib import Path

from graphtrain.config.schema import Program, check_pipeline, is_imported
from graphtrain.errors import PlanError
from graphtrain.key import CacheKey
from lowering.target import Target
from lowering.toolchain import Toolchain
from sharding_rules.mesh import MeshShape
from sharding_rules.pipeline import Stages
from sharding_rules.rules import Rules

GRAPHS = ("init", "train", "evaluate")  # the graphs needed to train and evaluate

_ROOT = Path(__file__).parent.parent
# Sources executed by tracing and lowering; the CLI, the training loop and the cache do not affect
# a compiled program.
_SOURCES = (
    "graphtrain/architecture.py",
    "graphtrain/chunked.py",
    "graphtrain/chunks.py",
    "graphtrain/config/schema.py",
    "graphtrain/deferred.py",
    "graphtrain/estimates/arrays.py",
    "graphtrain/extending.py",
    "graphtrain/loss.py",
    "graphtrain/models",
    "graphtrain/objectives.py",
    "graphtrain/optimizer.py",
    "graphtrain/pipelined.py",
    "graphtrain/requests.py",
    "graphtrain/steps.py",
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
    if is_imported(program.model):
        from graphtrain.torch_models.source import ingredients

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
    """Return the mesh of a program; one axis may be sized to use all remaining devices."""
    sizes = dataclasses.asdict(program.mesh)
    return MeshShape.resolve(sizes, Target.parse(program.target).devices)


def stages_of(program: Program) -> Stages | None:
    """Return the assignment of layers to pipeline stages, or None without a pipeline.

    Raises:
        LoweringError: the target is unknown.
        ShardingError: the layers or microbatches cannot be divided among the stages.
    """
    stages = mesh_shape(program).axes.get("stage", 1)
    if stages == 1 or "stage" not in Rules.load(program.rules).activations.get("stages", ()):
        return None
    return check_pipeline(program, stages)


def rows_of_layers(program: Program) -> tuple[int | None, ...]:
    """Return the layer in each row of a run's stacked arrays; None for a padding row of a stage.

    Raises:
        PlanError: the model is imported from PyTorch, whose layers are not stacked this way.
    """
    if is_imported(program.model):
        raise PlanError(
            "this operation supports only the native decoder, not model.torch or model.hf; "
            "a run can resume their checkpoints on any mesh without it"
        )
    stages = stages_of(program)
    return tuple(range(program.model.layers)) if stages is None else stages.rows


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
