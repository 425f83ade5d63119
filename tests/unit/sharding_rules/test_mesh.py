import pytest

from sharding_rules.errors import ShardingError
from sharding_rules.mesh import MeshShape


def test_rest_takes_what_the_other_axes_leave():
    mesh = MeshShape.resolve({"data": 2, "fsdp": "rest", "tensor": 2}, devices=16)
    assert mesh.axes == {"data": 2, "fsdp": 4, "tensor": 2}


def test_axes_are_ordered_slowest_link_first():
    assert list(MeshShape({"tensor": 2, "data": 4}).axes) == ["data", "tensor"]


def test_a_size_that_does_not_divide_the_devices_is_refused():
    with pytest.raises(ShardingError) as one:
        MeshShape.resolve({"data": 3, "fsdp": "rest"}, devices=1, target="cpu:1")
    assert str(one.value) == (
        "mesh.data = 3 needs a multiple of 3 devices, and cpu:1 has 1; choose a target of 3 "
        "devices, or mesh.data = 1"
    )
    with pytest.raises(ShardingError) as two:
        MeshShape.resolve({"data": 3, "tensor": 2, "fsdp": "rest"}, devices=8)
    assert str(two.value) == (
        "mesh.data x mesh.tensor = 6 needs a multiple of 6 devices, and the target has 8; choose a "
        "target of 6 devices, or sizes whose product is 1, 2, 4 or 8"
    )


def test_idle_devices_are_refused():
    with pytest.raises(
        ShardingError, match=r'set one axis to "rest", or use a target of 2 devices'
    ):
        MeshShape.resolve({"data": 2}, devices=8)


def test_a_mesh_without_a_size_names_one():
    with pytest.raises(ShardingError, match=r'no axis .* is above 1, .*as in data = "rest"'):
        MeshShape.resolve({"data": 1}, devices=8)


def test_two_open_axes_are_refused():
    with pytest.raises(ShardingError, match=r'only one axis can be "rest", not data and fsdp'):
        MeshShape.resolve({"data": "rest", "fsdp": "rest"}, devices=8)


def test_an_unknown_axis_suggests_the_nearest():
    with pytest.raises(ShardingError, match=r"unknown axis 'tensr'; did you mean 'tensor'"):
        MeshShape({"tensr": 2})
