"""Work grows with the number of arrays and of devices, not with its square; counted, not timed."""

import sys

import jax
import pytest

from graphtrain.key import CacheKey
from graphtrain.optimizer import moment_specs
from graphtrain.planning.diff import Change, _without_followers
from lowering.groups import axes_of, groups_of
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
    return lambda: moment_specs(template, specs)


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
    changes = [Change("placement", name, "a", "b") for name in names]
    return lambda: list(_without_followers(changes))


def groups(count: int):
    half, mesh = count // 2, MeshShape({"data": count // 2, "tensor": 2})
    text = "replica_groups={" + ",".join(f"{{{2 * i},{2 * i + 1}}}" for i in range(half)) + "}"
    return lambda: axes_of(groups_of(text, count), mesh)


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


@pytest.mark.parametrize("of", [moments, plan, key, difference, groups])
def test_four_times_as_many_take_four_times_the_work(of):
    assert calls(of(800)) <= 4.5 * calls(of(200))
