"""Graphs that torch-xla has traced: through the command into the store, and executed from there."""

import gzip
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from places import ROOT, Place

EXTRACTED = ROOT / "tests" / "graphs" / "torch_xla"
SCRIPT = ROOT / "examples" / "torch-xla" / "train.py"
PYTHON = os.environ.get("GRAPHTRAIN_TORCH_XLA_PYTHON")

# What a program that loads an extracted graph takes: 64-bit numbers, as torch has them.
FIRST_LOSS = """
import sys
from pathlib import Path
import jax, numpy as np
import lowering
from graphtrain.cache import Cache
from lowering.machine.target import Target

root, digest, name, inputs = sys.argv[1:]
jax.config.update("jax_enable_x64", True)
target, artifact = Target.parse(name), Cache(Path(root)).get(digest)
backend = lowering.backend(target)
program, stored = backend.load(artifact, target), np.load(inputs)
names = artifact.record["arguments"]
given = [backend.to_devices(stored[each], program.inputs(each)) for each in names]
outputs = program(*given).values()
print(*[float(each) for each in outputs if each.shape == () and each.dtype == "float32"])
"""


@pytest.fixture
def here(tmp_path: Path, compiled_quickly: None) -> Place:
    """A directory with what was extracted, and an empty store."""
    for file in EXTRACTED.rglob("*.*"):
        to = tmp_path / file.relative_to(EXTRACTED)
        to.parent.mkdir(exist_ok=True)
        if file.suffix == ".gz":
            to.with_suffix("").write_bytes(gzip.decompress(file.read_bytes()))
        else:
            shutil.copy(file, to)
    return Place(tmp_path, tmp_path / "cache")


def graphs_of(place: Place, *words: str) -> list[dict]:
    out, _ = place.command("extract", "--json", *words)
    return json.loads(out)["graphs"]


def first_loss(place: Place, digest: str, target: str) -> float:
    words = str(place.cache), digest, target, "one/first_step.npz"
    process = place.start_python("-c", FIRST_LOSS, *words)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return float(out)


def test_extracted_graphs_are_compiled_once_and_give_the_loss_of_torch_xla(here: Place):
    import numpy as np

    one = graphs_of(here, "--from", "one")
    assert [(each["status"], each["steps"]) for each in one] == [
        ("compiled", [0]),
        ("compiled", [1]),
    ]
    assert [(each["parameters"], each["donated"]) for each in one] == [(25, 13), (51, 39)]
    assert [each["status"] for each in graphs_of(here, "--from", "one")] == ["cached", "cached"]
    eight = graphs_of(here, "--from", "eight", "--target", "cpu:8")
    assert [each["status"] for each in eight] == ["compiled"]

    want = float(np.load(here.path / "one" / "first_step.npz")["loss"])
    assert first_loss(here, one[0]["digest"], "cpu:1") == pytest.approx(want, rel=1e-6)
    # The weights of "eight" begin as those of "one", and are split.
    assert first_loss(here, eight[0]["digest"], "cpu:8") == pytest.approx(want, rel=1e-5)

    record = json.loads(here.command("cache", "show", "--json", eight[0]["digest"])[0])["record"]
    assert record["mesh"] == {"data": 2, "tensor": 4}
    assert record["inputs"]["input00"]["split"] == [["tensor"], []]
    assert {axis for each in record["collectives"] for axis in each["axes"]} == {"data", "tensor"}
    listed, _ = here.command("cache", "ls")
    assert "train.py step 0" in listed and "cpu:8" in listed
    assert "step 0 graph is stored" in here.command("cache", "explain", "one")[0]
    assert (
        "target: cpu:1 → h100:1" in here.command("cache", "explain", "one", "--target", "h100:1")[0]
    )
    here.command("cache", "verify")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--from", "eight", "--target", "cpu:4"], "was extracted for 8 devices, but cpu:4 has 4"),
        (["--from", "nowhere"], "no extracted graphs in nowhere"),
        (["nowhere.py"], "the script nowhere.py does not exist"),
        (["--python", "nowhere", "script.py"], "--python nowhere: No such file"),
    ],
)
def test_what_cannot_be_extracted_says_why(here: Place, words: list[str], said: str):
    (here.path / "script.py").write_text("")
    assert said in here.command("extract", *words, status=2)[1]


def test_an_interpreter_without_torch_xla_says_what_to_install(here: Place, tmp_path: Path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    (here.path / "script.py").write_text("")
    _, err = here.command("extract", "--python", str(python), "script.py", status=2)
    assert "pip install torch==2.9.0 torch-xla==2.9.0" in err


def test_a_damaged_extraction_names_the_file(here: Place):
    file = next(here.path.glob("one/*.hlo.pb"))
    file.write_bytes(b"junk")
    assert (
        f"{file.name}: these 4 bytes are not an HloProto"
        in here.command("extract", "--from", "one", status=2)[1]
    )
    file.unlink()
    assert f"{file.name} missing in" in here.command("extract", "--from", "one", status=2)[1]


needs_torch_xla = pytest.mark.skipif(
    PYTHON is None,
    reason="needs torch-xla: GRAPHTRAIN_TORCH_XLA_PYTHON names an interpreter that has it",
)


@needs_torch_xla
@pytest.mark.parametrize(
    ("name", "devices", "words"), [("one", 1, []), ("eight", 8, ["--mesh", "2", "4"])]
)
def test_the_hashes_are_those_of_a_real_run(
    here: Place, monkeypatch: pytest.MonkeyPatch, name: str, devices: int, words: list[str]
):
    monkeypatch.setenv("CPU_NUM_DEVICES", str(devices))
    monkeypatch.delenv("XLA_FLAGS")  # torch-xla has them in its hashes
    options = [str(SCRIPT), "--width", "8", "--report-every", "0", *words]
    extracted = graphs_of(here, "--output", "new", "--steps", "2", "--no-compile", *options)
    shipped = json.loads((EXTRACTED / name / "graphs.json").read_text())["graphs"]
    assert [each["hash"] for each in extracted[: len(shipped)]] == [
        each["hash"] for each in shipped
    ]

    assert PYTHON is not None
    told = subprocess.run(
        [PYTHON, *options, "--steps", "2"],
        env=os.environ | {"PJRT_DEVICE": "CPU", "PT_XLA_DEBUG_LEVEL": "2"},
        capture_output=True,
        text=True,
        check=True,
    )
    real = re.findall(r"Compilation Analysis:\s+Graph Hash: (\w+)", told.stderr)
    assert real == [each["hash"] for each in extracted]


SCRIPTS = {
    "reads.py": ("print(loss.item())", r"reads.py:\d+ \(print\(loss.item\(\)\)\) reads a value"),
    "raises.py": ("1 / 0", r"raises.py:\d+ \(1 / 0\): ZeroDivisionError"),
}
LOOP = """
import torch, torch_xla
weight = torch.ones(4, device=torch_xla.device(), requires_grad=True)
for step in range(3):
    with torch_xla.step():
        loss = (weight ** 2).sum()
        loss.backward()
        with torch.no_grad():
            weight -= 0.1 * weight.grad
        weight.grad = None
    {}
"""


@needs_torch_xla
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_that_cannot_go_on_names_its_line(here: Place, name: str):
    line, said = SCRIPTS[name]
    (here.path / name).write_text(LOOP.format(line))
    _, err = here.command("extract", "--no-compile", name, status=2)
    assert re.search(said, err)


@needs_torch_xla
def test_a_script_without_a_graph_says_what_ends_a_step(here: Place):
    (here.path / "idle.py").write_text("print('idle')")
    _, err = here.command("extract", "idle.py", status=2)
    assert "ended without a graph" in err and "torch_xla.sync" in err
