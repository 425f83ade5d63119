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
        (["--tasks", "boolq", "--rank", "0"], "--tasks leaves --rank without effect"),
    ],
)
def test_an_option_without_effect_is_refused(words, message, tmp_path):
    config = tmp_path / "a.toml"
    config.write_text("")
    result = CliRunner().invoke(command, [str(config), *words])
    assert result.exit_code == 2
    assert message in result.output
