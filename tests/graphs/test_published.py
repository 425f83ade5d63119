"""What the planner takes machines to reach is what published steps show, and orders them."""

import pytest
from published_fit import fit, held_out_range, machines_table, predict_all
from published_ranks import strategies_by_source
from published_rows import flops_per_token, read_rows
from rank_correlation import spearman

from graphtrain.cost_model.traffic import bubble_of
from graphtrain.planning.costs import PUBLISHED_RANGE


@pytest.fixture(scope="module")
def predicted():
    return predict_all(read_rows())


@pytest.fixture(scope="module")
def fitted(predicted):
    return fit(predicted[0])


def test_machines_reach_what_the_published_steps_show(predicted, fitted):
    targets = {one.machine: one.program.target for one in predicted[0]}
    for machine, expected in machines_table(predicted[0], fitted).items():
        listed = targets[machine].achieved
        for name in ("products", "attention", "tensor_overlap", "products_8bit"):
            shown = getattr(expected, name)
            assert getattr(listed, name) == (shown and pytest.approx(shown)), f"{machine}, {name}"


def test_the_range_of_costs_is_that_of_the_held_out_steps(predicted, fitted):
    assert pytest.approx(held_out_range(predicted[0], fitted), abs=0.005) == PUBLISHED_RANGE


def test_strategies_that_one_source_compares_are_in_its_order(predicted, fitted):
    found = strategies_by_source(predicted[0], fitted)
    ranked = [one for one in found if one.correlation is not None]
    assert ranked and all(one.correlation >= 0.9 for one in ranked), ranked
    right, pairs = (sum(counts) for counts in zip(*(one.pairs for one in found), strict=True))
    assert right >= 0.9 * pairs


def test_reasons_why_rows_are_not_predicted_are_one_line(predicted):
    for name, reason in predicted[1].items():
        assert len(reason) < 200 and "\n" not in reason and "pydantic" not in reason, name


def test_rows_are_held_out_by_their_name_alone(predicted):
    held_out = {one.name: one.is_held_out for one in predicted[0]}
    assert held_out["mpt-70b h100x32 s2048"]
    assert not held_out["nemo llama3.1-8b h100x8 fp8"]


def test_a_published_pipeline_has_the_bubble_of_its_source(predicted):
    row = {one.name: one for one in predicted[0]}["modellink-rc2 llama2-70b 910b x32"]
    stages, microbatches, virtual_stages = 4, 1024, 4
    idle = (stages - 1) / (stages - 1 + microbatches * virtual_stages)
    assert bubble_of(row.program) == pytest.approx(idle)


def test_flops_of_megatron_are_those_of_its_papers():
    row = next(one for one in read_rows() if one["name"] == "megatron-2021 gpt-7.5B a100x128")
    layers, hidden, length, vocab = 36, 4096, 2048, 51200
    recomputed = 1 + length / (6 * hidden) + vocab / (16 * layers * hidden)
    assert flops_per_token(row) == pytest.approx(96 * layers * hidden**2 * recomputed)


def test_equal_ranks_share_their_mean():
    assert spearman([1, 2, 3, 4], [10, 20, 20, 40]) == pytest.approx(0.9486832980505138)
    assert spearman([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
    assert spearman([1, 2, 3], [5, 5, 5]) == 0
