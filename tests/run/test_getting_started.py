"""The pages on one's own model and on a cluster do what they say; new projects train."""

import os
import re
import shlex
import subprocess
import sys

import pytest
import torch
import transformers
from places import CONFIG, ROOT
from test_processes import meeting_address

from graphtrain.config import load_config

DOCS = ROOT / "docs/getting-started"
SMALL = [
    *("--set", "run.steps=12", "--set", "run.learning_rate.warmup_steps=0"),
    *("--set", "program.batch.global_batch_size=2", "--set", "program.batch.seq_len=16"),
]
FAKE_SLURM = {
    "sbatch": 'echo "$@" >> sbatch.log; wc -l < sbatch.log',
    "squeue": 'test "$3" = 1 && echo "RUNNING None" || echo "PENDING Dependency"',
}

pytestmark = pytest.mark.usefixtures("compiled_quickly")


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", (DOCS / page).read_text(), re.M | re.S)


def commands(page):
    """Return the commands of a page, without the prompt, by their console blocks."""
    return [re.sub(r"^\$ ", "", one, flags=re.M) for one in blocks(page, "console")]


def hugging_face_folder(path, vocab=264):
    """Write a small Llama with random weights, without a tokenizer."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": vocab}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads))
    model.save_pretrained(path)


def with_settings(text, tables):
    """Replace tables of settings in the text of a configuration, and add the settings of others."""
    for header, settings in re.findall(r"^(\[.*?\])\n(.*?)(?=^\[|\Z)", tables, re.M | re.S):
        if header == "[run]":
            text = text.replace("[run]\n", f"[run]\n{settings}")
        else:
            table = re.compile(rf"^{re.escape(header)}\n.*?\n\n", re.M | re.S)
            text = table.sub(lambda _, new=f"{header}\n{settings}\n": new, text)
    return text


def test_the_page_on_ones_own_model(cold):
    hugging_face_folder(cold.path / "qwen")
    (code,) = blocks("own-model.md", "python")
    (cold.path / "mine.py").write_text(code)
    preset, converted, hf, module = blocks("own-model.md", "toml")
    convert, checks = commands("own-model.md")
    assert load_config(with_settings(CONFIG, preset)).program.model.embed == 2048
    cold.command(*shlex.split(convert)[1:])
    for tables in (converted, hf):
        (cold.path / "config.toml").write_text(with_settings(CONFIG, tables))
        assert "no problem" in cold.command("config", "check", "config.toml")[0]
    (cold.path / "config.toml").write_text(with_settings(CONFIG, module))
    plan, run = checks.splitlines()
    assert "embedding" in cold.command(*shlex.split(plan)[1:])[0]
    out, _ = cold.command(*shlex.split(run)[1:])
    assert "trained 10 steps" in out
    assert cold.curve()[-1][1] < cold.curve()[0][1] - 0.3


def test_the_page_on_a_cluster(cold, monkeypatch):
    for name, lines in FAKE_SLURM.items():
        program = cold.path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f"#!/bin/sh\n{lines}\n")
        program.chmod(0o755)
    (cold.path / "bin/graphtrain").write_text(
        f'#!/bin/sh\nexec {sys.executable} -m graphtrain "$@"\n'
    )
    (cold.path / "bin/graphtrain").chmod(0o755)
    monkeypatch.setenv("PATH", f"{cold.path / 'bin'}:{os.environ['PATH']}")
    large = CONFIG.replace("global_batch_size = 8", "global_batch_size = 64")
    (cold.path / "examples").mkdir()
    (cold.path / "examples/quickstart.toml").write_text(CONFIG)
    (cold.path / "examples/llama2-7b.toml").write_text(large)

    def shell(script):
        done = subprocess.run(
            ["bash", "-ec", script], cwd=cold.path, env=cold.environment(),
            capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, f"{script}\n{done.stdout}{done.stderr}"
        return done.stdout

    plan, rehearse, submit, watch = commands("cluster.md")
    assert "h100:64" in shell(plan)
    assert "localhost:8476" in rehearse
    address = meeting_address().replace("127.0.0.1", "localhost")
    shell(f"{rehearse.replace('localhost:8476', address)}\nwait")
    assert [step for step, _, _ in cold.curve("runs/two")] == list(range(1, 17))
    install, launch = submit.splitlines()
    assert install.startswith("pip install")
    assert "#SBATCH --partition" in shell(launch)
    shell(launch.removesuffix(" --dry-run"))
    assert "--dependency=afterok:1" in (cold.path / "sbatch.log").read_text()
    assert shell(watch).splitlines() == [
        "compile: job 1, running",
        "run:     job 2, pending dependency",
    ]


@pytest.mark.parametrize("like", ["lora", "hf"])
def test_a_project_from_a_hugging_face_model_trains(cold, like):
    hugging_face_folder(cold.path / "model")
    (cold.path / "book.txt").write_text("ROMEO: and so on, and so on.\n" * 999)
    cold.command("init", "mine", "--like", f"{like}=model", "--data", "book.txt")
    out, _ = cold.command("run", "mine", "--compile", *SMALL)
    assert "trained 12 steps" in out
    losses = [loss for _, loss, _ in cold.curve("mine/run")]
    assert sum(losses[6:]) < sum(losses[:6])
