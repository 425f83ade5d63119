import ast
import dataclasses
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

from graphtrain.compile.request_keys import request_keys, source_digests
from graphtrain.config.resolve import resolve
from graphtrain.config.schema import Batch, Mesh, Model, Precision, Program
from graphtrain.graphs.names import TRAINING_GRAPHS
from graphtrain.torch_frontend import source
from sharding_rules.errors import ShardingError
from sharding_rules.pipeline import Stages

PROGRAM = Program(
    target="cpu:2",
    mesh=Mesh(data="rest"),
    model=Model(layers=1, embed=8, heads=2, mlp=16, vocab=32),
    batch=Batch(global_batch_size=8, seq_len=8),
)


def digests(**changes):
    keys = request_keys(resolve(dataclasses.replace(PROGRAM, **changes)))
    return {key.digest for key in keys.values()}


def test_every_graph_has_its_own_key():
    assert len(digests()) == len(TRAINING_GRAPHS)


@pytest.mark.parametrize(
    "change",
    [
        {"target": "cpu:4"},
        {"rules": ("data",)},
        {"mesh": Mesh(fsdp="rest")},
        {"batch": Batch(global_batch_size=16, seq_len=8)},
        {"model": dataclasses.replace(PROGRAM.model, dropout=0.1)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_every_setting_that_changes_code_changes_the_keys(change):
    assert not digests(**change) & digests()


def test_the_library_of_quantized_products_is_in_the_keys_of_programs_that_call_it(monkeypatch):
    quantized = {"precision": Precision(compute="int8")}
    with_library, without = digests(**quantized), digests()
    monkeypatch.setattr(metadata, "version", other_version(of="qwix"))
    assert not digests(**quantized) & with_library
    assert digests() == without


def other_version(of):
    known = metadata.version
    return lambda name: "0.0" if name == of else known(name)


def test_a_key_holds_what_names_mean_and_not_the_names():
    named = dataclasses.replace(PROGRAM, mesh=Mesh(data=2))
    assert request_keys(resolve(named)) == request_keys(resolve(PROGRAM))


def test_the_target_alone_moves_a_program():
    assert resolve(dataclasses.replace(PROGRAM, target="h100:64")).mesh.axes["data"] == 64


def test_a_mesh_that_does_not_fill_the_target_is_refused():
    moved = dataclasses.replace(PROGRAM, target="cpu:8", mesh=Mesh(data=3, fsdp="rest"))
    message = r"mesh\.data = 3 needs a multiple of 3 devices, and the target has 8"
    with pytest.raises(ShardingError, match=message):
        resolve(moved)


def test_what_is_traced_is_in_the_sources_and_the_loop_is_not():
    names = source_digests()
    assert "graphtrain/models/decoder.py" in names
    assert "sharding_rules/presets/fsdp.toml" in names
    assert "graphtrain/run/train.py" not in names


_ROOT = Path(source.__file__).parents[2]
# What is imported to trace and changes no program: errors, and how keys are written.
_CHANGE_NOTHING = {
    "graphtrain/errors.py",
    "graphtrain/cache/key.py",
    "graphtrain/config/tower.py",  # sizes for estimates
    "graphtrain/torch_frontend/__init__.py",
} | {f"graphtrain/torch_frontend/{name}.py" for name in ("errors", "versions")}


def _names(tree: ast.AST) -> Iterator[str]:
    """What a module imports when it runs, in functions too."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))
        elif not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            yield from _names(node)


def _imported(first: str) -> set[str]:
    """Files of ours that a file imports, and what those do."""
    seen, waiting = set(), [_ROOT / first]
    while waiting:
        path = waiting.pop()
        if path in seen:
            continue
        seen.add(path)
        for name in _names(ast.parse(path.read_text())):
            stem = _ROOT.joinpath(*name.split("."))
            if stem.is_relative_to(_ROOT):
                found = (stem.with_suffix(".py"), stem / "__init__.py")
                waiting += [file for file in found if file.is_file()]
    return {path.relative_to(_ROOT).as_posix() for path in seen}


def test_no_file_that_tracing_imports_is_missing_from_the_key():
    of_torch = {f"graphtrain/torch_frontend/{name}" for name in source._SOURCES}
    known = source_digests().keys() | of_torch | _CHANGE_NOTHING
    assert _imported("graphtrain/graphs/build.py") <= known


def test_stages_are_known_when_the_target_is():
    deep = dataclasses.replace(PROGRAM.model, layers=4)
    batch = Batch(global_batch_size=8, seq_len=8, microbatches=4)
    of = dataclasses.replace(
        PROGRAM, model=deep, batch=batch, target="cpu:4", mesh=Mesh(stage="rest")
    )
    assert resolve(of).stages == Stages(4, 1, (1, 1, 1, 1))
    assert resolve(dataclasses.replace(of, target="cpu:1")).stages is None
    with pytest.raises(ShardingError, match=r'stage = 4, .*add "pipeline" to program'):
        resolve(dataclasses.replace(of, rules=("data",)))
    with pytest.raises(ShardingError, match=r"microbatches = 4 is not a multiple of .*stage = 3"):
        resolve(dataclasses.replace(of, target="cpu:3"))
