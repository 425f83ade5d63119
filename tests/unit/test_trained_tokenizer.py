"""Data that was prepared again with another tokenizer is refused by what uses a checkpoint."""

import shutil
from types import SimpleNamespace

import pytest
from in_process import graphtrain

from graphtrain.config.schema import Data, Run
from graphtrain.errors import DataError
from graphtrain.run import trained_tokenizer
from graphtrain.run.trained_tokenizer import check_trained_tokenizer, tokenizer_digests


@pytest.fixture
def run(tmp_path, monkeypatch) -> Run:
    """A run with a checkpoint of step 3, trained on bytes."""
    (tmp_path / "text.txt").write_text("the king and the queen\n\n" * 50)
    prepare(tmp_path, "bytes")
    data = Data(train=str(tmp_path / "data/train"), validation=str(tmp_path / "data/validation"))
    trained = tokenizer_digests(data.train_datasets)
    monkeypatch.setattr(trained_tokenizer, "saved_steps", lambda directory: [3])
    info = SimpleNamespace(identity={"tokenizer": trained})
    monkeypatch.setattr(trained_tokenizer, "read_checkpoint_info", lambda directory, step: info)
    return Run(directory=str(tmp_path / "run"), steps=3, data=data)


def prepare(folder, tokenizer: str) -> None:
    command = f"data prepare {folder}/text.txt --output {folder}/data --tokenizer {tokenizer}"
    assert graphtrain(*command.split(), "--replace").status == 0


@pytest.mark.parametrize("step", [None, 3])
def test_another_tokenizer_is_refused(run, tmp_path, step):
    check_trained_tokenizer(run, step)
    prepare(tmp_path, "chars")
    with pytest.raises(DataError, match=r"train has another tokenizer than the data"):
        check_trained_tokenizer(run, step)
    check_trained_tokenizer(run, 4)  # which is not there: refused where weights are read
    prepare(tmp_path, "bytes")
    check_trained_tokenizer(run, step)


def test_data_that_is_not_there_is_no_other_data(run, tmp_path):
    shutil.rmtree(tmp_path / "data")
    check_trained_tokenizer(run, None)
