"""Which steps hosts without a shared disk upload: all decide the same."""

import json

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from graphtrain.checkpoints import part_uploads
from graphtrain.checkpoints.host_tier import HostTier
from graphtrain.checkpoints.part_uploads import PartUploads
from graphtrain.checkpoints.pieces import all_pieces, pieces_on_host, pieces_to_upload, shard_shapes
from graphtrain.errors import TrainingError
from graphtrain.run import agreement, resume


def state():
    mesh = Mesh(np.array(jax.devices()[:4]), "x")
    split = NamedSharding(mesh, PartitionSpec(None, "x"))
    return {"a": {"b": jax.device_put(np.zeros((6, 8)), split)}, "step": jax.device_put(3)}


@pytest.fixture
def ranks(monkeypatch):
    """Two ranks; the second one has no devices, and the state that the list has."""
    others = ["idle"]

    def gather(word):
        return [word, json.dumps(["other prefix", others[0]])]

    answers = {"count": lambda: 2, "rank": lambda: 0, "all_gather_text": gather}
    for name, answer in answers.items():
        monkeypatch.setattr(part_uploads.distributed, name, answer)
    return others


@pytest.mark.parametrize(
    ("own", "other", "is_left_out"),
    [
        ("idle", "idle", False),
        ("busy", "idle", True),
        ("idle", "busy", True),
        ("busy", "failing", False),
        ("failing", "idle", False),
    ],
)
def test_a_step_is_left_out_while_a_host_uploads_and_none_fails(
    ranks, tmp_path, own, other, is_left_out
):
    ranks[0] = other
    uploads = PartUploads(HostTier(tmp_path), state=lambda: own)
    save = uploads.add(4, state())
    assert uploads.is_left_out(4) is is_left_out
    upload = uploads.upload(4)  # the last step is uploaded all the same
    assert upload is not None and upload.is_last and upload.numbers == [0]
    assert upload.prefix.endswith(f"/{save}") and upload.sources[0].directory.endswith("own/4")
    assert uploads.steps() == [4]
    uploads.add(8, state())
    assert uploads.upload(4) is None and uploads.steps() == [8]


def test_the_pieces_of_all_ranks_are_all_pieces_each_once():
    tree = state()
    shapes = {path: list(shape) for path, shape in shard_shapes(tree).items()}
    names, ranks = pieces_to_upload(tree, 0)
    arrays = {"a/b": [[6, 8], "float64"], "step": [[], "int32"]}
    assert names == sorted(all_pieces(arrays, shapes)) == sorted(pieces_on_host(tree))
    assert ranks == [0] and pieces_to_upload(tree, 1) == ([], [0])


def test_a_checkpoint_that_only_one_host_sees_is_not_passed_over(monkeypatch, tmp_path):
    others = [4, 8]
    monkeypatch.setattr(
        agreement.distributed, "all_gather_text", lambda word: [word, json.dumps(others)]
    )
    assert agreement.steps_on_all_ranks([4, 12]) == ([4], {8: 1, 12: 0})
    resume._check_seen_by_all(tmp_path, {8: 1, 12: 0}, 12)
    with pytest.raises(TrainingError, match=r"only rank 0 has the checkpoint of step 12 in .*push"):
        resume._check_seen_by_all(tmp_path, {8: 1, 12: 0}, 8)
