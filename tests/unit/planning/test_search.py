from itertools import pairwise

import pytest

from graphtrain.config.schema import Batch, Mesh, Model, Program
from graphtrain.planning.search import candidates, search

SMALL = Model(layers=4, embed=512, heads=8, mlp=1024, vocab=4096)
LLAMA_70B = Model(layers=80, embed=8192, heads=64, kv_heads=8, mlp=28672, vocab=32000)


def program(target, model=SMALL, sequences=32, length=2048):
    batch = Batch(sequences=sequences, length=length)
    return Program(target=target, model=model, batch=batch, mesh=Mesh(data="rest"))


def test_every_candidate_fills_the_target_and_divides():
    for one in candidates(program("h100:8")):
        assert one.mesh.devices == 8
        assert SMALL.heads % one.mesh.axes["tensor"] == 0
        assert 32 % (one.mesh.axes["data"] * one.mesh.axes["fsdp"]) == 0
        assert one.program.batch.microbatches % one.mesh.axes["stage"] == 0


def test_the_ranked_fit_and_are_in_order():
    found = search(program("h100:8"))
    assert all(one.memory.fits for one in found.ranked)
    seconds = [one.seconds for one in found.ranked]
    assert all(later >= 0.98 * earlier for earlier, later in pairwise(seconds))
    assert found.considered > len(found.ranked)


def test_a_model_that_one_device_holds_is_not_cut_by_tensor():
    assert search(program("h100:8")).ranked[0].mesh.axes["tensor"] == 1


def test_what_cannot_hold_the_state_does_not_fit_and_says_what_is_largest():
    found = search(program("h100:64", LLAMA_70B, sequences=64, length=4096))
    best = found.ranked[0]
    assert best.memory.parameters * 64 <= 1.1 * 4 * 69e9  # in pieces over all devices
    assert best.mesh.axes["data"] < 64
    lost = search(program("h100:8", LLAMA_70B, sequences=8, length=4096))
    assert lost.ranked == ()
    assert any("nothing fits: at best" in reason for reason in lost.lost.values())


@pytest.mark.parametrize("family", ["tensor 8", "remat full", "stage 2"])
def test_a_family_that_lost_has_a_reason(family):
    reason = search(program("h100:8")).lost[family]
    assert "s longer" in reason or "GB" in reason


def test_long_sequences_may_be_split_by_position():
    meshes = [one.mesh for one in candidates(program("h100:8", sequences=8, length=32768))]
    assert any(mesh.axes["context"] > 1 for mesh in meshes)
    assert all(
        mesh.axes["context"] == 1 for mesh in (c.mesh for c in candidates(program("h100:8")))
    )
