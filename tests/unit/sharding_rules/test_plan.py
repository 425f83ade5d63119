import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sharding_rules.arrays import ArraySpec
from sharding_rules.errors import ShardingError
from sharding_rules.mesh import MeshShape
from sharding_rules.plan import make_plan
from sharding_rules.rules import Rules

RULES = Rules({"embed": ("fsdp",), "heads": ("tensor",)}, {"batch": ("data", "fsdp")})
QUERY = ArraySpec((64, 4, 16), ("embed", "heads", None), "bfloat16")


def test_each_dimension_is_split_by_its_rule():
    plan = make_plan({"query": QUERY}, RULES, MeshShape({"fsdp": 2, "tensor": 4}))
    assert plan.layouts["query"].split == (("fsdp",), ("tensor",), ())
    assert plan.shard_shape("query") == (32, 1, 16)
    assert plan.bytes_per_device() == 64 * 4 * 16 * 2 // 8


def test_mesh_axes_that_are_absent_replicate():
    plan = make_plan({"query": QUERY}, RULES, MeshShape({"data": 8}))
    assert plan.bytes_per_device() == QUERY.nbytes


def test_activations_follow_their_own_table():
    hidden = ArraySpec((8, 128, 64), ("batch", "seq", "embed"), role="activation")
    plan = make_plan({"query": QUERY, "hidden": hidden}, RULES, MeshShape({"data": 2, "fsdp": 2}))
    assert plan.layouts["hidden"].split == (("data", "fsdp"), (), ())
    assert plan.bytes_per_device("parameter") == QUERY.nbytes // 2


def test_uneven_split_says_which_axis_and_the_sizes_that_would_do():
    with pytest.raises(
        ShardingError,
        match=r"query: axis 'heads' has size 4, which tensor = 3 does not divide; sizes that "
        r"divide: heads = 3 or 6, or tensor = 1$",
    ):
        make_plan({"query": QUERY}, RULES, MeshShape({"tensor": 3}))


def test_one_mesh_axis_cannot_split_two_dimensions():
    both = Rules({"embed": ("fsdp",), "heads": ("fsdp",)}, {})
    with pytest.raises(ShardingError, match=r"query: mesh axis 'fsdp' would split two dimensions"):
        make_plan({"query": QUERY}, both, MeshShape({"fsdp": 2}))


def test_a_misspelt_axis_of_an_array_is_refused():
    with pytest.raises(ShardingError, match=r"unknown axis 'haeds'; did you mean 'heads'"):
        ArraySpec((4,), ("haeds",))


@given(
    st.tuples(*[st.integers(1, 4)] * 2),
    st.tuples(*[st.sampled_from([1, 2, 4])] * 2),
)
def test_shards_tile_the_array(factors, sizes):
    mesh = MeshShape({"fsdp": sizes[0], "tensor": sizes[1]})
    spec = ArraySpec((factors[0] * sizes[0], factors[1] * sizes[1]), ("embed", "heads"))
    plan = make_plan({"x": spec}, RULES, mesh)
    shard = plan.shard_shape("x")
    assert math.prod(shard) * mesh.devices == math.prod(spec.shape)
    assert plan.shard_bytes("x") == math.prod(shard) * 4
