"""neuronx-cc's command, flags and failures; nothing here compiles."""

import os
from pathlib import Path

import pytest

from lowering.errors import LoweringError, OutOfMemory
from lowering.machine.target import Target
from lowering.neuron import compiler, neff
from lowering.neuron.compiler import CompilerFailed, CompilerInterrupted, compile_error
from lowering.neuron.compiler_flags import NEWEST_VERSION, flags

TRN1, TRN2, SIMULATED = (Target.parse(name) for name in ("trn1:32", "trn2:64", "neuron-sim:4"))


def test_what_versions_disagree_about_is_said():
    chosen = flags(TRN1, "2.24.5133.0+58f8de22")
    assert chosen[:3] == ["--target=trn1", "--model-type=transformer", "--auto-cast=none"]
    assert not any(flag.startswith("--native-int64") for flag in chosen)


def test_flags_that_a_version_does_not_know_are_left_out():
    new = set(flags(TRN1, "2.27.5334.0")) - set(flags(TRN1, "2.26.1.0"))
    assert new == {"--native-int64=disabled", "--implicit-integer-downcast=all"}


def test_cores_that_make_one_are_said_where_the_machine_has_them():
    assert "--logical-nc-config=2" in flags(TRN2, NEWEST_VERSION)
    assert "--logical-nc-config=1" in flags(Target.parse("trn2-lnc1:128"), NEWEST_VERSION)
    assert not any("logical" in flag for flag in flags(TRN1, NEWEST_VERSION))


def test_a_users_flags_come_last_without_those_of_the_wrapper(monkeypatch):
    asked = "--cache_dir=/shared --retry_failed_compilation --enable-saturate-infinity"
    monkeypatch.setenv("NEURON_CC_FLAGS", asked)
    assert flags(TRN1, NEWEST_VERSION)[-1] == "--enable-saturate-infinity"
    assert not any("cache_dir" in flag for flag in flags(TRN1, NEWEST_VERSION))


def test_a_graph_that_runs_once_is_compiled_quickly():
    assert "--optlevel=1" in flags(TRN1, NEWEST_VERSION, fast=True)
    assert "--optlevel=2" in flags(TRN1, NEWEST_VERSION)


@pytest.mark.parametrize("code", ["EOOM001", "EOOM002", "EVRF009", "EXSP001"])
def test_too_little_memory_is_one_error(code):
    error = compile_error(
        70, f"noise\n[ERROR] [NCC_{code}] needs 21 GB\n", graph="train", target=TRN1
    )
    assert isinstance(error, OutOfMemory)
    assert "train does not fit in the memory of trn1:32: NCC_" + code in str(error)


def test_a_refused_program_is_told_with_the_codes():
    log = "x\nERROR: [NCC_EVRF004] complex types\nERROR: [NCC_EHCA005] custom call\n"
    error = compile_error(70, log, graph="train", target=TRN1)
    assert isinstance(error, CompilerFailed)
    assert "NCC_EVRF004 complex types; NCC_EHCA005 custom call" in str(error)


@pytest.mark.parametrize("status", [-9, 137])
def test_a_compiler_that_was_killed_has_refused_nothing(status):
    error = compile_error(status, "", graph="train", target=TRN1)
    assert isinstance(error, CompilerInterrupted)
    assert "SIGKILL" in str(error) and "--jobs 1" in str(error)


def test_a_simulated_file_is_never_taken_for_a_neff():
    simulated = neff.pack({"ranks": 4}, b"executable")
    with pytest.raises(LoweringError, match="made by the simulator"):
        neff.check(simulated, simulated=False, what="it")
    with pytest.raises(LoweringError, match="made by the simulator"):
        neff.check_directory("neuronxcc-2.27.5334.0+a3f3b4c7", simulated)
    with pytest.raises(LoweringError, match="not made by the simulator"):
        neff.check_directory("neuronxcc-0.0.0.0+simulator", b"\x00NEFF")
    neff.check_directory("neuronxcc-0.0.0.0+simulator", simulated)


def test_what_the_simulator_writes_can_be_read_back():
    assert neff.unpack(neff.pack({"ranks": 4}, b"a\nb")) == ({"ranks": 4}, b"a\nb")


def fake_compiler(directory: Path, script: str) -> None:
    program = directory / "neuronx-cc"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Put a compiler on the path that does what a script says."""
    compiler.find_compiler.cache_clear()
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    yield lambda script: fake_compiler(tmp_path, script)
    compiler.find_compiler.cache_clear()


SAYS_VERSION = '[ "$1" = --version ] && echo "NeuronX Compiler version 2.27.5334.0+ab12" && exit 0'


def test_the_compiler_is_given_the_module_and_its_neff_is_taken(installed):
    installed(f'{SAYS_VERSION}\necho "$@"\ncp "$3" "$5"')
    found = compiler.find_compiler(TRN1)
    assert found is not None
    assert (found.version, found.directory) == (
        "2.27.5334.0+ab12",
        "neuronxcc-2.27.5334.0+ab12",
    )
    chosen = flags(TRN1, found.version)
    assert compiler.run(found, b"module", chosen, graph="train", target=TRN1) == b"module"


def test_a_compiler_that_writes_nothing_has_failed(installed):
    installed(f"{SAYS_VERSION}\nexit 0")
    found = compiler.find_compiler(TRN1)
    with pytest.raises(CompilerFailed, match=r"wrote no model\.neff"):
        compiler.run(found, b"module", [], graph="train", target=TRN1)


def test_a_simulator_in_the_place_of_the_compiler_is_found_out(installed):
    installed(
        f"{SAYS_VERSION}\nprintf 'GRAPHTRAIN SIMULATED NEFF, NOT FOR A NEURON DEVICE\\n' > $5"
    )
    found = compiler.find_compiler(TRN1)
    with pytest.raises(LoweringError, match="no Neuron device can run it"):
        compiler.run(found, b"module", [], graph="train", target=TRN1)
