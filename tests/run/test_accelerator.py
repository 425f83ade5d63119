"""Programs compiled where no accelerator is, and loaded where one is.

On a machine with a card: pip install 'jax[cuda13]' beside graphtrain, then
python -m pytest tests/run/test_accelerator.py
"""

import os
import shutil
import subprocess
from importlib.util import find_spec

import pytest
from places import Place

from lowering.machine.machine_tables import machines

WITHOUT_CARD = {"CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu"}
TARGETS = {"h100:8": "jax_plugins.xla_cuda13", "v5e:2x4": "libtpu"}


def attached() -> str | None:
    """The machine of topologies.toml whose card is here, if one is."""
    if shutil.which("nvidia-smi") is None:
        return None
    words = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    answer = subprocess.run(words, capture_output=True, text=True)
    name = answer.stdout.partition("\n")[0].lower()
    return next((machine for machine in machines() if machine in name.split()), None)


needs_card = pytest.mark.skipif(
    attached() is None, reason="needs an attached GPU of topologies.toml"
)


def is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


@pytest.mark.parametrize("target", TARGETS)
def test_two_compilers_at_once_fill_the_cache_for_a_machine_that_is_not_here(cold: Place, target):
    if not is_installed(TARGETS[target]):
        pytest.skip(f"no {TARGETS[target]}")
    words = ["compile", "config.toml", "--target", target]
    both = [cold.start(*words), cold.start(*words)]
    outputs = [process.communicate(timeout=300) for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    out, _ = cold.command(*words)
    assert "already cached:  3" in out
    _, err = cold.command("run", "config.toml", "--target", target, status=2)
    assert f"{target}: JAX finds no " in err


@needs_card
def test_what_was_compiled_without_a_card_trains_on_it(cold: Place, monkeypatch):
    target = f"{attached()}:1"
    with monkeypatch.context() as hidden:
        for name, value in WITHOUT_CARD.items():
            hidden.setenv(name, value)
        cold.command("compile", "config.toml", "--target", target)
    cold.command("run", "config.toml", "--target", target, "--set", 'run.directory="card"')
    cold.command("run", "config.toml", "--compile", "--set", 'run.directory="cpu"')
    card, cpu = cold.curve("card"), cold.curve("cpu")
    assert [step for step, _, _ in card] == list(range(1, 17))
    # float32 products of a card are TensorFloat-32 unless asked otherwise: 10 bits of mantissa.
    assert [loss for _, loss, _ in card] == pytest.approx([loss for _, loss, _ in cpu], rel=5e-3)
    assert os.path.exists(cold.path / "card" / "checkpoints")


@pytest.mark.parametrize("target", ["h100:1", "v5e:1x1"])
def test_out_of_memory_is_one_error_with_the_largest_arrays(cold: Place, target):
    module = TARGETS["h100:8" if target.startswith("h100") else "v5e:2x4"]
    if not is_installed(module):
        pytest.skip(f"no {module}")
    words = ["--target", target, "--set", "program.batch.seq_len=8192"]
    words += ["--set", "program.batch.global_batch_size=1024"]
    for _ in range(2):  # compiled, then from the cache where the compiler let it pass
        _, err = cold.command("compile", "config.toml", *words, status=2)
        assert f"train does not fit in the memory of {target}: " in err
        assert "; estimated largest: " in err and " logits and their gradient " in err
        assert "run graphtrain plan for the cheapest changes that would fit" in err
