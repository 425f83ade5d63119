"""Options of an evaluation on tasks, and of the validation loss, exclude each other."""

import pytest
from click.testing import CliRunner

from graphtrain.api import evaluation
from graphtrain.api.evaluation import evaluate_steps, evaluate_tasks
from graphtrain.cli.evaluate import _evaluate_tasks, command
from graphtrain.errors import GraphtrainError
from graphtrain.run.evaluation.task_results import TaskResults


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--limit", "3"], "--limit needs --tasks"),
        (["--allow-code"], "--allow-code needs --tasks"),
        (["--tasks", "boolq", "--bigram"], "--tasks leaves --bigram without effect"),
        (["--steps", "all", "--bigram"], "--steps leaves --bigram without effect"),
        (["--steps", "all", "--step", "3"], "--steps leaves --step without effect"),
        (["--steps", "all", "--tasks", "a", "--samples", "s"], "--steps leaves --samples without"),
        (["--steps", "all", "--limit", "3"], "--limit needs --tasks"),
        (["--tasks", "a", "--chat-template", "b"], "--chat-template needs --apply-chat-template"),
        (["--steps", "1,x"], "'1,x' is neither all nor steps separated by commas"),
        (["--steps", "all", "--plot", "a.pdf"], "a.pdf: the name has to end in .svg or .png"),
        (["--plot", "a.svg"], "--plot needs --steps"),
    ],
)
def test_an_option_without_effect_is_refused(words, message, tmp_path):
    config = tmp_path / "a.toml"
    config.write_text("")
    result = CliRunner().invoke(command, [str(config), *words])
    assert result.exit_code == 2
    assert message in result.output


@pytest.mark.parametrize("function", [evaluate_tasks, evaluate_steps])
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"chat_template": "chatml"}, "'chatml': has no effect without apply_chat_template = True"),
        ({"limit": -1}, "limit = -1: must be an integer, at least 1, or None"),
        ({"limit": 0}, "limit = 0: must be"),
        ({"limit": 2.5}, "limit = 2.5: must be"),
        ({"fewshot": -1}, "fewshot = -1: must be an integer, at least 0, or None"),
    ],
)
def test_arguments_that_the_command_refuses_are_refused_in_python(function, settings, message):
    with pytest.raises(GraphtrainError, match=message):
        function("absent", ["boolq"], **settings)


def test_scores_are_printed_before_files_that_may_fail(tmp_path, monkeypatch, capsys):
    origin = {"reused_answers": 0, "cut_texts": 0}
    results = TaskResults({"results": {"boolq": 0.5}, "graphtrain": origin}, {})
    monkeypatch.setattr(evaluation, "evaluate_tasks", lambda *given, **settings: results)
    (tmp_path / "file").touch()
    files = {"--samples": tmp_path / "file" / "a", "--report": None}
    with pytest.raises(OSError):
        _evaluate_tasks(None, ["boolq"], files, {}, as_json=True)
    assert '"boolq": 0.5' in capsys.readouterr().out
