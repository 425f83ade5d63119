"""Request keys: cache keys of the graphs that a run needs, computed without tracing.

`compile` and `run` both use this module, so their keys always agree.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from graphtrain.cache.key import CacheKey
from graphtrain.config.resolve import ResolvedProgram
from graphtrain.graphs.names import DUMP, is_training_graph, training_graphs
from graphtrain.graphs.open_model import open_language_model
from lowering.machine.toolchain import Toolchain, version

_ROOT = Path(__file__).parents[2]
# Sources executed by tracing and lowering; the CLI, the training loop and the cache do not affect
# a compiled program.
_SOURCES = (
    "graphtrain/compile/request_keys.py",
    "graphtrain/config/hf_config.py",
    "graphtrain/config/hf_images.py",
    "graphtrain/config/hf_quantization.py",
    "graphtrain/config/loss_positions.py",
    "graphtrain/config/phase_settings.py",
    "graphtrain/config/resolve.py",
    "graphtrain/config/schema",
    "graphtrain/config/serving_program.py",
    "graphtrain/config/user_code.py",
    "graphtrain/files.py",  # checks config.json
    "graphtrain/graphs",
    "graphtrain/models",
    "lowering",
    "sharding_rules",
)


def request_keys(
    program: ResolvedProgram, names: Sequence[str] | None = None
) -> dict[str, CacheKey]:
    """Return the request key of each graph of a program, by graph name.

    Args:
        program: the program.
        names: graphs to include, of `graphs.names.graphs_for`; None for those of training.

    Raises:
        ImportedModelError: the configuration or module of a PyTorch model does not exist.
    """
    target, settings = program.target, dataclasses.asdict(program.settings)
    # The key contains what these settings refer to, not their names.
    del settings["target"], settings["rules"], settings["mesh"]
    del settings["phase"]  # each phase is a program of its own
    _count_padding(settings["batch"])
    of_graphs = {name: settings.pop(name) for name in ("serve", DUMP)}
    settings["model"] = open_language_model(program.model).key_ingredients()
    settings |= _user_code(program, settings)
    if program.settings.precision.matmul_dtype is not None:  # others do not depend on an extra
        settings["precision"] = settings["precision"] | {"qwix": version("qwix")}
    parts = {
        "program": settings,
        "mesh": dict(program.mesh.axes),
        "rules": dataclasses.asdict(program.rules),
        "sources": source_digests(),
        "target": target.key_parts(),
        "toolchain": dataclasses.asdict(Toolchain.current(target.platform)),
    }
    return {
        name: CacheKey.of(
            graph=name, **parts | {"program": settings | _graph_settings(name, of_graphs)}
        )
        for name in names or training_graphs(program)
    }


def _count_padding(batch: dict[str, Any]) -> None:
    """Let the size of a batch include its padding, which a program does not tell from the rest."""
    batch["global_batch_size"] += batch.pop("padding_sequences")


def _graph_settings(name: str, tables: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the settings of serving, or of a dump, that a graph depends on."""
    if is_training_graph(name):
        return {}
    if name == DUMP:
        return {DUMP: tables[DUMP]}
    serve = tables["serve"]
    if name == "decode_beams":
        return {"serve": serve}
    return {"serve": {key: value for key, value in serve.items() if key != "beams"}}


def _user_code(program: ResolvedProgram, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return tables of settings with the contents of the user's code in place of its name."""
    tables = {"optimizer": program.optimizer, "loss": program.loss}
    return {
        name: settings[name] | {"custom": code.key_ingredients()}
        for name, table in tables.items()
        if (code := table.user_code) is not None
    }


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
