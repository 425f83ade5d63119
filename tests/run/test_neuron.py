"""The command for Trainium: trained on the simulator, bundled where the compiler is not."""

import json
import os

import pytest

PLACE = ["--set", "program.mesh.data=2", "--set", "program.mesh.tensor=2"]
STEPS = ["--set", "run.steps=20", "--set", "run.evaluate_every=10"]

# Says its version, and copies the module to where the NEFF is expected.
COMPILER = """#!/bin/sh
if [ "$1" = --version ]; then echo "NeuronX Compiler version 2.27.5334.0+ab12"; exit 0; fi
cp "$3" "$5"
"""


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_program_without_its_compiler_is_bundled_and_finished_elsewhere(cold, monkeypatch):
    words = ["config.toml", "--target", "trn1:4", *PLACE]
    _, err = cold.command("compile", *words, status=2)
    assert "trn1:4: neuronx-cc is not installed here; install it (pip install neuronx-cc" in err
    bundles = sorted((cold.cache / "v1/bundles").iterdir())
    assert [bundle.name.partition("-")[0] for bundle in bundles] == ["evaluate", "init", "train"]
    names = {file.name for file in bundles[-1].iterdir()}
    assert names == {
        "bundle.json", "compile.sh", "compile_flags.json", "keys.json", "model.hlo_module.pb",
    }  # fmt: skip
    _, err = cold.command("neuron-finish", *map(str, bundles), status=2)
    assert "neuronx-cc is not installed here" in err

    (cold.path / "bin").mkdir()
    compiler = cold.path / "bin/neuronx-cc"
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{cold.path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    script = bundles[0] / "compile.sh"  # as on a machine without graphtrain
    assert os.system(f"sh {script}") == 0
    out, _ = cold.command("neuron-finish", *map(str, bundles))
    assert len(out.splitlines()) == 3
    out, _ = cold.command("compile", *words)
    assert "already cached:  3" in out
    _, err = cold.command("run", *words, *STEPS, status=2)
    assert "the Neuron runtime is not on this machine" in err
    cold.command("cache", "verify")
