import pytest

from sharding_rules.errors import ShardingError
from sharding_rules.rules import Rules, presets


def test_presets_combine_to_the_same_rules_in_any_order():
    assert Rules.load(["fsdp", "data"]) == Rules.load(["data", "fsdp"])
    assert Rules.load(["fsdp", "data"]).activations["batch"] == ("data", "fsdp")


def test_every_preset_loads_alone():
    assert [Rules.load([name]) for name in presets()]


def test_a_missing_preset_lists_those_there_are():
    with pytest.raises(ShardingError, match=r"no rules 'fsdpp'; presets: context, data, e"):
        Rules.load(["fsdpp"])


def test_a_misspelt_array_axis_suggests_the_nearest(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('[parameters]\nhaeds = "tensor"\n')
    with pytest.raises(ShardingError, match=r"unknown axis 'haeds'; did you mean 'heads'"):
        Rules.load([str(file)])


def test_a_rule_of_the_wrong_kind_says_where(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text("[parameters]\nheads = [1]\n")
    with pytest.raises(ShardingError, match=r"mine.toml'?: heads = \[1\] is not a mesh axis"):
        Rules.load([str(file)])


def test_an_unknown_table_is_refused(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('[weights]\nheads = "tensor"\n')
    with pytest.raises(ShardingError, match=r"unknown table 'weights'"):
        Rules.load([str(file)])
