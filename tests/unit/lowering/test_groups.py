"""Every way in which XLA writes the groups of a collective, against NumPy."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowering.groups import axes_of, groups_of
from sharding_rules.mesh import MeshShape

MESH = MeshShape({"data": 2, "fsdp": 4, "tensor": 2})
SUBSETS = [
    axes
    for count in (1, 2, 3)
    for axes in itertools.combinations(("data", "fsdp", "tensor"), count)
]


def expected(axes):
    """Rows of devices that differ along axes only, from the mesh laid out as an array."""
    places = np.arange(16).reshape(2, 4, 2)
    index = [list(MESH.axes).index(axis) for axis in axes]
    rest = [number for number in range(3) if number not in index]
    return places.transpose(rest + index).reshape(-1, MESH.size(axes)).tolist()


@pytest.mark.parametrize("axes", SUBSETS)
def test_lists_iotas_and_meshes_say_the_same(axes):
    index = [list(MESH.axes).index(axis) for axis in axes]
    order = ",".join(str(n) for n in [n for n in range(3) if n not in index] + index)
    rows = ",".join("{" + ",".join(map(str, row)) + "}" for row in expected(axes))
    width = MESH.size(axes)
    chosen = ",".join(f"'axis_{number}'" for number in index)
    written = (
        f"%x), channel_id=1, replica_groups={{{rows}}}, to_apply=%add",
        f"%x), replica_groups=[{16 // width},{width}]<=[2,4,2]T({order}), to_apply=%add",
        f"%x), replica_groups=mesh['axis_0'=2,'axis_1'=4,'axis_2'=2] {{{chosen}}}, to_apply=%add",
    )
    for text in written:
        assert groups_of(text, 16) == expected(axes)
        assert axes_of(groups_of(text, 16), MESH) == axes


def test_a_mesh_may_list_its_devices_in_another_order():
    text = "replica_groups=mesh['axis_0'=8,'axis_1'=2], device_ids=([2,8]T(1,0)) {'axis_1'}"
    assert groups_of(text, 16) == [[number, number + 8] for number in range(8)]
    assert axes_of(groups_of(text, 16), MESH) == ("data",)


def test_a_part_of_an_axis_of_the_compilers_mesh_can_be_one_of_ours():
    text = "replica_groups=mesh['axis_0'=16] {'axis_0':(2)4}"
    assert groups_of(text, 16) == expected(("fsdp",))


def test_no_groups_are_all_devices_and_pairs_are_a_permutation():
    assert groups_of("%x), replica_groups={}, to_apply=%add", 4) == [[0, 1, 2, 3]]
    pairs = "source_target_pairs={{0,2},{2,4},{4,6},{6,0}}"
    assert groups_of(pairs, 16) == [[0, 2], [2, 4], [4, 6], [6, 0]]
    assert axes_of(groups_of(pairs, 16), MESH) == ("fsdp",)


@given(st.permutations(range(3)), st.lists(st.sampled_from([1, 2, 3, 4]), min_size=3, max_size=3))
def test_any_transposed_iota_is_what_numpy_makes_of_it(order, sizes):
    devices = int(np.prod(sizes))
    text = (
        f"replica_groups=[{devices // sizes[order[2]]},{sizes[order[2]]}]<="
        f"[{','.join(map(str, sizes))}]T({','.join(map(str, order))})"
    )
    want = np.arange(devices).reshape(sizes).transpose(order).reshape(-1, sizes[order[2]])
    assert groups_of(text, devices) == want.tolist()
