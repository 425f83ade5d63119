"""Without an optional package, a command says in one line which extra installs it."""

import sys
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner
from in_process import graphtrain

from graphtrain import cli
from graphtrain.data.prepare import chat_templates
from lowering.machine import extras
from lowering.machine.extras import MissingExtra

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]

CONFIG = """
[program]
model = { layers = 1, embed = 8, heads = 2, mlp = 8, vocab = 257 }
batch = { global_batch_size = 8, seq_len = 8 }

[run]
directory = "run"
steps = 1
data = { train = "data/train" }
"""
CHAT = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'
FILES = {
    "a.toml": CONFIG,
    "a.jsonl": '{"text": "a b"}\n' * 40,
    "chat.jsonl": CHAT * 40,
    "a.parquet": "PAR1",
    "a.jsonl.zst": "",
    "tokenizer.json": '{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}',
    "bin/config.json": '{"model_type": "llama"}',
    "bin/pytorch_model.bin": "",
    "hf/config.json": '{"model_type": "llama", "num_hidden_layers": 1, "vocab_size": 264}',
}
PREPARE = "data prepare --output out"
# Package: command lines that need it.
COMMANDS = {
    "pyarrow": [f"{PREPARE} a.parquet"],
    "backports": [f"{PREPARE} a.jsonl.zst"],
    "tokenizers": [
        f"{PREPARE} a.jsonl --tokenizer tokenizer.json",
        "data tokenizer a.jsonl --output out --kind bpe --vocab 300",
    ],
    "jinja2": ["data instruct chat.jsonl --output out --tokenizer bytes --chat-template chatml"],
    "simple_slurm": ["launch slurm a.toml --dry-run"],
    "obstore": ["cache push store", "cache pull store", "cache sync store"],
    "securesystemslib": ["cache key new"],
    "lm_eval": ["data tasks . boolq"],
}


@pytest.fixture
def block(monkeypatch, tmp_path):
    """A function that makes a package impossible to import, in a directory with files."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)

    def block(package):
        importing = ("graphtrain.run.evaluation.",)  # at their beginning, not where they use it
        for name in [
            one
            for one in sys.modules
            if one.partition(".")[0] == package or one.startswith(importing)
        ]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, package, None)
        if package == "backports":  # the standard library has it from Python 3.14 on
            monkeypatch.setitem(sys.modules, "compression.zstd", None)
        chat_templates._environment.cache_clear()
        chat_templates._compiled.cache_clear()
        monkeypatch.delitem(sys.modules, "graphtrain.data.prepare.template_limits", raising=False)

    return block


@pytest.mark.parametrize(
    ("package", "line"), [(package, line) for package, lines in COMMANDS.items() for line in lines]
)
def test_a_command_without_its_package_names_the_extra(package, line, block):
    block(package)
    result = CliRunner().invoke(cli._root, line.split())
    extra = extras._PACKAGES[package][1]
    assert isinstance(result.exception, MissingExtra), result.exception
    assert f"run: pip install 'graphtrain[{extra}]'" in str(result.exception)


def test_every_package_is_in_the_extra_that_is_named():
    installed_by = PROJECT["optional-dependencies"]
    names = {
        "PIL": "pillow",
        "backports": "backports.zstd",
        "jax_plugins": "cuda",
        "libtpu": "tpu",
    }
    for module, (_, extra) in extras._PACKAGES.items():
        name = names.get(module, module.replace("_", "-"))
        listed = " ".join(installed_by[extra])
        assert name in listed or module == "cryptography", module  # of securesystemslib[crypto]


def test_an_import_that_nobody_expected_is_one_line_too(monkeypatch):
    def fail(**_):
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

    monkeypatch.setattr(cli._root, "main", fail)
    outcome = graphtrain("run")
    assert (outcome.status, outcome.err) == (
        2,
        "error: this command needs PyTorch, which is not installed; "
        "run: pip install 'graphtrain[torch]'\n",
    )
