"""Problems are reported before anything is compiled: all at once, each with its place."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from in_process import graphtrain

import graphtrain as gt
from graphtrain.api import programs
from graphtrain.api.checks import purpose, report
from graphtrain.api.checks.checked import check_config
from graphtrain.api.checks.machine import directory_problem, file_problem
from graphtrain.api.configuration import name_of
from graphtrain.checkpoints.manifest import write_manifest
from graphtrain.compile.tasks import CompilationReport
from graphtrain.config import load_config
from graphtrain.data.indexed.description import read_description
from graphtrain.data.indexed.writer import IndexedWriter
from graphtrain.data.prepare.text import prepare
from graphtrain.errors import CacheError

CONFIG = """[program]
target = "cpu:8"
rules = ["data", "tensor"]
mesh = { data = 8 }

[program.model]
layers = 2
embed = 64
heads = 4
mlp = 96
vocab = 257

[program.batch]
global_batch_size = 16
seq_len = 64

[run]
directory = "run"
steps = 10

[run.data]
train = "data/train"
validation = "data/validation"
"""


@pytest.fixture(scope="module")
def prepared(tmp_path_factory, make_corpus):
    """Datasets of bytes, whose end mark has the largest id: 256."""
    folder = tmp_path_factory.mktemp("prepared") / "data"
    prepare([make_corpus([f"text {i} " * 9 for i in range(99)])], folder, "bytes")
    return folder


@pytest.fixture
def place(tmp_path, monkeypatch, prepared):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.toml").write_text(CONFIG)
    (tmp_path / "data").symlink_to(prepared)
    return tmp_path


def problems(*words, command=("config", "check")):
    """Return the lines of the error of a command for a.toml."""
    outcome = graphtrain(*command, "a.toml", *words)
    assert outcome.status == 2, outcome.out + outcome.err
    return outcome.err.removeprefix("error: ").splitlines()


def test_a_configuration_without_problems_is_said_to_have_none(place):
    outcome = graphtrain("config", "check", "a.toml")
    assert (outcome.status, outcome.out) == (0, "a.toml: no problem found\n")


def test_a_run_directory_is_checked_by_its_configuration(place):
    (place / "run").mkdir()
    (place / "a.toml").rename(place / "run/config.toml")
    assert graphtrain("config", "check", "run").status == 0


def test_every_problem_is_reported_at_once_with_its_place(place):
    (place / "mine.toml").write_text('[parameters]\nmlp = "tensor"\nmpl = "tensor"\n')
    found = problems(
        "--target", "h1000:8", "--set", 'program.rules=["fdsp", "mine.toml"]',
        "--set", "program.model.vocab=100", "--set", "run.directory=a.toml/run",
        "--set", "run.data.train=data/trian",
    )  # fmt: skip
    assert found == [
        "--target h1000:8: program.target: unknown target machine 'h1000'; did you mean h100?",
        '--set program.rules=["fdsp", "mine.toml"]: program.rules: \'fdsp\': no such preset; did '
        "you mean fsdp?",
        "mine.toml:3: parameters.mpl: unknown axis 'mpl'; did you mean 'mlp'?",
        '--set run.directory=a.toml/run: run.directory = "a.toml/run": a.toml is a file; name '
        "another directory",
        "--set run.data.train=data/trian: run.data.train: data/trian.bin: no such file; did you "
        "mean data/train?",
        "--set program.model.vocab=100: program.model.vocab = 100, but data/validation contains "
        "token 256; set it to at least 257, or prepare the dataset with the tokenizer of the model",
    ]


def test_a_wrong_target_is_reported_beside_a_setting_that_does_not_exist(place):
    found = problems("--set", "program.model.haeds=2", "--target", "h1000:8")
    assert [line.partition(": ")[2] for line in found] == [
        "unknown setting program.model.haeds; did you mean program.model.heads?",
        "program.target: unknown target machine 'h1000'; did you mean h100?",
    ]


def test_everything_is_reported_where_the_vocabulary_would_follow_from_absent_data(place):
    text = (place / "a.toml").read_text().replace("vocab = 257\n", "")
    (place / "a.toml").write_text(text.replace("data/train", "absent"))
    words = "--target", "h1000:8", "--set", 'program.rules=["fdsp"]'
    target, rules, data, vocabulary = problems(*words)
    assert "unknown target machine 'h1000'" in target and "no such preset" in rules
    assert data.startswith("a.toml:21: run.data.train: absent.bin: no such file")
    assert "or set program.model.vocab" in vocabulary
    assert len(problems(*words, "--set", "run.data.train=data/train")) == 2


def test_the_functions_of_python_check_as_the_commands_do(place):
    for function in (gt.train, gt.compile, gt.plan, gt.evaluate, lambda c: gt.generate(c, "a")):
        with pytest.raises(gt.errors.ConfigError) as raised:
            function((place / "a.toml").read_text().replace("cpu:8", "h1000:8"))
        (line,) = str(raised.value).splitlines()
        assert line.startswith("configuration:2: program.target: unknown target machine 'h1000'")


def test_python_is_warned_of_data_that_is_elsewhere(place, monkeypatch):
    monkeypatch.setattr(programs, "compile_report", lambda *_, **__: CompilationReport((), 0.0))
    with pytest.warns(UserWarning, match=r'^--set run.data.train="no": run.data.train: no.bin: no'):
        gt.compile("a.toml", set={"run.data.train": "no"})


def test_a_command_loads_its_configuration_once(place, monkeypatch):
    loaded = []

    def load(*arguments):
        loaded.append(arguments)
        return load_config(*arguments)

    monkeypatch.setattr("graphtrain.api.checks.checked.load_config", load)
    monkeypatch.setattr("graphtrain.api.configuration.load_config", load)
    monkeypatch.setattr("graphtrain.config.load_config", load)
    monkeypatch.setattr("graphtrain.api.runs.compile_missing", lambda *_, **__: None)
    for words in ("config show", "run", "run --compile", "run --fresh", "evaluate --bigram"):
        loaded.clear()
        assert graphtrain(*words.split(), "a.toml").status in (0, 2, 3)  # 3: nothing is compiled
        assert len(loaded) == 1, words


def test_generation_does_not_mind_the_batch_of_training(place):
    config = load_config(Path("a.toml"), ["program.batch.global_batch_size=12"])
    assert [one.kind for one in report.problems(config)] == ["program"]
    assert report.problems(config, purpose.GENERATE) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            ["program.mesh={tensor=3}"],
            "--set program.mesh={tensor=3}: program.mesh.tensor = 3 needs 3 devices, "
            "and cpu:8 has 8; choose a target of 3 devices, or mesh.tensor = 8",
        ),
        (
            ["program.batch.global_batch_size=12"],
            "--set program.batch.global_batch_size=12: program.batch.global_batch_size = 12 is not "
            "a multiple of program.mesh.data = 8; use 8 or 16, or program.mesh.data = 1, 2, 4",
        ),
        (
            ["program.batch.microbatches=4"],
            "--set program.batch.microbatches=4: program.batch.global_batch_size = 16 / "
            "microbatches = 4, which is 4, is not a multiple of program.mesh.data = 8; use 32, or "
            "program.mesh.data = 1, 2, 4",
        ),
        (
            ["program.mesh={data=4, tensor=2}"],
            "--set program.mesh={data=4, tensor=2}: program.model.vocab = 257 is not a multiple of "
            "program.mesh.tensor = 2; use 256 or 258, or program.mesh.tensor = 1",
        ),
        (
            ["program.mesh={data=4, tensor=2}", "program.model.vocab=258", "program.model.heads=1"],
            "--set program.model.heads=1: program.model.heads = 1 is not a multiple of "
            "program.mesh.tensor = 2; use 2, or program.mesh.tensor = 1",
        ),
        (
            ['program.rules=["context"]', "program.mesh={context=8}", "program.batch.seq_len=60"],
            "--set program.batch.seq_len=60: program.batch.seq_len = 60 is not a multiple of "
            "program.mesh.context = 8; use 48 or 64, or program.mesh.context = 1, 2",
        ),
        (
            ['program.rules=["context"]', "program.mesh={context=8}", "program.batch.seq_len=72"],
            "--set program.batch.seq_len=72: program.batch.seq_len = 72 is not a multiple of twice "
            "program.mesh.context = 8, into which ring attention divides sequences; use 64 or 80, "
            'or "ulysses" instead of "context" in program.rules',
        ),
        (
            ['program.rules=["context", "ulysses"]'],
            '--set program.rules=["context", "ulysses"]: program.rules: \'ulysses\': '
            '"ulysses" replaces "context": both divide sequences along context; remove one',
        ),
        (
            ['program.rules=["ulysses"]', "program.mesh={context=8}", "program.model.heads=4"],
            "--set program.model.heads=4: program.model.heads = 4 is not a multiple of "
            "program.mesh.context = 8; use 8, or program.mesh.context = 1, 2, 4",
        ),
        (
            ["program.batch.microbatches=2", "program.mesh={stage=2, data=4}"],
            "a.toml:3: program: mesh.stage = 2, but the rules do not "
            'divide layers among stages; add "pipeline" to program.rules, or use another axis',
        ),
        (
            ["program.loss.label_smoothing=0.3"],
            "--set program.loss.label_smoothing=0.3: program.loss: label_smoothing is only for "
            'kind = "dpo"; remove it',
        ),
        (
            ["run.data.train=data"],
            "--set run.data.train=data: run.data.train: data: is a directory, not a dataset; it "
            "holds train, validation: name one of them, for example data/train",
        ),
        (
            ["run.init_from=weights"],
            '--set run.init_from=weights: run.init_from = "weights": no such directory',
        ),
    ],
)
def test_a_problem_is_in_the_name_of_the_setting(place, change, message):
    assert problems(*[word for one in change for word in ("--set", one)]) == [message]


def test_a_problem_in_the_file_has_its_line(place):
    (place / "a.toml").write_text(CONFIG.replace("= 16", "= 12").replace("cpu:8", "gpu:8"))
    (one,) = problems()
    assert one.startswith("a.toml:2: program.target: unknown target machine 'gpu'; name the model")
    (place / "a.toml").write_text(CONFIG.replace("= 16", "= 12"))
    (one,) = problems()
    assert one.startswith("a.toml:14: program.batch.global_batch_size = 12 is not a multiple")


@pytest.mark.parametrize(
    "command",
    [("config", "show"), ("compile",), ("run",), ("plan",), ("plan", "lock"), ("evaluate",),
     ("launch", "slurm"), ("launch", "kubernetes", "--image", "a", "--claim", "b")],
    ids=" ".join,
)  # fmt: skip
def test_every_command_begins_with_the_checks(place, command):
    (one,) = problems("--target", "gpu:8", command=command)
    assert "unknown target machine 'gpu'" in one


def test_problems_that_need_no_jax_import_none(place):
    code = (
        "import sys; from graphtrain.cli import main; sys.argv[0] = 'graphtrain'\n"
        "try: main()\nfinally: print('jax' in sys.modules, 'torch' in sys.modules)"
    )
    for words in (["run"], ["plan"], ["compile"], ["config", "check"]):
        ended = subprocess.run(
            [sys.executable, "-c", code, *words, "a.toml", "--set", "program.mesh.data=3"],
            env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
            text=True,
            capture_output=True,
        )
        assert (ended.returncode, ended.stdout) == (2, "False False\n"), ended.stderr


def test_the_largest_token_is_recorded_and_else_sampled(place, tmp_path):
    description = read_description("data/train")
    assert description is not None
    assert description.largest == 256
    with IndexedWriter(tmp_path / "plain", 300) as writer:  # has no description
        writer.append(np.array([7, 280, 9]))
    (one,) = problems("--set", "run.data.train=plain")
    assert "program.model.vocab = 257, but plain contains token 280; set it to at least 281" in one


def test_a_damaged_description_is_reported(place, tmp_path):
    with IndexedWriter(tmp_path / "plain", 300) as writer:
        writer.append(np.array([7, 8]))
    (tmp_path / "plain.json").write_text("{")
    (one,) = problems("--set", "run.data.train=plain")
    assert one.startswith("plain.json: not the description of a dataset")


def test_one_token_is_too_few(place, tmp_path):
    with IndexedWriter(tmp_path / "plain", 300) as writer:
        writer.append(np.array([7]))
    (one,) = problems("--set", "run.data.train=plain")
    assert "plain has 1 tokens and needs 2" in one


def test_pairs_are_required_by_dpo(place):
    (place / "weights").mkdir()
    found = problems("--set", "program.loss.kind=dpo", "--set", "run.init_from=weights")
    assert "data/train contains no preference pairs, which are required by" in found[0]


def checkpoint(place, **identity):
    """Write the metadata of a checkpoint of the run in a.toml, with some values changed."""
    from graphtrain.config import load_config
    from graphtrain.run.resume import identity_of

    step = place / "run/checkpoints/700"
    about = step / "about"
    about.mkdir(parents=True)
    saved = identity_of(load_config(Path("a.toml"))) | {
        name.replace("__", "."): value for name, value in identity.items()
    }
    info = {"loader": {}, "arrays": {}, "identity": saved}
    (about / "metadata").write_text(json.dumps(info))
    write_manifest(step)


def test_a_checkpoint_of_another_model_is_refused_before_compiling(place):
    checkpoint(place, program__model__layers=3)
    for command in (("config", "check"), ("run",), ("run", "--compile")):
        (one,) = problems(command=command)
        assert one.startswith(
            "a.toml:7: run/checkpoints/700 was saved by another program or with other data: "
            "program.model.layers was 3 and is 2; change it back"
        )
    (one,) = problems(command=("evaluate",))
    assert "contains the weights of another model: program.model.layers was 3 and is 2" in one


def test_an_unknown_name_of_allow_change_is_located_at_the_option(place):
    checkpoint(place)
    (one,) = problems("--allow-change", "run.lr", command=("run",))
    assert one.startswith("--allow-change run.lr: no such setting in run/checkpoints/700")


@pytest.mark.parametrize("vocab", ["vocab = 257\n", ""])
def test_absent_data_is_not_called_another_run(place, vocab):
    checkpoint(place)
    (place / "a.toml").write_text((place / "a.toml").read_text().replace("vocab = 257\n", vocab))
    (place / "data").unlink()
    for command in (("run",), ("evaluate",), ("config", "check")):
        lines = problems(command=command)
        assert all("no such file; prepare the dataset" in line for line in lines), lines


def test_a_damaged_description_is_reported_once(place, prepared):
    (place / "data").unlink()
    shutil.copytree(prepared, place / "data")
    (place / "data" / "train.json").write_text("{")
    (place / "a.toml").write_text((place / "a.toml").read_text().replace("vocab = 257\n", ""))
    (line,) = problems()
    assert line.startswith("data/train.json: not the description of a dataset")


def test_a_permitted_change_is_no_problem(place):
    checkpoint(place, run__seed=3)
    config = load_config(Path("a.toml"))
    (one,) = report.problems(config)
    assert one.kind == "checkpoint"
    assert report.problems(config, allowed_changes=["run.seed"]) == []
    assert (
        report.problems(config, purpose.run_purpose(fresh=True)) == []
    )  # the checkpoint is set aside
    assert (
        report.problems(config, purpose.evaluation_purpose()) == []
    )  # the weights are of the same model


def test_a_configuration_has_its_own_name_after_it_was_checked(place):
    checked = check_config(Path("a.toml"), purpose.GENERATE)
    for source in ("a.toml", Path("a.toml"), checked):
        assert name_of(source) == "a.toml"
    assert name_of(checked.config) == "configuration"


def test_outputs_and_extras_are_checked_first(place, monkeypatch):
    for name in [one for one in sys.modules if one.partition(".")[0] == "vl_convert"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    assert problems("--html", "no/x.html", command=("plan",)) == [
        "--html: the HTML page needs vl-convert, which is not installed; run: pip install "
        "'graphtrain[html]'",
        "--html: cannot write no/x.html: no: no such directory",
    ]
    (one,) = problems("--report", "data", command=("compile",))
    assert one == "--report: cannot write data: it is a directory"
    words = "--tasks", "boolq", "--samples", "out", "--report", "./out"
    assert problems(*words, command=("evaluate",)) == [
        "--report: out is the file of --samples too; name another file"
    ]


def test_a_target_without_its_compiler_is_refused_before_compiling(place, monkeypatch):
    monkeypatch.setitem(sys.modules, "libtpu", None)
    words = "--target", "v5p:2x2x1", "--set", 'program.mesh={data="rest"}'
    (one,) = problems(*words, command=("compile",))
    assert one.startswith("--target v5p:2x2x1: program.target: compiling for v5p:2x2x1 needs")
    assert one.endswith("run: pip install 'graphtrain[tpu]'")


def test_data_that_is_elsewhere_is_a_warning_for_compile_and_nothing_for_plan(place, monkeypatch):
    (place / "data").unlink()
    config = load_config(Path("a.toml"))
    assert {one.kind for one in report.problems(config)} == {"missing_data"}
    assert report.problems(config, purpose.PLAN) == []

    def stop(*_, **__):
        raise CacheError("stop")

    monkeypatch.setattr(programs, "compile_report", stop)
    outcome = graphtrain("compile", "a.toml")
    assert outcome.err.splitlines() == [
        "warning: a.toml:22: run.data.train: data/train.bin: no such file; prepare the dataset "
        "with: graphtrain data prepare",
        "warning: a.toml:23: run.data.validation: data/validation.bin: no such file; prepare the "
        "dataset with: graphtrain data prepare",
        "error: stop",
    ]


@pytest.mark.parametrize("words", ["h100:8,foo:3", "foo:3", "foo:3,gpu:1"])
def test_targets_that_do_not_exist_end_a_comparison(place, words):
    found = problems("--targets", words, command=("plan",))
    assert found[0].startswith("--targets foo:3: unknown target machine 'foo'; known machines: cpu")


def test_options_that_would_be_ignored_are_refused(place):
    both = graphtrain("plan", "a.toml", "--targets", "h100:8", "--target", "v5e:2x2")
    assert both.status == 2 and "--target is for the plan of one machine" in both.err
    alone = graphtrain("doctor", "--even-if-busy")
    assert alone.status == 2 and "--even-if-busy needs --measure" in alone.err


def test_checkpoints_in_the_directory_of_the_run_itself_are_refused(place):
    (place / "run").mkdir()
    (place / "link").symlink_to("run")
    line = CONFIG.count("\n") + 2
    for table in ('local = "run/new"', 'remote = "run"', 'remote = "x/../run"', 'remote = "link"'):
        (place / "a.toml").write_text(f"{CONFIG}[run.checkpoints]\n{table}\n")
        expected = f"a.toml:{line}: run.checkpoints.{table} is in run.directory = "
        for command in (("config", "check"), ("run",)):
            assert any(one.startswith(expected) for one in problems(command=command)), table
    (place / "a.toml").write_text(f'{CONFIG}[run.checkpoints]\nlocal = "running"\n')
    assert graphtrain("config", "check", "a.toml").status == 0
    # Without the package of object stores, that is said, too.
    found = problems("--set", "run.upload.remote=run/copies")
    assert any('run.upload.remote = "run/copies" is in run.directory = ' in one for one in found)
    found = problems("--set", "run.upload.timeout=5.0")
    assert any("upload.remote is not set, and checkpoints.remote neither" in one for one in found)
    for url in ("s3://", "gs:///path"):
        (found,) = problems("--set", f"run.checkpoints.remote={url}")
        assert f'"{url}" names no bucket; write {url[:5]}BUCKET/PATH' in found


def test_a_url_with_one_slash_is_no_directory_and_an_endpoint_without_http_no_server(place):
    for setting in ("checkpoints.remote", "checkpoints.local", "upload.remote", "data.train"):
        (found,) = problems("--set", f"run.{setting}=s3:/bucket/x")
        assert setting in found and "two slashes; write s3://bucket/x" in found, found
    store = "--set", "run.checkpoints.remote=s3://bucket/x"
    for server in ("127.0.0.1:5901", "http://", "https://a:99999", "http://a b"):
        (found,) = problems(*store, "--set", f"run.checkpoints.endpoint={server}")
        assert f'checkpoints.endpoint={server}: "{server}" is not the URL of a server' in found, (
            found
        )
    assert not (place / "s3:").exists()


def test_an_export_of_a_model_that_no_family_has_is_refused_before_compiling(place):
    assert graphtrain("config", "check", "a.toml", "--set", "run.export=hf").status == 0
    (found,) = problems("--set", "run.export=hf", "--set", "program.model.embedding_norm=true")
    assert 'run.export = "hf": no Hugging Face family supports this combination' in found
    assert found.endswith("; or remove run.export")


def test_an_export_of_weights_that_the_run_does_not_train_is_refused(place):
    for words, reason in {
        ("export=peft",): 'run.export = "peft" needs [program.adapter]; or export "hf"',
        ("export=hf", "export_weights=averaged"): "needs program.optimizer.ema_decay",
        ("export=hf", "export_weights=best"): "needs checkpoints.keep_best = true",
        ("export_weights=best",): "export_weights needs export, which is not set",
    }.items():
        found = problems(*(word for one in words for word in ("--set", f"run.{one}")))
        assert len(found) == 1 and reason in found[0], found


def test_a_directory_is_tried_and_nothing_remains(tmp_path):
    assert directory_problem(tmp_path / "a" / "b") == ""
    assert list(tmp_path.iterdir()) == []
    assert "/proc cannot be written" in directory_problem(Path("/proc/x/y"))
    (tmp_path / "file").touch()
    assert "is a file" in directory_problem(tmp_path / "file" / "a")
    assert file_problem(tmp_path / "new") == file_problem(tmp_path / "file") == ""
    assert "no such directory" in file_problem(tmp_path / "a" / "b")


def test_prompts_of_samples_are_read_before_the_run_and_need_one_host(place):
    words = ["--set", "run.samples.prompts=p.jsonl"]
    (found,) = problems(*words)
    assert found.endswith('run.samples.prompts = "p.jsonl": no such file')
    (place / "p.jsonl").write_text('"a"\n{"text": "b"}\n')
    (found,) = problems(*words)
    assert 'run.samples.prompts: p.jsonl:2: not a JSON string, or an object with "prompt"' in found
    (place / "p.jsonl").write_text('"a"\n')
    (found,) = problems(*words, "--target", "cpu:2x4")
    assert "run.samples does not support several hosts" in found and "--prompts" in found


def test_prompts_of_samples_that_are_too_long_are_named_by_line(place):
    words = ["--set", "run.samples.prompts=p.jsonl", "--set", "program.serve.context_length=32"]
    (place / "p.jsonl").write_text(
        f'"{"a" * 31}"\n\n{{"prompt": "{"b" * 32}"}}\n"{"c" * 99}"\n""\n'
    )
    third, fourth, fifth = problems(*words)
    assert "p.jsonl:3: the prompt has 32 tokens, which do not fit into the context of 32" in third
    assert "p.jsonl:4: the prompt has 99 tokens" in fourth and "p.jsonl:5: the prompt is" in fifth
    assert len(problems(*words, command=("compile",))) == 3  # before it compiles
    (place / "p.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}]}\n')
    (found,) = problems(*words)
    assert "p.jsonl:1: the tokenizer of this model has no chat template" in found


def test_samples_without_a_tokenizer_are_a_problem_of_the_run(place):
    for name in ("text.bin", "text.idx"):
        source = place / "data" / f"train{name[4:]}"
        (place / name).write_bytes(source.read_bytes())
    (place / "p.jsonl").write_text('"a"\n')
    (found,) = problems(
        "--set", "run.samples.prompts=p.jsonl", "--set", "run.data.train=text",
        "--set", "program.model.vocab=257",
    )  # fmt: skip
    assert "run.samples.prompts: no tokenizer in run/" in found


@pytest.mark.parametrize(
    "command", ["config check", "plan", "compile", "serve", "generate", "chat"]
)
def test_a_context_beyond_learned_positions_is_an_error_of_every_command(place, command):
    text = CONFIG.replace("[run]", "[program.serve]\ncontext_length = 65\n\n[run]", 1)
    learned = 'vocab = 257\npositions = "learned"\nmax_position_embeddings = 64'
    (place / "a.toml").write_text(text.replace("vocab = 257", learned))
    words = ("--for", "serve") if command in ("plan", "compile") else ()
    words = ("a prompt",) if command == "generate" else words
    (line,) = problems(*words, command=command.split())
    assert re.fullmatch(
        r"a\.toml:\d+: program: serve\.context_length = 65 is more than "
        r"model\.max_position_embeddings = 64; use at most 64",
        line,
    )


HF_MODEL = """[program]
target = "cpu:1"
model = { hf = "hf" }

[program.batch]
global_batch_size = 4
seq_len = 64

[program.serve]
context_length = 65

[run]
directory = "run"
steps = 10

[run.data]
train = "data/train"
"""


def test_a_context_beyond_the_positions_of_a_config_json_is_found(place, monkeypatch):
    installed = "graphtrain.torch_frontend.versions.check_versions"  # PyTorch and transformers
    monkeypatch.setattr(installed, lambda versions, **of: None)
    (place / "hf").mkdir()
    (place / "a.toml").write_text(HF_MODEL)
    sizes = {"n_layer": 1, "num_hidden_layers": 1, "hidden_size": 8, "vocab_size": 300}
    learned = {"model_type": "gpt2", "n_positions": 64, **sizes}
    (place / "hf/config.json").write_text(json.dumps(learned))
    assert problems() == [
        "a.toml:10: program.serve.context_length = 65 is more than the 64 learned positions of "
        "hf/config.json; use at most 64"
    ]
    rotary = {"model_type": "llama", "max_position_embeddings": 64, **sizes}
    (place / "hf/config.json").write_text(json.dumps(rotary))
    outcome = graphtrain("config", "check", "a.toml")
    assert (outcome.status, outcome.out) == (0, "a.toml: no problem found\n")
    assert outcome.err == (
        "warning: a.toml:10: program.serve.context_length = 65 is more than the 64 positions of "
        "hf/config.json: unless it is trained on longer texts, the model generates badly beyond "
        "64\n"
    )
    scaling = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}
    (place / "hf/config.json").write_text(json.dumps(rotary | {"rope_scaling": scaling}))
    assert graphtrain("config", "check", "a.toml").err == ""


def test_weights_that_a_run_starts_from_say_their_positions_too(place):
    (place / "base/hugging_face").mkdir(parents=True)
    config = {"model_type": "llama", "max_position_embeddings": 32}
    (place / "base/hugging_face/config.json").write_text(json.dumps(config))
    words = "config", "check", "a.toml", "--set", "run.init_from=base"
    assert "program.batch.seq_len = 64 is more than the 32 positions" in graphtrain(*words).err
    linear = '--set=program.model.rope_scaling={kind="linear", factor=2.0}'
    assert graphtrain(*words, linear).err == ""


LION = """import optax


def lion(beta1: float = 0.9, *, beta2: float = 0.99):
    return optax.lion(1.0, b1=beta1, b2=beta2)
"""


@pytest.mark.parametrize(
    ("reference", "arguments", "expected"),
    [
        ("lin.py:lion", "", 'custom = "lin.py:lion": lin.py not found; give the path'),
        ("=lion.py", "", 'custom = "=lion.py": no installed package has an entry point'),
        ("lion.py:lyon", "", "lion.py defines no lyon; it defines lion (lion.py:4)"),
        ("lion:lyon", "", "lion.py defines no lyon; it defines lion (lion.py:4)"),
        ("lion.py:lion", "wd=1", "arguments.wd: lion of lion.py:4 does not take it; it takes"),
        ("broken.py:lion", "", 'broken.py:2: program.optimizer.custom = "broken.py:lion": invalid'),
        ("needs.py:lion", "", "lion of needs.py:1 needs the argument rate; set"),
    ],
)
def test_code_is_checked_without_running_it(place, reference, arguments, expected):
    (place / "lion.py").write_text(LION)
    (place / "broken.py").write_text("import os\nx = 1/\n")
    (place / "needs.py").write_text("def lion(rate, *, b=1): ...\n")
    words = ["--set", f"program.optimizer.custom={reference}"]
    words += ["--set", f"program.optimizer.arguments={{{arguments}}}"] if arguments else []
    (line,) = problems(*words)
    assert expected in line
    if not reference.startswith("broken"):
        assert line.startswith("--set program.optimizer.")


def test_code_without_problems_is_not_run(place):
    (place / "lion.py").write_text(LION + "\nraise SystemExit\n")
    (place / "pack").mkdir()
    (place / "pack/loss.py").write_text("def focal(logits, targets, /, gamma): ...\n")
    found = graphtrain(
        *("config", "check", "a.toml", "--set", "program.optimizer.custom=lion.py:lion"),
        *("--set", "program.optimizer.arguments={beta2=0.9}"),
        *("--set", "program.loss={custom='pack.loss:focal', arguments={gamma=1}}"),
    )
    assert found.status == 0, found.err


def test_the_compiler_that_is_not_installed_is_a_warning_until_a_command_compiles(
    place, monkeypatch
):
    monkeypatch.setattr("lowering.machine.aot_devices.is_installed", lambda module: False)
    line = (
        "--target h100:8: program.target: compiling for h100:8 needs XLA's compiler for GPUs, "
        "which is not installed; run: pip install 'graphtrain[gpu]'"
    )
    checked = graphtrain("config", "check", "a.toml", "--target", "h100:8")
    assert (checked.status, checked.err) == (0, f"warning: {line}\n")
    assert problems("--target", "h100:8", command=["compile"]) == [line]
