"""Machines of the user's file: new ones, and other numbers of known ones."""

from pathlib import Path

import pytest

from graphtrain.config import load_config
from graphtrain.launch.job import make_job
from graphtrain.launch.kubernetes import job_set
from graphtrain.planning.formats import machine_lines
from lowering.errors import LoweringError
from lowering.machine.machine_tables import built_in, machines
from lowering.machine.target import Target

CONFIG = """
[program]
target = "cpu:1"
model = { layers = 2, embed = 64, heads = 4, mlp = 128, vocab = 256 }
batch = { global_batch_size = 8, seq_len = 128 }

[run]
directory = "run"
steps = 1
data = { train = "data" }
"""
NEW = """
[mybox]
platform = "cuda"
memory = 48e9
bandwidth = 900e9
flops = { bfloat16 = 180e12 }
link = 128e9
group = 4
network = 25e9
source = "the vendor's data sheet"
"""


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Write targets.toml into the current directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GRAPHTRAIN_TARGETS", raising=False)
    return lambda text, name="targets.toml": (tmp_path / name).write_text(text)


def test_a_new_machine_is_a_target_like_the_others(write):
    write(NEW)
    target = Target.parse("mybox:8")
    assert (target.platform, target.processes, target.linked_devices) == ("cuda", 2, 4)
    assert target.peak_flops("bfloat16") == 8 * 180e12 and target.memory_bytes == 48e9
    assert target.numbers_source == "targets.toml" and "mybox" in machines()
    assert target.achieved == Target.parse("h100:8").achieved
    with pytest.raises(LoweringError, match="mybox has 4 devices on each host"):
        Target.parse("mybox:6")


def test_single_numbers_of_a_known_machine_are_changed(write):
    before = Target.parse("h100:8")
    assert before.numbers_source == "datasheet"
    write("[h100]\nmemory = 94e9\nflops = { bfloat16 = 835e12 }\n")
    target = Target.parse("h100:8")
    assert target.memory_bytes == 94e9 and target.peak_flops("bfloat16") == 8 * 835e12
    assert target.peak_flops("fp8") == 8 * built_in()["h100"]["flops"]["fp8"]
    assert target.specification["file_numbers"] == ["memory", "flops"]
    assert target.achieved is not None and target.achieved.machine == "the built-in h100"
    write("")  # another version of the file, which the same process reads
    assert Target.parse("h100:8").memory_bytes == 80e9


def test_shares_of_the_user_are_of_no_published_step(write):
    write("[h100]\nachieved = { products = 0.9, attention = 0.8, tensor_overlap = 0.5 }\n")
    achieved = Target.parse("h100:8").achieved
    assert achieved is not None and (achieved.products, achieved.machine) == (0.9, "")
    write("[h100]\nmemory = 94e9\n")  # which no time depends on
    assert Target.parse("h100:8").achieved == Target.parse("h100:16").achieved
    assert (achieved := Target.parse("h100:8").achieved) and achieved.machine == "h100"


def test_a_machine_based_on_another_reaches_what_the_other_does(write):
    write('[h100-pcie]\nbased_on = "h100"\nbandwidth = 2e12\ngroup = 2\n')
    target = Target.parse("h100-pcie:4")
    assert target.processes == 2 and target.memory_bytes == 80e9
    assert target.achieved == Target.parse("h100:8").achieved


def test_only_numbers_that_change_programs_are_in_the_key(write):
    plain = Target.parse("h100:8").key_parts()
    estimates = "link = 450e9\nnetwork = 50e9\nflops = { bfloat16 = 8e14 }\nsource = 'mine'\n"
    write("[h100]\n" + estimates + "achieved = {products=0.5, attention=0.2, tensor_overlap=1}\n")
    assert Target.parse("h100:8").key_parts() == plain
    keys = [plain]
    for change in ("memory = 9e10", "bandwidth = 3e12", "gpu = { cores = 114 }", "group = 4"):
        write(f"[h100]\n{change}\n")
        keys.append(Target.parse("h100:8").key_parts())
        assert keys[-1] not in keys[:-1], change
    write("[v5p]\nbandwidth = 3e12\n")  # which XLA reads of GPUs only
    assert "targets_file" not in Target.parse("v5p:2x2x1").key_parts()
    write(NEW)
    new = Target.parse("mybox:4").key_parts()
    write(NEW.replace("platform", "gpu = { name = 'A', capability = 9, cores = 99, l2 = 1000000,"
                      " clock_ghz = 1.5, shared_memory = 100000 }\nplatform"))  # fmt: skip
    assert Target.parse("mybox:4").key_parts() != new


def test_a_tpu_based_on_another_is_compiled_as_that_one(write):
    write('[mypod]\nbased_on = "v5e"\nmemory = 15e9\nlink = 100e9\n')
    target = Target.parse("2xmypod:2x4")
    assert target.specification["compiled_as"] == "v5e" and target.devices == 16


def test_the_variable_names_another_file(write, monkeypatch):
    write("[h100]\nmemory = 1e9\n")
    write("[h100]\nmemory = 2e9\n", "other.toml")
    monkeypatch.setenv("GRAPHTRAIN_TARGETS", "other.toml")
    assert Target.parse("h100:8").memory_bytes == 2e9
    monkeypatch.setenv("GRAPHTRAIN_TARGETS", "none.toml")
    with pytest.raises(LoweringError, match=r"GRAPHTRAIN_TARGETS = none.toml: No such file"):
        Target.parse("h100:8")
    assert Target.parse("cpu:8").devices == 8  # which is in no file


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[h100", r"targets.toml: Expected .* at the end of a table"),
        ("h100 = 3", r"targets.toml: \[h100\] is not a table; write \[NAME\]"),
        ("[cpu]\nmemory = 1e9", r"\[cpu\] cpu is this machine"),
        ("['My Box']\nmemory = 1e9", r"\[My Box\] a name has small letters"),
        ("[4xh100]\nmemory = 1e9", r"\[4xh100\] a name has small letters"),
        ("[mybox]\nmemory = 1e9", r"lacks platform, flops, source; add them, or based_on"),
        ("[mybox]\nbased_on = 'h10'", r"based_on: unknown machine 'h10'; did you mean h100\?"),
        ("[h100]\nplatform = 'rocm'", r"platform: h100 has the platform 'cuda'; remove it"),
        ("[h100]\nplatform = 'tpu'", r"platform: input should be 'cuda' or 'rocm'"),
        ("[h100]\nmemory = -1", r"\[h100\] memory: input should be greater than 0"),
        ("[h100]\nmemory = nan", r"\[h100\] memory: "),
        ("[h100]\nmemory = inf", r"\[h100\] memory: "),
        ("[h100]\nmemory = '80'", r"\[h100\] memory: input should be a valid number"),
        ("[h100]\nmemory = true", r"\[h100\] memory: input should be a valid number"),
        ("[h100]\nmemroy = 1", r"\[h100\] memroy: unknown; did you mean memory\?"),
        ("[h100]\nper_host = 3", r"group = 8 is not a multiple of per_host = 3"),
        ("[h100]\ngroup = 0", r"group: input should be greater than or equal to 1"),
        ("[h100.flops]\nbf16 = 1e15", r"flops.bf16: input should be 'bfloat16', 'float32'"),
        ("[h100.gpu]\ncoers = 9", r"gpu.coers: unknown; known: name, capability"),
        ("[h100.gpu]\ncores = -9", r"gpu.cores = -9: should be a positive number"),
        ("[h100.gpu]\nname = 9", r"gpu.name = 9: should be a text"),
        (NEW + "gpu = { name = 'A' }", r"gpu lacks capability, cores, l2, clock_ghz, shared_mem"),
        (NEW.replace("group = 4", ""), r"group is missing: the number of devices that the link"),
        (NEW.replace("bfloat16", "fp8"), r"flops: bfloat16 is missing"),
        (
            "[h100.achieved]\nproducts = 56\nattention = 0.2\ntensor_overlap = 0",
            r"achieved.products: input should be less than or equal to 1",
        ),
    ],
)
def test_a_wrong_description_is_refused_with_its_place(write, text, problem):
    write(text)
    with pytest.raises(LoweringError, match=problem) as error:
        Target.parse("h100:8")
    assert "pydantic" not in str(error.value) and "targets.toml: " in str(error.value)


@pytest.mark.parametrize(
    ("number", "problem"),
    [
        ("memory = 80", "memory = 80: not plausible; write bytes, from 1e9 to 1e14"),
        ("memory = 1e29", r"memory = 1e\+29: not plausible"),
        ("flops = { bfloat16 = 989 }", "flops.bfloat16 = 989: .* write FLOP/s, from 1e11 to 1e17"),
        ("flops = { fp8 = 9e29 }", r"flops.fp8 = 9e\+29: not plausible"),
        ("bandwidth = 3352", "bandwidth = 3352: .* bytes per second, from 1e9 to 1e15"),
        ("link = 900", "link = 900: .* bytes per second, from 1e8"),
        ("network = 400", "network = 400: .* bytes per second, from 1e7"),
        ("host_link = 64", "host_link = 64: .* bytes per second, from 1e8"),
        ("gpu = { clock_ghz = 1980 }", "gpu.clock_ghz = 1980: .* write GHz, from 0.1 to 10"),
        ("gpu = { clock_ghz = nan }", "gpu.clock_ghz = nan: not plausible"),
        ("gpu = { l2 = 50 }", "gpu.l2 = 50: not plausible; write bytes, from 100000 to 1e11"),
        ("gpu = { shared_memory = 228 }", "gpu.shared_memory = 228: .* write bytes, from 10000"),
        ("gpu = { capability = 90 }", "gpu.capability = 90: .* the major version .* from 5 to 50"),
        ("gpu = { minor = -1 }", "gpu.minor = -1: .* from 0 to 9"),
    ],
)
def test_a_number_in_another_unit_is_refused_with_the_unit(write, number, problem):
    write(f"[h100]\n{number}\n")
    with pytest.raises(LoweringError, match=rf"targets.toml: \[h100\] {problem}"):
        Target.parse("h100:8")


def test_the_numbers_of_every_known_machine_are_plausible(write):
    write("\n".join(f"[{name}]\nsource = 'mine'" for name in built_in()))
    assert Target.parse("h100:8").specification["source"] == "mine"


def test_all_problems_of_a_file_are_named(write):
    write("[h100]\nmemory = 0\nlink = -1\n[mybox]\nmemory = 1e9\n")
    with pytest.raises(LoweringError) as error:
        Target.parse("h100:8")
    assert len(str(error.value).splitlines()) == 3


def test_a_plan_says_which_numbers_are_of_the_file(write):
    assert machine_lines(Target.parse("h100:8")) == []
    write("[h100]\nmemory = 94e9\nlink = 8e11\n")
    assert machine_lines(Target.parse("h100:8")) == ["h100 as in targets.toml: memory, link"]


def test_pods_of_a_run_see_the_file_that_the_variable_names(write, tmp_path, monkeypatch):
    write(CONFIG, "config.toml")
    job = make_job(load_config(Path("config.toml")), ["config.toml"], Path("cache"), 1)
    assert "GRAPHTRAIN_TARGETS" not in job_set(job, image="image", claim="disk")
    monkeypatch.setenv("GRAPHTRAIN_TARGETS", "mine.toml")
    manifest = job_set(job, image="image", claim="disk")
    assert manifest.count(f"value: {tmp_path}/mine.toml") == 2  # compile and run
