"""Files and flags to Config, and what is said of wrong ones."""

import os
from pathlib import Path

import pytest

from graphtrain.config import load_config
from graphtrain.config.load import run_directory
from graphtrain.errors import ConfigError

GOOD = """\
[program.model]
layers = 2
embed = 64
heads = 4
mlp = 256
vocab = 256

[program.batch]
global_batch_size = 4
seq_len = 128

[run]
directory = "runs/small"
steps = 10

[run.data]
train = "data/train"
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = Path("a.toml")
    path.write_text(GOOD)
    return path


def problems(path, *overrides, target=None):
    with pytest.raises(ConfigError) as error:
        load_config(path, overrides, target)
    return str(error.value).splitlines()


def changed(file, *replacements):
    text = GOOD
    for old, new in replacements:
        assert text.count(old) == 1
        text = text.replace(old, new)
    file.write_text(text)
    return problems(file)


def test_a_pytorch_model_is_told_the_choices_that_it_has(file):
    model = GOOD[: GOOD.index("[program.batch]")]
    imported = '[program.model]\nhf = "llama"\nremat = "offload"\n\n'
    (problem,) = changed(file, (model, imported))
    assert problem.endswith('should be "none", "attention", "dots" or "full"')


def test_a_file_is_resolved(file):
    config = load_config(file)
    assert config.program.model.kv_heads == 4
    assert config.program.target == "cpu:1"
    assert config.run.data.train == "data/train"


def test_a_byte_order_mark_is_no_part_of_the_file(file):
    file.write_bytes(b"\xef\xbb\xbf" + GOOD.encode())
    assert load_config(file).run.steps == 10


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("run.steps=20", lambda config: config.run.steps == 20),
        ("run.steps = 20 ", lambda config: config.run.steps == 20),
        ("run.learning_rate.peak=1", lambda config: config.run.learning_rate.peak == 1.0),
        ("run.tensorboard=false", lambda config: config.run.tensorboard is False),
        ("program.mesh.fsdp=rest", lambda config: config.program.mesh.fsdp == "rest"),
        ("program.mesh.fsdp=2", lambda config: config.program.mesh.fsdp == 2),
        ("program.mesh={fsdp=2}", lambda config: config.program.mesh.data == 1),
        ('program.rules=["data"]', lambda config: config.program.rules == ("data",)),
        ("program.target=v5p:4x4x4", lambda config: config.program.target == "v5p:4x4x4"),
        ("run.data.train=data/train", lambda config: config.run.data.train == "data/train"),
        ('run.data.train="a b"', lambda config: config.run.data.train == "a b"),
        ("run.data.train=a=b", lambda config: config.run.data.train == "a=b"),
        ('run.data.train=""', lambda config: config.run.data.train == ""),
        ("run.directory=2024-01-01", lambda config: config.run.directory == "2024-01-01"),
    ],
)
def test_an_override_is_a_toml_value_or_a_bare_word(file, override, value):
    assert value(load_config(file, [override]))


@pytest.mark.parametrize(
    ("overrides", "mesh"),
    [
        (["program.mesh.tensor=2"], {"data": "rest", "tensor": 2}),
        (
            ["program.mesh.tensor=2", "program.mesh.fsdp=2"],
            {"data": "rest", "tensor": 2, "fsdp": 2},
        ),
        (["program.mesh.tensor=2", "program.mesh.fsdp=rest"], {"tensor": 2, "fsdp": "rest"}),
        (["program.mesh.tensor=2", "program.mesh.data=4"], {"tensor": 2, "data": 4}),
    ],
)
def test_an_axis_of_the_command_line_leaves_the_rest_to_data(file, overrides, mesh):
    sizes = vars(load_config(file, overrides).program.mesh)
    assert {name: size for name, size in sizes.items() if size != 1} == mesh


def test_later_overrides_win_and_the_target_wins_over_all(file):
    config = load_config(
        file, ["run.steps=1", "run.steps=2", "program.target=cpu:2"], target="cpu:8"
    )
    assert (config.run.steps, config.program.target) == (2, "cpu:8")


def test_misspelt_settings_are_reported_once(file):
    assert changed(file, ("heads", "haeds")) == [
        "a.toml:4: unknown setting program.model.haeds; did you mean program.model.heads?"
    ]
    assert changed(file, ("program.model", "program.modle")) == [
        "a.toml:1: unknown setting program.modle; did you mean program.model?"
    ]


@pytest.mark.parametrize(
    ("line", "name", "suggestion"),
    [
        ("steps = 3", "steps", "run.steps"),
        ("batch.seq_len = 3", "batch", "program.batch"),
        ("data = 3", "data", "run.data"),
        ("run.model.layers = 3", "run.model", "program.model"),
        ("program.learning_rate_peak = 3\n", "program.learning_rate_peak", None),
        ('"odd key" = 3', '"odd key"', None),
    ],
)
def test_the_nearest_setting_is_suggested_from_any_section(file, line, name, suggestion):
    file.write_text(line)
    hint = f"did you mean {suggestion}?" if suggestion else ""
    assert any(
        problem.startswith(f"a.toml:1: unknown setting {name}; {hint}")
        for problem in problems(file)
    )


def test_a_setting_like_no_other_is_told_what_there_is(file):
    assert problems(file, "program.mesh.zigzag=2") == [
        "--set program.mesh.zigzag=2: unknown setting program.mesh.zigzag; "
        "program.mesh accepts data, fsdp, stage, expert, context, tensor"
    ]


def test_every_problem_is_reported_at_once_with_its_line(file):
    found = changed(
        file,
        ("layers = 2", 'layers = "two"'),
        ("vocab = 256", "tie_word_embeddings = 1"),
        ("steps = 10", "steps = 10.5\nseq_lne = 3"),
        ("global_batch_size = 4", "global_batch_size = 4\nmicrobatches = 3"),
    )
    assert found == [
        "a.toml:16: unknown setting run.seq_lne; did you mean program.batch.seq_len?",
        'a.toml:2: program.model.layers = "two": should be a whole number, at least 1, at most '
        "10000",
        "a.toml:6: program.model.tie_word_embeddings = 1: should be true or false",
        "a.toml:15: run.steps = 10.5: should be a whole number, at least 1",
        "a.toml:9: program.batch: global_batch_size = 4 is not a multiple of microbatches = 3",
    ]


@pytest.mark.parametrize(
    ("setting", "should"),
    [
        ('mesh.fsdp = "half"', 'a whole number, at least 1, or "rest"'),
        ("rules = [1]", "an array of strings"),
        ("mesh = 4", "a table"),
        ("target = 8", 'a string; write "8"'),
        ("target = 2024-01-01", 'a string; write "2024-01-01"'),
        ('optimizer.decay_mask = "none"', '"matrices" or "all"'),
        ("optimizer.beta1 = 2", "a number, at least 0, below 1"),
        ("optimizer.epsilon = 0", "a number, above 0"),
        ("optimizer.epsilon = inf", "finite"),
        ("optimizer.epsilon = nan", "finite"),
        ("loss.z_loss = 07:32:00", "a number, at least 0"),
    ],
)
def test_a_wrong_value_is_one_line_saying_what_it_should_be(file, setting, should):
    file.write_text(f"program.{setting}\n" + GOOD)
    assert problems(file) == [f"a.toml:1: program.{setting}: should be {should}"]


def test_values_that_validation_would_read_as_null_are_refused(file):
    assert changed(file, ("steps = 10", "steps = 10\nevaluate_every = 2024-01-01")) == [
        "a.toml:15: run.evaluate_every = 2024-01-01: should be a whole number, at least 1"
    ]


@pytest.mark.parametrize(
    ("stages", "settings", "problem"),
    [
        (2, [], "batch.microbatches = 1 is not a multiple of mesh.stage = 2"),
        (4, ["batch.microbatches=4"], "mesh.stage = 4 requires at least 4 layers"),
        (
            2,
            ["batch.microbatches=2", "pipeline.layers_per_stage=[2, 1]"],
            "the sum of pipeline.layers_per_stage is 3; it must be model.layers = 2",
        ),
        (
            2,
            ["batch.microbatches=2", "batch.seq_len=127", "pipeline.schedule=1f1b"],
            "batch.seq_len = 127 is not a multiple of mesh.stage = 2",
        ),
        (
            1,
            ["pipeline.schedule=gpipe", "pipeline.virtual_stages=2"],
            'needs schedule = "circular"',
        ),
        (
            1,
            ["pipeline.schedule=1f1b", "pipeline.recompute_stages=false"],
            'recompute_stages = false needs schedule = "circular" or "gpipe"',
        ),
    ],
)
def test_stages_that_model_or_batch_do_not_fit_are_refused(file, stages, settings, problem):
    file.write_text(GOOD)
    settings = [f"mesh.stage={stages}", *settings]
    (found,) = problems(file, *(f"program.{setting}" for setting in settings))
    assert problem in found


def test_integers_have_64_bits(file):
    assert problems(file, f"run.seed={2**63}") == [f"--set run.seed={2**63}: should fit in 64 bits"]
    digits = "9" * 5000
    assert problems(file, f"run.seed={digits}")[0].endswith(
        "should be a whole number, at least 0, below 4294967296"
    )


def test_long_values_are_cut(file):
    (problem,) = changed(file, ("layers = 2", f"layers = {list(range(1000))}"))
    assert len(problem) < 160


def test_what_is_missing(file):
    file.write_text("[program.model]\n[run]")
    assert problems(file) == [
        "a.toml:1: program.model.layers is missing",
        "a.toml:1: program.model.embed is missing",
        "a.toml:1: program.model.heads is missing",
        "a.toml:1: program.model.mlp is missing",
        "a.toml: program.batch is missing; it needs global_batch_size, seq_len",
        "a.toml:2: run.directory is missing",
        "a.toml:2: run.steps is missing",
        "a.toml:2: run.data is missing; it needs train",
    ]
    file.write_text("")
    assert problems(file, target="cpu:8") == [
        "a.toml: program.model is missing; it needs layers, embed, heads, mlp",
        "a.toml: program.batch is missing; it needs global_batch_size, seq_len",
        "a.toml: run is missing; it needs directory, steps, data",
    ]


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        (
            "program.model.haeds=4",
            "unknown setting program.model.haeds; did you mean program.model.heads?",
        ),
        (
            "run.model.layers=4",
            "unknown setting run.model.layers; did you mean program.model.layers?",
        ),
        (
            "program.batch.seq_len.x=1",
            "unknown setting program.batch.seq_len.x; did you mean program.batch.seq_len?",
        ),
        ("run.seed.x=1", "unknown setting run.seed.x; did you mean run.seed?"),
        ("program.model.layers=two", "should be a whole number, at least 1, at most 10000"),
        ("program.mesh.fsdp=0", 'should be a whole number, at least 1, or "rest"'),
        ('run.directory=""', "should not be empty"),
        (
            "program.model.embed=100000000000",
            "should be a whole number, at least 1, at most 10000000",
        ),
        (
            "program.batch.seq_len=10000000000",
            "should be a whole number, at least 1, at most 1000000000",
        ),
        ("run.directory=2024", "should be a string; write run.directory='\"2024\"'"),
        (
            "program.batch.microbatches=3",
            "program.batch: global_batch_size = 4 is not a multiple of microbatches = 3",
        ),
        ("program.batch={seq_len=4}", "program.batch.global_batch_size is missing"),
        (
            "run.data={trian=4}",
            "unknown setting run.data.trian; did you mean run.data.train?",
        ),
        (
            "run.learning_rate={warmup_steps=-1}",
            "run.learning_rate.warmup_steps = -1: should be a whole number, at least 0",
        ),
        ("run.steps", "expected section.name=value, for example run.steps=10"),
        ("run..steps=1", "expected section.name=value, for example run.steps=10"),
        ("run.steps=", 'has no value; write "" for an empty string'),
        ('program.rules=["data"', "not a valid TOML value: Unclosed array"),
        ("run.directory=\udcff", "is not UTF-8 text"),
    ],
)
def test_a_wrong_override_is_blamed_on_its_flag(file, override, problem):
    assert problems(file, override) == [f"--set {override}: {problem}"]


def test_the_file_is_blamed_for_what_it_got_wrong_itself(file):
    file.write_text(
        GOOD.replace("global_batch_size = 4", "global_batch_size = 4\nmicrobatches = 3")
    )
    assert problems(file, "program.batch.seq_len=8") == [
        "a.toml:9: program.batch: global_batch_size = 4 is not a multiple of microbatches = 3"
    ]
    file.write_text(GOOD.replace("[program.batch]", "[program]\nbatch = 3\n[run.bathc]"))
    assert "a.toml:9: program.batch = 3: should be a table" in problems(
        file, "program.batch.seq_len=8"
    )


def test_toml_errors_keep_their_line_and_column(file):
    assert changed(file, ("steps = 10", "steps = ")) == [
        "a.toml: not valid TOML: Invalid value (at line 14, column 9)"
    ]


def test_files_that_cannot_be_read(file, tmp_path):
    assert problems(Path("b.toml")) == ["b.toml: no such file; in the same directory: a.toml"]
    assert problems(Path("aa.toml")) == ["aa.toml: no such file; did you mean a.toml?"]
    assert problems(Path("a")) == ["a: no such file; did you mean a.toml?"]
    assert problems(Path("no/a.toml")) == ["no/a.toml: no such file; no is not a directory either"]
    assert problems(Path(".")) == [
        ".: is a directory without config.toml; in the same directory: a.toml"
    ]
    assert problems(Path("a.toml/b.toml")) == ["a.toml/b.toml: cannot be read: Not a directory"]
    file.write_bytes(GOOD.encode() + "# größer".encode("latin-1"))
    assert problems(file) == ["a.toml:18: not UTF-8 text; save the file as UTF-8"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_a_file_without_permission(file):
    file.chmod(0)
    assert problems(file) == ["a.toml: cannot be read: Permission denied"]


def test_a_copied_run_means_its_own_directory(file):
    """Not that in which it was trained, which it would read, or train into."""
    for directory in (Path("runs/small"), Path("copy")):
        directory.mkdir(parents=True)
        (directory / "config.toml").write_text(GOOD)
        (directory / "metrics.jsonl").touch()
    assert load_config("runs/small").run.directory == "runs/small"
    assert load_config("copy").run.directory == "copy"
    assert load_config("copy/config.toml").run.directory == "copy"
    assert load_config("copy", ["run.directory=other"]).run.directory == "other"
    (Path("copy") / "metrics.jsonl").unlink()
    assert load_config("copy/config.toml").run.directory == "runs/small"  # of no run


def test_a_project_or_a_configuration_stands_for_the_directory_of_its_run(tmp_path):
    project, run, weights = tmp_path / "book", tmp_path / "book/run", tmp_path / "weights"
    for folder in (run / "checkpoints", weights):
        folder.mkdir(parents=True)
    text = f"""[program]
model = {{ layers = 1, embed = 8, heads = 1, mlp = 8, vocab = 9 }}
batch = {{ global_batch_size = 1, seq_len = 4 }}
[run]
directory = "{run}"
steps = 1
data = {{ train = "t" }}
"""
    for file in (project / "config.toml", run / "config.toml"):
        file.write_text(text)
    (weights / "model.toml").touch()
    assert run_directory(project) == run_directory(project / "config.toml") == run
    assert [run_directory(one) for one in (run, weights)] == [run, weights]
