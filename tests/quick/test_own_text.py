"""The commands of the page on one's own text do what the page says, in a few steps."""

import json
import pydoc_data.topics
import re
import shlex

from in_process import graphtrain
from places import ROOT, Place

from graphtrain.config import load_config

PAGE = (ROOT / "docs/getting-started/own-text.md").read_text()
COMMANDS = re.findall(r"^\$ graphtrain (.*)$", PAGE, re.M)
LOADING = ("run", "evaluate", "generate")  # compiled programs, in processes of their own
FEW_STEPS = {"steps": 8, "warmup_steps": 2, "evaluate_every": 8}


def test_its_commands_train_and_export_a_model_of_a_book(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    place = Place(tmp_path, tmp_path / "cache")
    topics = pydoc_data.topics.topics
    (tmp_path / "book.txt").write_text("\n\n".join(topics[name] for name in sorted(topics)[:20]))
    for command in COMMANDS:
        words = shlex.split(command)
        if words[0] in LOADING:
            place.command(*words)
        else:
            ended = graphtrain(*words)
            assert ended.status == 0, f"{command}\n{ended.out}{ended.err}"
        if command.startswith("init book"):
            _shorten(tmp_path / "book/config.toml")
    exported = json.loads((tmp_path / "book-hf/config.json").read_text())
    assert (exported["model_type"], exported["vocab_size"]) == ("gpt2", 257)
    assert load_config("book/run").program.model.vocab_padding == 63
    assert load_config("book").program.model.vocab_tokens < 150  # of the characters


def _shorten(config):
    """Train for a few steps only."""
    text = config.read_text()
    for name, value in FEW_STEPS.items():
        text, found = re.subn(rf"^{name} = \d+", f"{name} = {value}", text, flags=re.M)
        assert found == 1, name
    config.write_text(text)
