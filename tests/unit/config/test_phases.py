"""[[program.phase]]: the programs of a run, what checkpoints record of them, mistakes by line."""

from pathlib import Path

import pytest

from graphtrain.api.checks.report import problems
from graphtrain.compile.tasks import run_tasks
from graphtrain.config import render
from graphtrain.config.identity import differences, mathematics
from graphtrain.config.load import load_config
from graphtrain.config.phases import training_phases
from graphtrain.config.resolve import resolve
from graphtrain.errors import ConfigError

TEXT = """
[program]
target = "cpu:2"

[program.model]
layers = 1
embed = 16
heads = 2
mlp = 16
vocab = 264
rope_theta = 5e5

[program.batch]
global_batch_size = 8
seq_len = 32

[[program.phase]]
until = 20
global_batch_size = 4
rope_theta = 1e4

[[program.phase]]
until = 50
seq_len = 16

[run]
directory = "run"
steps = 80

[run.data]
train = "absent"
"""


WITHOUT = TEXT[: TEXT.index("[[program")] + TEXT[TEXT.index("[run]") :]


def changed(old: str, new: str, text: str = TEXT) -> str:
    assert old in text
    return text.replace(old, new)


def test_each_phase_is_the_program_of_a_configuration_without_phases():
    config = load_config(TEXT)
    phases = training_phases(resolve(config.program))
    assert [(one.start, one.end) for one in phases] == [(0, 20), (20, 50), (50, None)]
    middle = load_config(WITHOUT, ["program.batch.seq_len=16"])
    assert phases[1].program == resolve(middle.program)
    tasks = run_tasks({"a": resolve(config.program)}, {"a": config.run})
    alone = run_tasks({"a": phases[1].program}, {"a": config.run})
    assert [task.label for task in tasks] == [
        "phase 1 init", "phase 1 train", "phase 1 evaluate", "phase 2 train", "phase 2 evaluate",
        "train", "evaluate",
    ]  # fmt: skip
    assert [task.request for task in tasks[3:5]] == [task.request for task in alone[1:]]


def test_a_configuration_with_phases_renders_back_to_itself():
    config = load_config(TEXT)
    assert load_config(render(config)) == config
    assert "phase =" not in render(load_config(WITHOUT))


def test_a_checkpoint_records_the_phase_of_its_step_and_all_others():
    config = load_config(TEXT)
    early, late = mathematics(config, 20), mathematics(config, 60)
    assert set(differences(early, late)) == {
        "program.batch.global_batch_size", "program.model.rope_theta"
    }  # fmt: skip
    other = load_config(changed("until = 50", "until = 51"))
    assert set(differences(late, mathematics(other, 60))) == {"program.phase"}
    rows = load_config(changed("seq_len = 16\n", "seq_len = 16\nmicrobatches = 2\n"))
    assert mathematics(rows, 60) == late  # only how the same is computed
    assert "program.phase" not in mathematics(load_config(WITHOUT))


@pytest.mark.parametrize(
    ("old", "new", "line", "message"),
    [
        ("until = 50", "until = 20", 22, "phase 2 (until = 20) ends at or before the phase before"),
        ("until = 50", "until = 81", 22, "ends after the last step, run.steps = 80; lower until"),
        ("seq_len = 16", "microbatches = 3", 22,
         "phase 2 (until = 50): global_batch_size = 8 is not a multiple of microbatches = 3"),
        ("seq_len = 16", "", 22, "a phase differs from [program] in at least one of"),
        ("seq_len = 16", "rope_scaling = false", 22, "model.rope_scaling, which is not set"),
        ("seq_len = 16", "batch = 3", 24, "unknown setting program.phase.1.batch"),
        ("rope_theta = 5e5", 'positions = "learned"\nmax_position_embeddings = 32', 18,
         'only for the native decoder with positions = "rope"'),
    ],
)  # fmt: skip
def test_a_phase_that_cannot_be_is_refused_at_its_line(tmp_path, old, new, line, message):
    file = tmp_path / "a.toml"
    file.write_text(changed(old, new))
    with pytest.raises(ConfigError) as refused:
        load_config(file)
    assert str(refused.value).startswith(f"{file}:{line}: ") and message in str(refused.value)


def test_positions_beyond_the_learned_ones_are_refused_at_the_line_of_the_phase(tmp_path):
    file = tmp_path / "a.toml"
    text = changed("rope_theta = 5e5", 'positions = "learned"\nmax_position_embeddings = 32')
    file.write_text(changed("seq_len = 16", "seq_len = 64", text.replace("rope_theta = 1e4", "")))
    message = f"{file}:23: program: phase 2 (until = 50): batch.seq_len = 64 is more than "
    with pytest.raises(ConfigError, match=message.replace("(", r"\(").replace(")", r"\)")):
        load_config(file)


def test_a_batch_that_the_mesh_does_not_divide_is_found_before_compiling(tmp_path):
    file = Path(tmp_path / "a.toml")
    file.write_text(changed("global_batch_size = 4", "global_batch_size = 3"))
    from graphtrain.api.checks.checked import check_config
    from graphtrain.api.checks.purpose import PLAN

    with pytest.raises(ConfigError) as refused:
        check_config(file, PLAN)
    assert str(refused.value).startswith(f"{file}:19: phase 1 (until = 20): ")
    assert "global_batch_size = 3 is not a multiple of program.mesh.data = 2; use 2 or 4" in str(
        refused.value
    )
    assert not [one for one in problems(load_config(TEXT), PLAN) if one.kind == "program"]


def test_samples_of_a_model_with_other_rotary_positions_are_refused():
    with pytest.raises(ConfigError, match=r"program.phase 1 \(until = 20\) has a model with other"):
        load_config(TEXT, ['run.samples={prompts = "prompts.txt"}'])
