"""Which steps hosts without a shared disk upload: all decide the same."""

import json
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from graphtrain.checkpoints import part_uploads
from graphtrain.checkpoints.host_tier import HostTier
from graphtrain.checkpoints.layer_order import LayerOrder
from graphtrain.checkpoints.part_uploads import PartUploads
from graphtrain.checkpoints.peer_steps import PeerSteps
from graphtrain.checkpoints.peers import Peers
from graphtrain.checkpoints.pieces import all_pieces, pieces_on_host, pieces_to_upload, shard_shapes
from graphtrain.checkpoints.steps import Retention
from graphtrain.checkpoints.tiered import TieredCheckpoints
from graphtrain.config.schema import CheckpointSettings
from graphtrain.errors import TrainingError
from graphtrain.run import agreement, resume
from graphtrain.run.checkpoint_saves import CheckpointSaves
from graphtrain.run.uploads import Uploads
from lowering.machine.target import Target
from lowering.xla.arrays import from_shards


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
        ("waiting", "busy", True),
        ("waiting", "failing", False),
        ("waiting", "idle", False),  # for a part that never comes
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


def test_a_host_is_failing_after_its_part_was_refused_until_the_next_request(tmp_path, monkeypatch):
    settings = CheckpointSettings(local=str(tmp_path / "disk"), remote=str(tmp_path / "store"))
    parts, events = PartUploads(HostTier(tmp_path / "disk")), []
    uploads = Uploads(tmp_path, settings, print, parts)
    monkeypatch.setattr(uploads, "_start", lambda: None)
    monkeypatch.setattr(uploads, "_process", SimpleNamespace(poll=lambda: None))
    monkeypatch.setattr(uploads, "_send", events.append)

    def after(event, step):
        uploads._events.put({"event": event, "step": step, "reason": "damaged"})
        return parts.state()

    def save(step):
        parts.add(step, state())
        uploads.on_checkpoint(step, tmp_path)
        return parts.state()

    assert save(40) == "busy" and after("waiting", 40) == "waiting"
    with pytest.warns(UserWarning, match="step 40 cannot be uploaded: damaged"):
        assert after("refused", 40) == "failing" and uploads.steps_in_use() == set()
    assert save(60) == "busy" and [one["step"] for one in events] == [40, 60]
    with pytest.warns(UserWarning, match=r"step 60 is not uploaded to .*other hosts have not"):
        assert after("incomplete", 60) == "idle"
    assert save(80) == "busy"
    with pytest.warns(UserWarning, match="step 60 cannot be uploaded"):
        assert after("refused", 60) == "busy"  # the newer step is not held up


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


def tiered(path: Path, parts: PartUploads, **options) -> TieredCheckpoints:
    """Checkpoints of one host that shares no disk with others."""
    peers, order = Peers([("127.0.0.1", 1)], ""), LayerOrder(None, from_shards)
    steps = PeerSteps(parts.tier, peers)
    place = path / "checkpoints"
    return TieredCheckpoints(
        place, Retention(2), order, tier=parts.tier, peers=peers, peer_steps=steps, uploads=parts,
        **options,
    )  # fmt: skip


def test_a_step_whose_write_ends_while_the_next_one_is_saved_is_uploaded(tmp_path, monkeypatch):
    parts = PartUploads(HostTier(tmp_path / "disk"))
    settings = CheckpointSettings(local=str(tmp_path / "disk"), remote=str(tmp_path / "store"))
    uploads, asked = Uploads(tmp_path, settings, print, parts), []
    monkeypatch.setattr(uploads, "_ask", lambda request: asked.append(request.step))
    write = HostTier.write

    def write_slowly(*arguments):
        time.sleep(0.3)
        write(*arguments)

    monkeypatch.setattr(HostTier, "write", write_slowly)
    place = tiered(tmp_path, parts)
    phase = SimpleNamespace(program=SimpleNamespace(target=Target.parse("cpu:1")))
    phases = SimpleNamespace(
        current=SimpleNamespace(phase=phase, identity={}), loader=SimpleNamespace(state=dict)
    )
    saves = CheckpointSaves(
        SimpleNamespace(verify_every=None),
        phases,
        place,
        SimpleNamespace(state=dict),
        [],
        lambda event, *arguments: getattr(uploads, event)(*arguments),
    )
    common = {"validation_loss": None, "journal": lambda: None, "is_whole": True, "is_last": False}
    for step in (40, 60):
        saves.save(step, state(), **common)
    assert asked == [40]
    place.close()


def test_without_remote_every_each_checkpoint_is_uploaded(tmp_path):
    parts = PartUploads(HostTier(tmp_path / "disk"))
    assert tiered(tmp_path, parts).is_due_whole(7)
    every_four = tiered(tmp_path, parts, whole_every=4)
    assert [step for step in (2, 4, 6, 8) if every_four.is_due_whole(step)] == [4, 8]
