"""Device groups, in every syntax, against NumPy."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowering.hlo.replica_groups import mesh_axes_of_groups, parse_groups
from sharding_rules.axes import MESH_AXES
from sharding_rules.mesh import MeshShape

SIZES = st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=4)


@st.composite
def meshes(draw):
    """A mesh and some of its axes, in the order of the mesh."""
    sizes = draw(SIZES)
    names = list(MESH_AXES)[: len(sizes)]
    used = [name for name in names if draw(st.booleans())]
    return dict(zip(names, sizes, strict=True)), used


def expected(mesh, used):
    """Groups of devices that differ along the used axes alone."""
    grid = np.arange(math.prod(mesh.values())).reshape(list(mesh.values()))
    inside = [index for index, name in enumerate(mesh) if name in used]
    outside = [index for index in range(grid.ndim) if index not in inside]
    width = math.prod(grid.shape[index] for index in inside)
    return {frozenset(group) for group in grid.transpose(outside + inside).reshape(-1, width)}


def as_sets(groups):
    return {frozenset(group) for group in groups}


def join(numbers):
    return ",".join(str(number) for number in numbers)


@given(meshes())
def test_listed_groups(case):
    mesh, used = case
    groups = expected(mesh, used)
    text = ",".join(f"{{{join(sorted(group))}}}" for group in groups)
    found = parse_groups(f" channel_id=1, replica_groups={{{text}}}, to_apply=%add", 64)
    assert as_sets(found) == groups


@given(meshes())
def test_groups_of_a_transposed_iota(case):
    mesh, used = case
    order = [i for i, name in enumerate(mesh) if name not in used]
    order += [i for i, name in enumerate(mesh) if name in used]
    width = math.prod(mesh[name] for name in used)
    shape = f"[{math.prod(mesh.values()) // width},{width}]"
    text = f"replica_groups={shape}<=[{join(mesh.values())}]T({join(order)})"
    assert as_sets(parse_groups(text, 64)) == expected(mesh, used)


@given(meshes())
def test_groups_of_mesh_axes(case):
    mesh, used = case
    axes = ",".join(f"'axis_{i}'={size}" for i, size in enumerate(mesh.values()))
    spanned = ",".join(f"'axis_{list(mesh).index(name)}'" for name in used)
    text = f"replica_groups=mesh[{axes}] {{{spanned}}}, use_global_device_ids=true"
    assert as_sets(parse_groups(text, 64)) == expected(mesh, used)


@given(meshes(), st.randoms())
def test_groups_of_mesh_axes_in_another_order(case, random):
    mesh, used = case
    order = list(range(len(mesh)))
    random.shuffle(order)
    names = [list(mesh)[i] for i in order]
    axes = ",".join(f"'{name}'={mesh[name]}" for name in names)
    ids = f"device_ids=([{join(mesh.values())}]T({join(order)}))"
    spanned = ",".join(f"'{name}'" for name in used)
    text = f"replica_groups=mesh[{axes}], {ids} {{{spanned}}}"
    assert as_sets(parse_groups(text, 64)) == expected(mesh, used)


@given(st.permutations([2, 3, 4]), st.sets(st.integers(0, 2)))
def test_groups_of_parts_of_a_mesh_axis(cut, parts):
    mesh = dict(zip(("data", "fsdp", "tensor"), cut, strict=True))
    used = [name for i, name in enumerate(mesh) if i in parts]
    before = [math.prod(cut[:i]) for i in range(3)]
    spanned = ",".join(f"'whole':({before[i]}){cut[i]}" for i in sorted(parts))
    text = f"replica_groups=mesh['whole'=24] {{{spanned}}}"
    assert as_sets(parse_groups(text, 24)) == expected(mesh, used)


@given(meshes())
def test_axes_of_groups(case):
    mesh, used = case
    groups = tuple(tuple(sorted(group)) for group in expected(mesh, used))
    long = tuple(name for name in used if mesh[name] > 1)
    assert mesh_axes_of_groups(groups, MeshShape(mesh)) == long


@given(meshes(), st.integers(1, 3))
def test_axes_of_a_ring(case, shift):
    mesh, used = case
    pairs = [
        (group[i], group[(i + shift) % len(group)])
        for group in (sorted(group) for group in expected(mesh, used[:1]))
        for i in range(len(group))
    ]
    text = f"source_target_pairs={{{','.join(f'{{{a},{b}}}' for a, b in pairs)}}}"
    moves = bool(used) and shift % mesh[used[0]] != 0
    found = mesh_axes_of_groups(parse_groups(text, 64), MeshShape(mesh))
    assert found == (tuple(used[:1]) if moves else ())


def test_groups_over_a_part_of_an_axis_differ_along_it():
    groups = parse_groups("replica_groups={{0,1},{2,3},{4,5},{6,7}}", 8)
    assert mesh_axes_of_groups(groups, MeshShape({"tensor": 8})) == ("tensor",)
    assert len(groups[0]) == 2


@pytest.mark.parametrize("text", ["replica_groups={}", "to_apply=%add"])
def test_no_groups_are_one_of_all_devices(text):
    assert parse_groups(text, 4) == ((0, 1, 2, 3),)
