"""Strategy files, read by MindSpore: checkpoints of one plan become those of another."""

import numpy as np
import pytest

from graphtrain.checkpoints.mindspore_strategy import write_ckpt
from graphtrain.config.resolve import resolve
from graphtrain.config.schema import Batch, Mesh, Model, Program
from lowering.ascend.strategy import strategy_file
from lowering.errors import LoweringError
from sharding_rules.arrays import ArraySpec
from sharding_rules.mesh import MeshShape
from sharding_rules.plan import ArrayLayout, make_plan
from sharding_rules.rules import Rules

ARRAYS = {
    "up": ArraySpec((8, 16), ("embed", "mlp")),
    "layers.query": ArraySpec((2, 8, 4, 6), ("layers", "embed", "heads", None)),
    "scale": ArraySpec((8,), ("embed",)),
}
HERE = Rules({"embed": ("fsdp",), "mlp": ("tensor",), "heads": ("tensor",)}, {})
# One dimension over two axes that are no neighbours, a second over none, and one dimension alone.
THERE = Rules({"embed": ("data", "tensor"), "layers": ("fsdp",)}, {})


def shards(layouts: dict[str, ArrayLayout], mesh: MeshShape, values) -> list[dict]:
    """What each rank holds."""
    found = []
    for rank in range(mesh.devices):
        at = dict(zip(mesh.axes, np.unravel_index(rank, tuple(mesh.axes.values())), strict=True))
        found.append({name: _part(values[name], one, mesh, at) for name, one in layouts.items()})
    return found


def _part(array, layout: ArrayLayout, mesh: MeshShape, at) -> np.ndarray:
    for dimension, names in enumerate(layout.split):
        index = 0
        for name in names:
            index = index * mesh.axes[name] + at[name]
        array = np.split(array, mesh.size(names), axis=dimension)[index]
    return array


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ((HERE, {"fsdp": 2, "tensor": 2}), (THERE, {"data": 2, "fsdp": 2, "tensor": 2})),
        ((THERE, {"data": 2, "fsdp": 2, "tensor": 2}), (HERE, {"fsdp": 4, "tensor": 2})),
        ((HERE, {"data": 2, "fsdp": 2}), (HERE, {"tensor": 2})),
    ],
)
def test_mindspore_takes_checkpoints_of_one_plan_to_another(mindspore, tmp_path, source, target):
    random = np.random.default_rng(0)
    values = {
        name: random.normal(size=one.shape).astype(np.float32) for name, one in ARRAYS.items()
    }
    sides = []
    for name, (rules, axes) in (("source", source), ("target", target)):
        mesh = MeshShape(axes)
        layouts = dict(make_plan(ARRAYS, rules, mesh).layouts)
        (tmp_path / f"{name}.ckpt").write_bytes(strategy_file(layouts, mesh))
        sides.append(shards(layouts, mesh, values))
    for rank, held in enumerate(sides[0]):
        (tmp_path / f"source/rank_{rank}").mkdir(parents=True)
        mindspore.save_checkpoint(
            [{"name": name, "data": mindspore.Tensor(one)} for name, one in held.items()],
            str(tmp_path / f"source/rank_{rank}/model.ckpt"),
        )
    mindspore.transform_checkpoints(
        str(tmp_path / "source"),
        str(tmp_path / "target"),
        "model",
        str(tmp_path / "source.ckpt"),
        str(tmp_path / "target.ckpt"),
    )
    for rank, held in enumerate(sides[1]):
        made = mindspore.load_checkpoint(str(tmp_path / f"target/rank_{rank}/model{rank}.ckpt"))
        assert set(made) == set(held)
        for name, want in held.items():
            np.testing.assert_array_equal(made[name].asnumpy(), want)


def test_the_strategy_of_a_program_has_its_parameters(mindspore, tmp_path):
    """By MindSpore's own reader: mesh, and for each dimension the mesh axis from the last."""
    program = Program(
        model=Model(layers=2, embed=32, heads=4, kv_heads=2, mlp=48, vocab=264),
        batch=Batch(global_batch_size=8, seq_len=32),
        mesh=Mesh(fsdp=2, tensor=2),
        target="ascend910b:4",
    )
    write_ckpt(tmp_path / "strategy.ckpt", resolve(program))
    read = mindspore.build_searched_strategy(str(tmp_path / "strategy.ckpt"))
    assert {name for name in read if "mlp." in name} == {
        f"layers.mlp.{name}" for name in ("up", "down", "gate")
    }
    up = read["layers.mlp.up"]
    assert list(up.dev_matrix[0].dim) == [2, 2] and list(up.tensor_map[0].dim) == [-1, 1, 0]


def test_a_name_that_would_be_read_as_a_stage_is_refused():
    mesh = MeshShape({"fsdp": 2})
    layouts = dict(make_plan({"layer-0": ARRAYS["up"]}, HERE, mesh).layouts)
    with pytest.raises(LoweringError, match="layer-0: MindSpore would read the part before '-' as"):
        strategy_file(layouts, mesh)
