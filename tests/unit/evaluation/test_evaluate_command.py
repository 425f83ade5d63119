"""Options of an evaluation on tasks, and of the validation loss, exclude each other."""

import pytest
from click.testing import CliRunner

from graphtrain.cli.evaluate import command


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
