"""The command for Trainium: trained on the simulator, bundled where the compiler is not."""

import json
import os
import re

import pytest

PLACE = ["--set", "program.mesh.data=2", "--set", "program.mesh.tensor=2"]
STEPS = ["--set", "run.steps=20", "--set", "run.evaluate_every=10"]

# Says its version, and copies the module to where the NEFF is expected.
COMPILER = """#!/bin/sh
if [ "$1" = --version ]; then echo "NeuronX Compiler version 2.27.5334.0+ab12"; exit 0; fi
cp "$3" "$5"
"""

# As the kernel ends what takes its memory: the first of all compilations.
KILLED = COMPILER.replace("cp", 'mkdir "$0.tried" 2>/dev/null && kill -9 $$\ncp')


def install(script, directory, monkeypatch):
    """Put a compiler on the path."""
    directory.mkdir()
    compiler = directory / "neuronx-cc"
    compiler.write_text(script)
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{directory}{os.pathsep}{os.environ['PATH']}")


@pytest.mark.usefixtures("compiled_quickly")
def test_the_simulator_trains_as_a_cpu_does(cold):
    for target in ("cpu:4", "neuron-sim:4"):
        words = ["config.toml", "--target", target, *PLACE]
        directory = ["--set", f'run.directory="{target[:3]}"']
        cold.command("compile", *words)
        cold.command("run", *words, *STEPS, *directory)
    theirs, ours = cold.journal("cpu"), cold.journal("neu")
    assert [record["step"] for record in ours] == [record["step"] for record in theirs]
    for mine, other in zip(ours, theirs, strict=True):
        name = "loss" if "loss" in mine else "validation_loss"
        assert mine[name] == pytest.approx(other[name], abs=1e-4)
    simulated = ["config.toml", "--target", "neuron-sim:4", *PLACE, "--set", 'run.directory="neu"']
    said, _ = cold.command("evaluate", *simulated, "--json")
    assert json.loads(said)["validation_loss"] == ours[-1]["validation_loss"]
    cold.command("run", *simulated, *STEPS, "--set", "run.steps=22")  # from the checkpoint of 20
    assert cold.journal("neu")[-1]["step"] == 22
    cold.command("cache", "verify")


@pytest.mark.usefixtures("compiled_quickly")
def test_a_program_without_its_compiler_is_bundled_and_finished_elsewhere(cold, monkeypatch):
    words = ["config.toml", "--target", "trn1:4", *PLACE]
    out, err = cold.command("compile", *words)
    assert "bundled:         3" in out and "failed:          0" in out
    assert re.search(r"^train: about [\d,]+ instructions \(.*; the limit is 5,000,000$", out, re.M)
    assert not (cold.cache / "v1/failures").exists()
    missing = "neuronx-cc is not installed on this machine"
    assert f"trn1:4: {missing}; install it (pip install neuronx-cc" in err
    bundles = sorted((cold.cache / "v1/bundles").iterdir())
    assert [bundle.name.partition("-")[0] for bundle in bundles] == ["evaluate", "init", "train"]
    names = {file.name for file in bundles[-1].iterdir()}
    assert names == {
        "bundle.json", "compile.sh", "compile_flags.json", "keys.json", "model.hlo_module.pb",
    }  # fmt: skip
    _, err = cold.command("neuron", "finish", *map(str, bundles), status=2)
    assert missing in err

    install(COMPILER, cold.path / "bin", monkeypatch)
    script = bundles[0] / "compile.sh"  # as on a machine without graphtrain
    assert os.system(f"sh {script}") == 0
    out, _ = cold.command("neuron", "finish", *map(str, bundles))
    assert len(out.splitlines()) == 3
    out, _ = cold.command("compile", *words, "--json")
    report = json.loads(out)
    assert report["cached"] == 3
    assert all(graph["preflight"]["instructions"] > 0 for graph in report["graphs"])
    _, err = cold.command("run", *words, *STEPS, status=2)
    assert "the Neuron runtime was not found on this machine" in err
    cold.command("cache", "verify")


@pytest.mark.usefixtures("compiled_quickly")
def test_a_compiler_that_is_killed_is_tried_again(cold, monkeypatch):
    install(KILLED, cold.path / "bin", monkeypatch)
    out, _ = cold.command("compile", "config.toml", "--target", "trn1:4", *PLACE, "--json")
    report = json.loads(out)
    assert report["successful"] == 3
    assert sorted(graph["attempts"] for graph in report["graphs"]) == [1, 1, 2]


@pytest.mark.usefixtures("compiled_quickly")
def test_a_program_that_the_compiler_would_refuse_is_not_given_to_it(cold, monkeypatch):
    install(COMPILER.replace("cp", "touch $0.asked; cp"), cold.path / "bin", monkeypatch)
    monkeypatch.setenv("NEURON_CC_FLAGS", "--lnc=2 --internal-max-instruction-limit=10")
    words = ["compile", "config.toml", "--target", "trn1:4", *PLACE]
    _, err = cold.command(*words, status=2)
    start = "train failed: neuronx-cc would reject train, so it was not started:"
    refusal = err[err.index(start) :]
    assert "[NCC_EARG001]" in refusal and "[NCC_EVRF007]" in refusal
    assert not (cold.path / "bin/neuronx-cc.asked").exists()
