"""Work that devices repeat: a table that splits nothing gains nothing by more devices."""

import pytest

from graphtrain.planning.assess import estimate

MLP_ONLY = """
[parameters]
mlp = "tensor"

[activations]
batch = "data"
mlp = "tensor"
"""


@pytest.fixture
def empty(tmp_path):
    """The path of a rule table without rules."""
    path = tmp_path / "empty.toml"
    path.write_text("# nothing is split\n")
    return f'program.rules=["{path}"]'


@pytest.mark.parametrize("target", ["h100:8", "v5e:2x4", "cpu:8", "trn1:8"])
def test_an_empty_table_is_never_faster_than_data_parallelism(vary, empty, target):
    place = [f"program.target={target}", "program.mesh={data=8}"]
    parallel = estimate(vary([*place, 'program.rules=["data"]']))
    repeated = estimate(vary([*place, empty]))
    assert repeated.time.total and parallel.time.total and parallel.time.compute
    assert repeated.time.total > parallel.time.total
    assert repeated.time.compute == pytest.approx(8 * parallel.time.compute)
    assert (repeated.mfu is None) == (parallel.mfu is None) == (target == "cpu:8")
    if repeated.mfu and parallel.mfu:
        assert repeated.mfu < parallel.mfu
    (finding,) = (one for one in repeated.findings if "computed" in one)
    assert "the whole step is computed 8 x over data" in finding
    assert "[activations] batch = 'data'" in finding


def test_parts_that_no_rule_splits_are_named(vary, tmp_path):
    own = tmp_path / "mlp.toml"
    own.write_text(MLP_ONLY)
    place = ["program.target=cpu:8", "program.mesh={data=4, tensor=2}"]
    assessment = estimate(vary([*place, f'program.rules=["{own}"]']))
    (finding,) = assessment.findings
    assert finding.startswith("attention and the LM head are computed 2 x over tensor: ")
    replicas = {part.name: part.replicas for part in assessment.flops}
    assert replicas.pop("MLP") == 1 and set(replicas.values()) == {2}


@pytest.mark.parametrize(
    ("mesh", "rules"),
    [
        ("{data=8}", "data"),
        ("{data=2, fsdp=2, tensor=2}", "sequence"),
        ("{data=2, context=4}", "context"),
        ("{data=2, context=4}", "ulysses"),
        ("{stage=2, fsdp=2, tensor=2}", "pipeline"),
    ],
)
def test_no_preset_repeats_work(vary, mesh, rules):
    names = ["data", "fsdp", "tensor", rules]
    batch = "program.batch.microbatches=2"
    change = ["program.target=h100:8", f"program.mesh={mesh}", f"program.rules={names}", batch]
    assessment = estimate(vary(change))
    assert assessment.findings == ()
    assert {part.replicas for part in assessment.flops} == {1}


def test_operations_for_tokens_leave_out_padding_layers(vary):
    stages = ["program.target=cpu:8", "program.mesh={data=4, stage=2}", "program.model.layers=4"]
    stages += ['program.rules=["pipeline", "data"]', "program.batch.microbatches=2"]
    even = estimate(vary(stages))
    uneven = estimate(vary([*stages, "program.pipeline.layers_per_stage=[3, 1]"]))
    assert [part.needed for part in uneven.flops] == [part.needed for part in even.flops]
    of_mlp = {part.name: part for part in uneven.flops}["MLP"]
    assert of_mlp.model == pytest.approx(1.5 * of_mlp.needed)
