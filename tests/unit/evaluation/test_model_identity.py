"""Weights of a folder have the digest of what is read from it, and of nothing else."""

from pathlib import Path

import pytest

from graphtrain.run.evaluation.model_identity import weights_digest


def write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


@pytest.mark.parametrize(
    "files",
    [
        {"model_safetensors": "1", "manifest_json": "of something else"},  # Hugging Face
        {"model_toml": "m", "weights__model_safetensors": "1"},  # converted, without a record
        {"model_toml": "m", "weights_json": "1"},
        {"config_toml": "c", "checkpoints__4__manifest_json": "1"},
        {"config_toml": "c", "checkpoints__4__manifest_json": "m", "base_json": "1"},
    ],
)
def test_other_weights_have_another_digest(files, tmp_path):
    digests = set()
    for index, content in enumerate(["1", "2", "1"]):
        changed = {name: content if text == "1" else text for name, text in files.items()}
        digests.add(weights_digest(write(tmp_path / str(index), **changed)))
    assert len(digests) == 2


def test_the_last_checkpoint_of_a_run_counts_and_not_what_lies_beside_it(tmp_path):
    run = write(tmp_path, config_toml="c", checkpoints__4__manifest_json="m")
    digest = weights_digest(write(run, run_log="more"))
    assert weights_digest(write(run, run_log="and more")) == digest
    assert weights_digest(write(run, checkpoints__10__manifest_json="m")) != digest
