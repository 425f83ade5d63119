"""Work grows with the number of arrays and of devices, not with its square; counted, not timed."""

import sys

import jax
import pytest

from graphtrain.cache.key import CacheKey
from graphtrain.config.schema import Optimizer
from graphtrain.graphs.optimizer import moment_specs
from graphtrain.planning.diff import PlanChange, _without_matching_moments
from lowering.hlo.collectives import read
from lowering.hlo.replica_groups import mesh_axes_of_groups, parse_groups
from lowering.trees import unflatten
from sharding_rules.arrays import ArraySpec
from sharding_rules.mesh import MeshShape
from sharding_rules.plan import make_plan
from sharding_rules.rules import Rules


def arrays(count: int) -> dict[str, ArraySpec]:
    return {f"layers/{index}/up": ArraySpec((8, 8), ("embed", "mlp")) for index in range(count)}


def moments(count: int):
    shapes = {path: jax.ShapeDtypeStruct((8, 8), "float32") for path in arrays(count)}
    template, specs = {"adam": {"mu": unflatten(shapes)}}, arrays(count)
    return lambda: moment_specs(template, specs, Optimizer())


def plan(count: int):
    specs, rules = arrays(count), Rules.load(["fsdp"])
    return lambda: make_plan(specs, rules, MeshShape({"fsdp": 8}))


def key(count: int):
    specs = arrays(count)
    return lambda: CacheKey.of(inputs=specs).digest


def difference(count: int):
    names = [
        f"state/{kind}/{path}" for kind in ("parameters", "optimizer/mu") for path in arrays(count)
    ]
    changes = [PlanChange("placement", name, "a", "b") for name in names]
    return lambda: list(_without_matching_moments(changes))


def groups(count: int):
    half, mesh = count // 2, MeshShape({"data": count // 2, "tensor": 2})
    text = "replica_groups={" + ",".join(f"{{{2 * i},{2 * i + 1}}}" for i in range(half)) + "}"
    return lambda: mesh_axes_of_groups(parse_groups(text, count), mesh)


def sources(count: int):
    """Of gathers with no line of their own, all of which come before what takes them."""
    gathers = (f"%g{i} = f32[8] all-gather(%x), replica_groups=[1,2]<=[2]" for i in range(count))
    takers = (f"%t{i} = f32[8] negate(%g{i}), metadata={{stack_frame_id=1}}" for i in range(count))
    lines = "\n".join(f"  {line}" for line in ("%x = f32[4] parameter(0)", *gathers, *takers))
    text = f"HloModule step\n\nENTRY %main (x: f32[4]) -> f32[8] {{\n{lines}\n}}\n"
    return lambda: read(text, MeshShape({"data": 2}))


def calls(work) -> int:
    """Of Python's functions and of C's."""
    counted = 0

    def count(frame, event, argument):
        nonlocal counted
        counted += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return counted


@pytest.mark.parametrize("of", [moments, plan, key, difference, groups, sources])
def test_four_times_as_many_take_four_times_the_work(of):
    assert calls(of(800)) <= 4.5 * calls(of(200))
