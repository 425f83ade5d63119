"""`graphtrain config` and the options commands share."""

import json
import re
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from graphtrain.cli.config import command
from graphtrain.cli.options import cache_option
from graphtrain.config import load_config
from graphtrain.data.prepare.text import prepare
from graphtrain.errors import ConfigError
from sharding_rules.axes import MESH_AXES

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "configuration.md"


@pytest.fixture
def file(make_corpus, tmp_path, monkeypatch):
    """The first file of the guide, which so is known to be right, and its data."""
    monkeypatch.chdir(tmp_path)
    prepare([make_corpus(["some text", "more text"])], "data", "bytes", validation=0)
    path = tmp_path / "a.toml"
    path.write_text(re.findall(r"```toml\n(.*?)```", GUIDE.read_text(), re.DOTALL)[0])
    return path


def invoke(*arguments):
    return CliRunner().invoke(command, list(map(str, arguments)), catch_exceptions=False).stdout


def test_show_prints_a_file_that_loads_to_the_same(file, tmp_path):
    shown = tmp_path / "shown.toml"
    shown.write_text(invoke("show", file, "--set", "run.steps=7", "--target", "cpu:8"))
    assert load_config(shown) == load_config(file, ["run.steps=7"], "cpu:8")


def test_show_prints_json(file):
    shown = json.loads(invoke("show", file, "--json"))
    assert shown["program"]["mesh"] == dict.fromkeys(MESH_AXES, 1) | {"data": "rest"}


def test_a_run_directory_stands_for_its_configuration(file, tmp_path):
    (tmp_path / "run").mkdir()
    shown = invoke("show", file.rename(tmp_path / "run" / "config.toml"))
    assert invoke("show", tmp_path / "run") == shown


def test_a_directory_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="is a directory"):
        invoke("show", tmp_path)


def test_a_wrong_file_is_left_to_the_command_to_report(tmp_path):
    with pytest.raises(ConfigError, match="no such file"):
        invoke("show", tmp_path / "none.toml")


def test_schema_prints_json():
    assert json.loads(invoke("schema"))["title"] == "graphtrain configuration"


def test_the_cache_is_an_option_then_the_environment_then_a_folder_here():
    @click.command()
    @cache_option
    def show(cache):
        click.echo(cache)

    def shown(*arguments, **environment):
        return CliRunner().invoke(show, arguments, env=environment).stdout.strip()

    assert shown(GRAPHTRAIN_CACHE=None) == "cache"
    assert shown(GRAPHTRAIN_CACHE="b") == "b"
    assert shown("--cache", "a", GRAPHTRAIN_CACHE="b") == "a"
    assert shown(GRAPHTRAIN_CACHE="~/c", HOME="/home/of") == "/home/of/c"
    assert "$GRAPHTRAIN_CACHE" in shown("--help")
