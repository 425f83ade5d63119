"""What an export reads where no directory has a whole checkpoint: the weights alone, of a store."""

import numpy as np
import pytest

from graphtrain.checkpoints.arrays import restore_array
from graphtrain.checkpoints.host_tier import HostTier, Part
from graphtrain.checkpoints.manifest import verify_files
from graphtrain.checkpoints.remote import RemoteCheckpoints
from graphtrain.checkpoints.remote_manifest import new_prefix
from graphtrain.checkpoints.remote_parts import (
    PartSource,
    PartsUpload,
    UploadedParts,
    upload_parts,
)
from graphtrain.errors import TrainingError
from graphtrain.run import export_process
from graphtrain.run.export_process import ExportJob, export
from graphtrain.run.exported_checkpoint import best_stored_step

WEIGHTS = np.arange(8, dtype=np.float32)
ARRAYS = {"parameters/a.b": [[8], "float32"], "optimizer/mu": [[8], "float32"]}


def put(path, step: int, validation_loss: float | None = None) -> None:
    """Upload the parts of a step of a host that has all pieces."""
    tier, remote = HostTier(path / "disk"), RemoteCheckpoints(str(path / "store"), create=True)
    pieces = {"pieces/parameters.a%2Eb/0": WEIGHTS, "pieces/optimizer.mu/0": WEIGHTS}
    metadata = {"step": step, "loader": {}, "arrays": ARRAYS, "validation_loss": validation_loss}
    if validation_loss is None:
        del metadata["validation_loss"]
    shapes = {name: [8] for name in ARRAYS}
    tier.write(step, Part("save", 0, 1, shapes), metadata, pieces)
    upload = PartsUpload(new_prefix(step), [PartSource(0, str(tier.own(step)))], [0], True)
    upload_parts(remote, upload)
    parts = UploadedParts(remote, step, upload)
    assert parts.are_complete()
    parts.finish(path / "run")


@pytest.fixture
def written(monkeypatch):
    """Sources of which folders were written, instead of weights that are real."""
    sources = []

    def write(job, source, files):
        sources.append(source)
        verify_files(source / "checkpoints" / str(job.step))
        array = restore_array(source / "checkpoints", job.step, "parameters/a.b")
        np.testing.assert_array_equal(array, WEIGHTS)
        with pytest.raises(TrainingError):
            restore_array(source / "checkpoints", job.step, "optimizer/mu")
        assert (source / "config.toml").read_text() == "settings"
        job.folder.mkdir()
        for name, content in files.items():
            (job.folder / name).write_bytes(content)

    monkeypatch.setattr(export_process, "_write", write)
    return sources


def test_the_weights_of_a_step_in_the_store_are_exported_and_its_optimizer_is_left_there(
    tmp_path, written, capsys
):
    run, store = tmp_path / "run", (str(tmp_path / "store"), None)
    run.mkdir()
    (run / "config.toml").write_text("settings")
    put(tmp_path, 4)
    export(job := ExportJob(str(run), 4, None, store=store))
    assert written == [run / ".hf-4.checkpoint"] and not written[0].exists()
    export(job)  # it is there
    assert len(written) == 1
    put(tmp_path, 4)  # trained again
    export(job)
    assert len(written) == 2 and "moved" in capsys.readouterr().out
    with pytest.raises(TrainingError, match=r"step 8 is not in .*store.*remote_timeout"):
        export(ExportJob(str(run), 8, None, store=store))


def test_the_best_step_is_that_of_the_store(tmp_path):
    store = str(tmp_path / "store"), None
    put(tmp_path, 2)
    with pytest.raises(TrainingError, match=r"no checkpoint in .*store was saved with"):
        best_stored_step(store)
    put(tmp_path, 4, 1.5)
    put(tmp_path, 6, 1.25)
    put(tmp_path, 8, 1.75)
    assert best_stored_step(store) == 6
