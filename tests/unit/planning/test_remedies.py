import pytest

from graphtrain.cache import Cache
from graphtrain.planning.assess import estimate
from graphtrain.planning.remedies import find_remedies

LARGE = ["program.batch.global_batch_size=2048", "program.batch.seq_len=2048"]


@pytest.fixture
def large(vary):
    """Settings changed from a program that does not fit."""
    return lambda change: vary([*LARGE, *change])


def test_every_remedy_fits_and_is_a_change_of_settings(large, tmp_path):
    program = large([])
    failed = estimate(program)
    assert not failed.memory.fits
    remedies = find_remedies(failed, program, large, Cache(tmp_path), confirm=False)
    assert remedies
    for remedy in remedies:
        assert remedy.assessment.memory.fits and not remedy.confirmed
        assert estimate(large(remedy.change)).memory == remedy.assessment.memory


def test_the_devices_at_hand_come_before_more_of_them(large, tmp_path):
    remedies = find_remedies(estimate(large([])), large([]), large, Cache(tmp_path), confirm=False)
    devices = [remedy.devices for remedy in remedies]
    assert devices == sorted(devices) and devices[0] == 4
    costs = [remedy.device_seconds for remedy in remedies if remedy.devices == 4]
    assert costs == sorted(costs)


def test_an_axis_for_experts_without_experts_becomes_fsdp(vary, tmp_path):
    def of_experts(change):
        mesh = ["program.target=h100:64", "program.mesh={expert=64}"]
        wide = "program.model={layers=32, embed=4096, heads=32, mlp=11008, vocab=32000}"
        return vary([*mesh, wide, "program.batch={global_batch_size=64, seq_len=512}", *change])

    program = of_experts([])
    failed = estimate(program)
    assert not failed.memory.fits
    remedies = find_remedies(failed, program, of_experts, Cache(tmp_path), confirm=False)
    assert ('program.mesh={fsdp = "rest"}',) in [remedy.change for remedy in remedies]


def test_where_nothing_helps_nothing_is_offered(vary, tmp_path):
    def hopeless(change):
        return vary(["program.model.vocab=1_000_000_000", *change])

    failed = estimate(hopeless([]))
    assert find_remedies(failed, hopeless([]), hopeless, Cache(tmp_path), confirm=False) == []
