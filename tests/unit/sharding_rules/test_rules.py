import pytest

from sharding_rules.errors import RulesError, ShardingError
from sharding_rules.rules import Rules, presets


def test_presets_combine_to_the_same_rules_in_any_order():
    assert Rules.load(["fsdp", "data"]) == Rules.load(["data", "fsdp"])
    assert Rules.load(["fsdp", "data"]).activations["batch"] == ("data", "fsdp")


def test_every_preset_loads_alone():
    assert [Rules.load([name]) for name in presets()]


def test_a_missing_preset_lists_those_there_are():
    with pytest.raises(ShardingError, match=r"'wide': no such preset; use a preset \(context, dat"):
        Rules.load(["wide"])


def test_the_name_of_another_tool_names_the_preset():
    with pytest.raises(ShardingError, match="'zero3': no such preset; it is fsdp in graphtrain"):
        Rules.load(["zero3"])


def test_a_misspelt_array_axis_suggests_the_nearest(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('[parameters]\nhaeds = "tensor"\n')
    with pytest.raises(ShardingError, match=r"unknown axis 'haeds'; did you mean 'heads'"):
        Rules.load([str(file)])


def test_a_rule_of_the_wrong_kind_says_where(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text("[parameters]\nheads = [1]\n")
    with pytest.raises(ShardingError, match=r"mine.toml': parameters.heads: \[1\] is not a mes"):
        Rules.load([str(file)])


def test_an_unknown_table_is_refused(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('[weights]\nheads = "tensor"\n')
    with pytest.raises(ShardingError, match=r"unknown table 'weights'"):
        Rules.load([str(file)])


def test_zero_splits_state_further_than_weights():
    rules = Rules.load(["zero2", "fsdp"])
    assert rules.table_for("parameter")["embed"] == ("fsdp",)
    assert rules.table_for("gradient")["embed"] == ("data", "fsdp")
    assert rules.table_for("optimizer")["embed"] == ("data", "fsdp")
    assert Rules.load(["zero1"]).table_for("gradient").get("embed", ()) == ()


MINE = """
[arrays."layers/mlp/*"]
embed = []
mlp = ["fsdp", "tensor"]

[arrays."parameters/head"]
vocab = []
"""


@pytest.fixture
def overridden(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text(MINE)
    return Rules.load(["fsdp", "tensor", str(file)])


def test_a_pattern_overrides_the_axes_it_names_of_the_arrays_it_names(overridden):
    mlp = overridden.table_for("parameter", "state/parameters/layers/mlp/up")
    assert (mlp["embed"], mlp["mlp"], mlp["heads"]) == ((), ("fsdp", "tensor"), ("tensor",))
    assert overridden.table_for("parameter", "state/parameters/layers/attention/query") == (
        Rules.load(["fsdp", "tensor"]).parameters
    )


def test_a_pattern_holds_for_moments_too_unless_it_says_parameters(overridden):
    moment = "state/optimizer/adam/mu/layers/mlp/up"
    assert overridden.table_for("optimizer", moment)["embed"] == ()
    assert overridden.table_for("optimizer", "state/optimizer/adam/mu/head")["vocab"] == ("tensor",)
    assert overridden.table_for("parameter", "state/parameters/head")["vocab"] == ()


def test_a_pattern_that_names_nothing_is_an_error(overridden):
    paths = ["state/parameters/layers/mlp/up", "state/parameters/head"]
    overridden.check_patterns(paths)
    with pytest.raises(
        ShardingError, match=r"arrays 'layers/mlp/\*': no array matches; .*'paramete"
    ):
        overridden.check_patterns(["state/parameters/head"])


def test_a_misspelt_pattern_suggests_the_nearest(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('[arrays."layers/mpl/*"]\nembed = []\n')
    paths = ["state/parameters/layers/mlp/up", "state/parameters/layers/attention/query"]
    with pytest.raises(ShardingError, match=r"did you mean 'layers/mlp/\*'\?"):
        Rules.load([str(file)]).check_patterns(paths)


def test_a_mesh_axis_that_is_named_twice_is_refused(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('[activations]\nmlp = ["tensor", "tensor"]\n')
    with pytest.raises(ShardingError, match=r"names a mesh axis twice"):
        Rules.load([str(file)])


def test_an_override_that_is_no_table_is_an_error(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('[arrays]\n"layers/mlp/up" = "fsdp"\n')
    with pytest.raises(ShardingError, match=r"'fsdp' is not a table; map array axes to mesh axes"):
        Rules.load([str(file)])


def test_axes_split_by_hand_are_left_to_the_hand(overridden):
    rest = overridden.without_mesh_axes(["fsdp"])
    assert rest.parameters["embed"] == ()
    assert rest.table_for("parameter", "parameters/layers/mlp/up")["mlp"] == ("tensor",)
    assert rest.activations["batch"] == ()


def test_every_mistake_of_a_file_is_reported_with_its_key(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text(
        '[parameters]\nmpl = "tensor"\nheads = ["tensr"]\n[params]\n[activations]\nbatch = 3\n'
    )
    with pytest.raises(RulesError) as found:
        Rules.load([str(file), "fdsp", str(tmp_path / "min.toml")])
    assert [(problem.key, problem.reason) for problem in found.value.problems] == [
        (("params",), "unknown table 'params'; did you mean parameters?"),
        (("parameters", "mpl"), "unknown axis 'mpl'; did you mean 'mlp'?"),
        (("parameters", "heads"), "unknown axis 'tensr'; did you mean 'tensor'?"),
        (("activations", "batch"), "3 is not a mesh axis or a list of mesh axes"),
        ((), "no such preset; did you mean fsdp?"),
        ((), f"no such file; did you mean {file}?"),
    ]
