"""Backends: every one has the functions of `lowering.Backend`, and is found by its platform."""

import inspect
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import lowering
from lowering.errors import LoweringError
from lowering.machine import backends
from lowering.machine.target import Target

ROOT = Path(__file__).parents[3]
PLATFORMS = ["cpu", "neuron", "ascend"]  # one of each module
TRACED_ELSEWHERE = ["from_global_program"]


def required(function, *, method=False):
    parameters = [
        p.name for p in inspect.signature(function).parameters.values() if p.default is p.empty
    ]
    return parameters[1:] if method else parameters


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("name", lowering.functions(lowering.Backend))
def test_every_backend_has_the_functions_of_the_protocol(platform, name):
    found = backends.find_backend(platform, [])
    wanted = getattr(lowering.Backend, name)
    assert required(getattr(found, name)) == required(wanted, method=True)


@pytest.mark.parametrize("platform", ["neuron", "ascend"])
def test_backends_of_one_device_take_programs_traced_elsewhere(platform):
    found = backends.find_backend(platform, [])
    wanted = lowering.GlobalProgramBackend.from_global_program
    assert required(found.from_global_program) == required(wanted, method=True)
    names = lowering.functions(lowering.GlobalProgramBackend)
    assert set(names) - set(lowering.functions(lowering.Backend)) == set(TRACED_ELSEWHERE)


def test_the_backends_of_this_project_are_its_entry_points():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["graphtrain.backends"] == backends.BUILT_IN


def test_a_built_in_target_reads_no_metadata():
    code = (
        "import sys, lowering; from lowering.machine.target import Target;"
        "Target.parse('h100:8').memory_bytes; lowering.backend(Target.parse('cpu:1'));"
        "from lowering.machine import backends; print(backends._entry_points.cache_info().currsize)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert done.stdout.strip() == "0"


def test_an_unknown_platform_says_what_to_install():
    with pytest.raises(LoweringError, match="install the package of its backend, which has an"):
        backends.find_backend("abacus", [])


def test_an_unknown_machine_says_where_machines_come_from():
    with pytest.raises(
        LoweringError, match=r"an entry point 'abacus' in the group graphtrain\.mac"
    ):
        Target.parse("abacus:1")
