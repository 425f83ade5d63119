"""Tasks of a run in training: what is wrong is named before anything is compiled."""

from collections.abc import Callable
from pathlib import Path

import pytest
from task_files import write_tasks

from graphtrain.api.checks import tasks as checked_tasks
from graphtrain.api.checks.problem import Problem
from graphtrain.api.checks.tasks import tasks_problems
from graphtrain.compile.tasks import run_tasks
from graphtrain.config import load_config
from graphtrain.config.resolve import resolve
from graphtrain.data.prepare.text import prepare

CONFIG = """
[program]
target = "cpu:1"
model = { layers = 1, embed = 8, heads = 2, mlp = 8, vocab = 264 }
batch = { global_batch_size = 8, seq_len = 8 }
serve = { context_length = 640, prefill = [32] }

[run]
directory = "run"
steps = 1
data = { train = "data/train" }
samples = { prompts = "prompts.jsonl" }
tasks = { names = ["boolq"], data = "tasks" }
"""
Found = Callable[..., list[Problem]]


@pytest.fixture
def found(tmp_path, monkeypatch, make_corpus) -> Found:
    monkeypatch.chdir(tmp_path)
    prepare([make_corpus([f"text {i} " * 9 for i in range(99)])], tmp_path / "data", "bytes")
    write_tasks(tmp_path / "tasks", 4)

    def problems(*words: str) -> list[Problem]:
        return list(tasks_problems(load_config(CONFIG, words)))

    return problems


def test_what_is_wrong_with_the_tasks_of_a_run_is_named(found: Found, monkeypatch):
    assert found() == []

    def named(text: str, *words: str, kind: str = "data") -> None:
        (problem,) = found(*words)
        assert problem.kind == kind and text in problem.message, problem

    unknown, without_data, code = found('run.tasks.names=["bolq", "hellaswag", "humaneval"]')
    assert "run.tasks.names: bolq: lm-eval has no task" in unknown.message
    assert "hellaswag: no tasks/" in without_data.message and without_data.kind == "missing_data"
    assert "humaneval runs code" in code.message
    named('run.tasks.data = "nothing": no such', 'run.tasks.data="nothing"', kind="missing_data")
    named("5 examples are asked for, and the split train has 4 rows", 'run.tasks.names=["gsm8k"]')
    examples = Path("tasks/gsm8k/train.jsonl")
    examples.write_text(examples.read_text() * 2)
    named("leaves no room for the prompt in the context of 100", 'run.tasks.names=["gsm8k"]',
          "program.serve.context_length=100")  # fmt: skip
    named("run.tasks does not support program.mesh.context on several hosts",
          "program.target=cpu:2x4", "program.mesh.context=2", kind="program")  # fmt: skip
    named("no tokenizer", 'run.data.train="other"', kind="missing_data")
    named("has a chat template", "run.tasks.apply_chat_template=true")
    Path("tasks/boolq/validation.jsonl").write_text('{"passage": "a", "label": 1}\n')
    named("validation.jsonl: has no field 'question'")
    monkeypatch.setattr(checked_tasks, "is_installed", lambda module: False)
    named("pip install 'graphtrain[eval]'", kind="machine")


def test_the_programs_of_tasks_also_continue_prompts():
    config = load_config(CONFIG)
    graphs = [one.graph for one in run_tasks({"a": resolve(config.program)}, {"a": config.run})]
    assert graphs == [
        "init", "train", "evaluate", "serve_init", "prefill_32", "decode", "copy_prefix",
        "score_rows_8", "score_rows_32", "score_packed_32",
    ]  # fmt: skip
