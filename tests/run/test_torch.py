"""A model of transformers as it is, through the real commands and back to a folder it loads."""

import json
import re

import pytest
import torch
import transformers
from places import CONFIG, CUBE
from test_weights import reference_loss

TORCH = """# Another model than the native one, and how it begins, in a file of the user's.
import torch
from model_parts import Block

def build(width):
    made = torch.nn.Sequential(torch.nn.Embedding(264, width), Block(width), Block(width))
    return made.append(torch.nn.Linear(width, 264))
"""
PARTS = """import torch

class Block(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up = torch.nn.Linear(width, 2 * width)
        self.down = torch.nn.Linear(2 * width, width)

    def forward(self, x):
        hidden = self.up(x)
        hidden.view(-1).mul_(0.5)
        return x + self.down(hidden.relu())
"""


def configure(place, model: str) -> None:
    table = re.compile(r"\[program.model\].*?\n\n", re.DOTALL)
    model = f'[program.model]\n{model}\ndtype = "float32"\nremat = "none"\n\n'
    (place.path / "config.toml").write_text(table.sub(lambda _: model, CONFIG))


def test_a_model_of_transformers_is_trained_from_its_weights_and_goes_back(cold, compiled_quickly):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 257}
    source = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**sizes, **heads))
    source.save_pretrained(cold.path / "source")
    (cold.path / "source/tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}}')
    configure(cold, 'hf = "source"\nvocab_padding = 7')  # so that tensor = 2 divides 264 rows
    words = ["config.toml", *CUBE, "--set", "run.init_from=source"]

    out, _ = cold.command("compile", *words, "--json")
    assert json.loads(out)["successful"] == 3
    (parity,) = (cold.cache / "parity").glob("*.json")
    assert json.loads(parity.read_text())["gradient"] < 1e-4
    out, _ = cold.command("evaluate", *words, "--json")
    want = reference_loss(source, cold.path / "data/validation", 257)
    assert json.loads(out)["validation_loss"] == pytest.approx(want, rel=1e-5)

    cold.command("run", *words)
    cold.command("convert", "graphtrain-to-hf", "run", "back")
    assert (cold.path / "back/tokenizer.json").exists()
    trained = transformers.AutoModelForCausalLM.from_pretrained(cold.path / "back")
    assert trained.get_input_embeddings().weight.shape == (257, 32)
    last = reference_loss(trained, cold.path / "data/validation", 257)
    assert last == pytest.approx(cold.journal()[-1]["validation_loss"], rel=1e-5)
    assert last < want - 0.5


def test_the_key_of_a_module_covers_what_it_imports_and_programs_do_not_differ(
    cold, compiled_quickly
):
    (cold.path / "mine.py").write_text(TORCH)
    (cold.path / "model_parts.py").write_text(PARTS)
    configure(cold, 'torch = "mine:build"\nvocab = 264\noverrides = {width = 32}')
    out, err = cold.command("compile", "config.toml", "--json")
    first = json.loads(out)
    assert first["successful"] == 3
    strict = re.compile(r"front end: strict, because mul_ at .*model_parts\.py:\d+ writes through")
    assert strict.search(err) and strict.search(cold.command("plan", "config.toml")[0])
    assert json.loads(cold.command("compile", "config.toml", "--json")[0])["cached"] == 3
    cold.command("run", "config.toml", "--set", "run.steps=2")
    assert all(one["mfu"] > 0 for one in cold.journal() if "loss" in one)

    # A comment costs a trace, in another process, and no compilation: the program is the same.
    (cold.path / "model_parts.py").write_text("# Parts of a model.\n" + PARTS)
    cold.command("run", "config.toml", status=3)
    again = json.loads(cold.command("compile", "config.toml", "--json")[0])
    assert [one["digest"] for one in again["graphs"]] == [one["digest"] for one in first["graphs"]]

    (cold.path / "model_parts.py").write_text(PARTS.replace("hidden.view(-1)", "hidden"))
    out, err = cold.command("compile", "config.toml", "--json")
    changed = json.loads(out)
    assert not strict.search(err)
    assert changed["graphs"][1]["digest"] != first["graphs"][1]["digest"]
    (cold.path / "mine.py").write_text(TORCH.replace("def build", "def made"))
    _, err = cold.command("compile", "config.toml", status=2)
    assert "mine.py defines no build; it defines made (mine.py:" in err
