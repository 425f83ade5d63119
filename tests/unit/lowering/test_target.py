import pytest

from lowering.errors import LoweringError
from lowering.machine import host
from lowering.machine.machine_tables import tables
from lowering.machine.target import Target, machine_of


def test_a_name_gives_machine_and_devices():
    pod = Target.parse("v5p:4x4x4")
    assert (pod.machine, pod.platform, pod.devices, str(pod)) == ("v5p", "tpu", 64, "v5p:4x4x4")


def test_a_topology_counts_chips_and_a_chip_may_be_two_devices():
    assert Target.parse("v4:2x2x1").devices == 4
    assert Target.parse("tpu7x:2x2x1").devices == 8


def test_slices_have_the_same_shape():
    target = Target.parse("3xv5p:4x4x4")
    assert (target.machine, target.slices, target.devices) == ("v5p", 3, 192)
    assert str(target) == "3xv5p:4x4x4" and target.devices_per_slice == 64
    assert str(Target.parse("1xv5p:4x4x4")) == "v5p:4x4x4"
    assert target.key_parts() != Target.parse("v5p:4x4x12").key_parts()
    assert machine_of("3xv5p:4x4x4") == machine_of("v5p:4x4x4") == machine_of("v5p") == "v5p"


def test_one_device_is_meant_where_none_is_named():
    assert Target.parse("cpu").devices == 1


def test_an_unknown_machine_suggests_the_nearest():
    with pytest.raises(LoweringError, match=r"unknown target machine 'h10'; did you mean h100"):
        Target.parse("h10:8")


@pytest.mark.parametrize("name", ["cpu:0", "cpu:-1", "cpu:two", "cpu:", "v5p:4xx4", "cpu:²"])
def test_devices_that_are_no_numbers_are_refused(name):
    with pytest.raises(LoweringError, match=r"devices must be positive integers, as in cpu:8"):
        Target.parse(name)


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("v4", r"torus of 3 dimensions; write chips as in v4:2x2x1"),
        ("v5p:2x2", r"torus of 3 dimensions"),
        ("v5e:4x4x4", r"torus of 2 dimensions; write chips as in v5e:2x2"),
        ("v5e:16x32", r"a slice of v5e has at most 256 chips; write several .* 2xv5e:16x16"),
        ("v5p:16x16x28", r"a slice of v5p has at most 6144 chips"),
        ("v5p:3x3x3", r"no slice of 3x3x3; it has 2x2x1, 2x2x2, .* multiples of 4, as in v5p:4x"),
        ("v5p:4x4x6", r"v5p has no slice of 4x4x6"),
        ("2xv5p:4x4x6", r"v5p has no slice of 4x4x6"),
        ("v6e:2x16", r"v6e has no slice of 2x16; it has 2x2, 2x4, .* 8x16, 16x16"),
        ("v5p:8x4x4", r"sizes of a slice ascend; write v5p:4x4x8"),
        ("v5e:4x2", r"sizes of a slice ascend; write v5e:2x4"),
        ("2xh100:8", r"only TPUs have slices, as in 2xv5p:4x4x4; .* as in h100:16"),
        ("gb200:73", r"gb200 has 4 devices on each host; its link connects 72 devices; use a mult"),
        ("gb200:1x72", r"its link connects 72 devices; write gb200:18x4"),
        ("ascend910c:20", r"has 16 devices on each host; its link connects 768 devices; use a mul"),
        ("h100:12", r"h100 has 8 devices on each host; use a multiple of 8 .* as in h100:2x6$"),
        ("h100:13", r"or write hosts x devices of each, as in h100:2x6$"),  # 13 is a prime number
        ("trn1:35", r"trn1 has 32 devices on each host"),
        ("h100:2x9", r"the link of h100 connects at most 8 devices"),
        ("h100:2x2x2", r"write the number of processes and the devices of each, as in h100:2x4"),
        ("gb200:6", r"gb200 has 4 devices on each host; .* or write hosts x devices of each"),
        ("cpu:2x2x2", r"write the number of processes and the devices of each"),
        ("ascend910b:2x2", r"ascend910b has no topology; write ascend910b:4"),
        ("ascend-cpu:9", r"ascend-cpu has 8 devices on each host; use a multiple of 8"),
    ],
)
def test_a_machine_that_nobody_has_is_refused_with_what_to_write(name, advice):
    with pytest.raises(LoweringError, match=f"target '{name}': .*{advice}"):
        Target.parse(name)


@pytest.mark.parametrize(
    ("name", "processes"),
    [
        ("cpu:4", 1), ("cpu:2x4", 2), ("h100:16", 2), ("h100:4x2", 4), ("gb200:72", 18),
        ("gh200:2", 2), ("ascend-cpu:4", 1), ("ascend-cpu:2x2", 2),
    ],
)  # fmt: skip
def test_a_host_is_a_process(name, processes):
    assert Target.parse(name).processes == processes


@pytest.mark.parametrize(
    ("name", "linked"),
    [("h100:16", 8), ("h100:4x2", 2), ("gb200:144", 72), ("gb200:2x2", 72), ("v5p:4x4x4", None)],
)
def test_the_link_connects_a_host_or_a_rack(name, linked):
    assert Target.parse(name).linked_devices == linked


@pytest.mark.parametrize("name", ["v4:1x1x1", "v5e:1x2", "v5p:4x4x12", "h100:7", "trn1:64"])
def test_small_and_odd_machines_that_exist_are_not_refused(name):
    assert str(Target.parse(name)) == name


@pytest.mark.parametrize(
    "name",
    [
        "l4:1",
        "l40s:4",
        "a10g:1",
        "a100-40:8",
        "rtx4090:2",
        "rtx5090:4",
        "rtx6000ada:1",
        "gh200:2",
        "b200:8",
        "gb200:72",
    ],
)
def test_gpus_that_people_have_are_targets_with_hosts_of_any_size(name):
    target = Target.parse(name)
    assert target.is_gpu and target.peak_flops("bfloat16") > 0
    assert Target.parse(f"{target.machine}:3x1").processes == 3


def test_a_cpu_is_told_from_another_by_its_instruction_set():
    assert Target.parse("cpu:2").key_parts()["processor"] == host.processor()
    assert "processor" not in Target.parse("h100:2").key_parts()


def test_every_machine_says_where_its_numbers_are_from():
    for name, machine in tables().items():
        assert machine["source"] and machine["memory"] > 1e9, name
        assert machine["flops"]["bfloat16"] > 5e13, name
