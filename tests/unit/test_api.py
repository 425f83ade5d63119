"""Functions of `import graphtrain`, without compiling."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import graphtrain as gt
from graphtrain.config import render

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "examples/quickstart.toml"


def test_importing_the_package_imports_nothing_heavy():
    code = (
        "import sys; before = set(sys.modules); import graphtrain;"
        "print({name.partition('.')[0] for name in set(sys.modules) - before}"
        " - set(sys.stdlib_module_names))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert done.stdout.strip() == "{'graphtrain'}"


def test_every_name_of_the_package_exists():
    import graphtrain.compile.driver  # noqa: F401  (of the folder, whose name a function has too)

    assert callable(gt.compile)
    assert all(getattr(gt, name) is not None for name in gt.__all__)
    with pytest.raises(AttributeError, match="no attribute 'compyle'"):
        gt.compyle  # noqa: B018


def test_a_configuration_is_a_path_toml_a_dict_or_loaded():
    config = gt.load_config(QUICKSTART)
    document = {"program": {"model": {"preset": "gpt2"}, "batch": {}}, "run": {}}
    assert gt.load_config(render(config)) == gt.load_config(config) == config
    as_dict = json.loads(json.dumps(_document(config)))
    assert gt.load_config(as_dict) == config
    with pytest.raises(gt.errors.ConfigError, match=r"^configuration: program\.batch\."):
        gt.load_config(document)
    with pytest.raises(gt.errors.ConfigError, match="a path, TOML text, a dict or a Config, not"):
        gt.load_config(3)  # pyright: ignore[reportArgumentType]


def _document(config):
    from graphtrain.config.render import as_document

    return as_document(config)


def test_settings_change_as_flags_or_by_name():
    by_flag = gt.load_config(QUICKSTART, set=["run.steps=70"], target="cpu:8")
    by_name = gt.load_config(QUICKSTART, set={"run.steps": 70, "program.target": "cpu:8"})
    assert by_flag == by_name == gt.load_config(gt.load_config(QUICKSTART), target="cpu:8",
                                                set={"run.steps": 70})  # fmt: skip
    assert (by_flag.run.steps, by_flag.program.target) == (70, "cpu:8")


def test_the_directory_of_a_run_stands_for_its_configuration(tmp_path):
    (tmp_path / "config.toml").write_text(QUICKSTART.read_text())
    assert gt.load_config(tmp_path) == gt.load_config(QUICKSTART)


def test_a_wrong_setting_of_toml_text_is_named_with_its_line():
    with pytest.raises(gt.errors.ConfigError, match=r"^configuration:2: unknown setting run\.stps"):
        gt.load_config("[run]\nstps = 3\n")


def test_a_plan_is_an_object_that_notebooks_show(tmp_path):
    answer = gt.plan(QUICKSTART, target="cpu:8", cache=tmp_path, compile=False)
    assert answer.fits and answer.peak_bytes > 0 and answer.step_seconds > 0
    assert repr(answer).startswith("<Answer: fits cpu:8: peak ")
    assert "memory per device" in str(answer) and "fits cpu:8" in str(answer)
    assert "<th>memory per device</th>" in answer._repr_html_()


def test_errors_are_errors_of_the_user(tmp_path, make_dataset):
    data = make_dataset([[1, 2, 3]], 2048)
    settings = {"run.directory": str(tmp_path / "run"), "run.data": {"train": data}}
    with pytest.raises(gt.UserError, match=r"run: graphtrain\.compile\(\.\.\.\) with the same"):
        gt.train(QUICKSTART, cache=tmp_path, set=settings)
    with pytest.raises(gt.errors.ConfigError, match="no such file"):
        gt.compile("none.toml", cache=tmp_path)


def test_metrics_are_columns(tmp_path):
    records = [
        {"step": 1, "loss": 3.0, "mfu": None},
        {"step": 2, "loss": 2.0, "mfu": 0.5},
        {"step": 2, "validation_loss": 2.5},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    metrics = gt.metrics(tmp_path)
    np.testing.assert_array_equal(metrics.step, [1, 2])
    np.testing.assert_array_equal(metrics.loss, [3.0, 2.0])
    np.testing.assert_array_equal(metrics.training["mfu"], [np.nan, 0.5])
    np.testing.assert_array_equal(metrics.validation["validation_loss"], [2.5])
    assert "2 steps, 1 evaluations" in metrics._repr_html_()


def test_a_run_without_metrics_says_so(tmp_path):
    with pytest.raises(gt.errors.TrainingError, match="no step was taken"):
        gt.metrics(tmp_path)


def test_values_in_html_are_escaped():
    from graphtrain.compile.html import html_table

    assert "<td>&lt;b&gt;</td>" in html_table(["a"], [["<b>"]])


def test_arguments_of_a_wrong_type_are_refused_in_words():
    from graphtrain.run.callbacks import check_callbacks

    def refused(function, *arguments, **named):
        with pytest.raises(gt.UserError) as caught:
            function(*arguments, **named)
        return str(caught.value)

    assert refused(gt.generate, QUICKSTART, 5) == "prompt = 5: must be a string"
    hot = refused(gt.generate, QUICKSTART, "a", temperature="hot")
    assert hot == "temperature = 'hot': must be a number"
    assert "prompts is one string" in refused(gt.generate_batch, QUICKSTART, "hi")
    assert "top_k = 2.5: must be a whole" in refused(gt.generate, QUICKSTART, "a", top_k=2.5)
    for wrong in ([5], 5):
        assert 'must be like ["run.steps=10"]' in refused(gt.load_config, QUICKSTART, set=wrong)
    one = refused(check_callbacks, type("Mine", (gt.Callback,), {})())
    assert one.startswith("callbacks = Mine: must be a list")


def test_an_error_of_a_configuration_is_a_config_error_by_name_too():
    document = _document(gt.load_config(QUICKSTART))
    for name in ("vocab", "vocab_padding"):  # which would follow from the data
        document["program"]["model"].pop(name, None)
    with pytest.raises(gt.errors.ConfigError) as caught:
        gt.load_config(document, target="h100:0")
    assert type(caught.value) is gt.errors.ConfigError


def test_the_names_that_are_listed_are_those_of_the_interface():
    assert {name for name in dir(gt) if not name.startswith("__")} == set(gt.__all__)
