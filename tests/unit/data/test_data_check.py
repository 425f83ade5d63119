import json
import shutil
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

import graphtrain.api.evaluation as api_evaluation
from graphtrain.cli.data import command
from graphtrain.config.schema import BlendPart, Data, Run
from graphtrain.data.indexed.description import (
    check_tokenizer_file,
    read_description,
)
from graphtrain.data.indexed.verify import digest_problem, verify_sample
from graphtrain.data.prepare.text import prepare
from graphtrain.errors import DataError
from graphtrain.run import evaluate as run_evaluate
from graphtrain.run.data_check import DataCheck
from graphtrain.run.evaluate import verify_data


@pytest.fixture
def prefix(make_corpus, tmp_path):
    prepare([make_corpus([f"text {i} " * 30 for i in range(99)])], tmp_path / "data", "bytes")
    return tmp_path / "data" / "train"


def flip(path, position):
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def without_samples(prefix):
    """Write the description as earlier versions did: without blocks and its own digest."""
    path = prefix.with_suffix(".json")
    fields = json.loads(path.read_text())
    del fields["samples"], fields["digest"]
    path.write_text(json.dumps(fields))


@pytest.mark.parametrize("suffix", [".bin", ".idx", ".json"])
def test_a_sample_finds_a_flipped_byte_of_a_small_file(prefix, suffix):
    verify_sample(prefix)
    path = prefix.with_suffix(suffix)
    flip(path, path.stat().st_size // 3)
    with pytest.raises(DataError, match=path.name):
        verify_sample(prefix)


def test_what_a_sample_missed_is_found_in_the_background(prefix):
    without_samples(prefix)  # so that the sample of a small file does not find it first
    flip(prefix.with_suffix(".bin"), 100)
    check = DataCheck(Data(train=(BlendPart(dataset=str(prefix), weight=1.0),)))
    check.raise_if_damaged()
    with check:
        check._thread.join()
        with pytest.raises(DataError, match=r"train.bin: its digest differs"):
            check.raise_if_damaged()


def test_an_evaluation_refuses_a_validation_set_with_a_flipped_bit(prefix, tmp_path):
    without_samples(prefix)
    flip(prefix.with_suffix(".bin"), 100)
    run = Run(directory=str(tmp_path), steps=1, data=Data(train="none", validation=str(prefix)))
    with pytest.raises(DataError, match=r"train.bin: its digest differs"):
        verify_data(run)


def test_a_bigram_model_refuses_training_data_with_a_flipped_bit_before_anything_is_computed(
    prefix, tmp_path
):
    sound = tmp_path / "sound"
    for file in prefix.parent.glob(f"{prefix.name}.*"):
        shutil.copyfile(file, sound.with_suffix(file.suffix))
    flip(prefix.with_suffix(".bin"), 100)
    data = Data(train=str(prefix), validation=str(sound))
    run = Run(directory=str(tmp_path), steps=1, data=data)
    verify_data(run)
    with pytest.raises(DataError, match=r"train.bin: its digest differs"):
        verify_data(run, bigram=True)


def test_a_curve_over_checkpoints_verifies_the_data_once(prefix, tmp_path, monkeypatch):
    calls: list[object] = []
    loss = SimpleNamespace(validation_loss=1.0)
    monkeypatch.setattr(run_evaluate, "verify_data", lambda run: calls.append("verified"))
    monkeypatch.setattr(
        run_evaluate, "checkpoint_loss", lambda *_, step, **__: calls.append(step) or loss
    )
    monkeypatch.setattr(api_evaluation, "_steps_of", lambda *_: [1, 2])
    config = {
        "program": {"target": "cpu:1", "model": {"layers": 1, "embed": 8, "heads": 1, "mlp": 8,
                              "vocab": 264},
                    "batch": {"global_batch_size": 8, "seq_len": 8}},
        "run": {"directory": str(tmp_path / "run"), "steps": 1,
                "data": {"train": str(prefix), "validation": str(prefix)}},
    }  # fmt: skip
    api_evaluation.evaluate_steps(config)
    assert calls == ["verified", 1, 2]


def test_sound_data_is_said_to_be_sound(prefix):
    with DataCheck(Data(train=str(prefix), validation=str(prefix))) as check:
        check._thread.join()
        check.raise_if_damaged()
    assert digest_problem(prefix) is None


def test_a_run_that_ends_first_says_what_was_not_verified(prefix, monkeypatch):
    check = DataCheck(Data(train=str(prefix)))
    monkeypatch.setattr(
        "graphtrain.run.data_check.digest_problem",
        lambda prefix, is_stopping: check._stopping.wait() and None,
    )
    with pytest.warns(UserWarning, match=r"ended before .*train were verified as a whole"), check:
        pass


def test_a_run_that_fails_has_the_message_of_its_error_alone(prefix, monkeypatch, recwarn):
    check = DataCheck(Data(train=str(prefix)))
    monkeypatch.setattr(
        "graphtrain.run.data_check.digest_problem",
        lambda prefix, is_stopping: check._stopping.wait() and None,
    )
    with pytest.raises(OSError), check:
        raise OSError
    assert not recwarn.list


def test_blocks_of_a_large_file_are_spread_over_it(tmp_path):
    from graphtrain.data.indexed import blocks

    path = tmp_path / "train.bin"
    path.write_bytes(bytes(range(256)) * (1 << 14))  # 4 MiB: 16 blocks, all of them a sample
    digests = blocks.sample_digests(tmp_path / "train", [path])
    assert len(digests[".bin"]) == 16
    assert blocks.damaged_block(tmp_path / "train", digests) is None
    flip(path, (3 << 20) + 7)
    assert blocks.damaged_block(tmp_path / "train", digests) == (path, 3 << 20)


def test_a_damaged_tokenizer_is_not_copied(prefix, tmp_path):
    description = read_description(prefix)
    assert description is not None
    (prefix.parent / "tokenizer.json").write_text("{}")
    path = prefix.with_suffix(".json")
    without_samples(prefix)
    fields = json.loads(path.read_text())
    path.write_text(json.dumps(fields | {"tokenizer_file": "tokenizer.json"}))
    damaged = read_description(prefix)
    assert damaged is not None
    with pytest.raises(DataError, match=r"tokenizer.json: its digest differs"):
        check_tokenizer_file(prefix, damaged)
    from graphtrain.weights.tokenizer import copy_tokenizer

    with pytest.raises(DataError, match=r"tokenizer.json: its digest differs"):
        copy_tokenizer(str(prefix), tmp_path / "out")


@pytest.mark.parametrize("name", ["train.bin", "train.json"])
def test_the_advice_to_prepare_a_damaged_dataset_again_works(make_corpus, tmp_path, name):
    corpus = make_corpus([f"text {i} " * 30 for i in range(99)])
    prepare([corpus], tmp_path / "data", "bytes")
    path = tmp_path / "data" / name
    content = path.read_bytes()
    # In the description, a letter: it is still JSON.
    flip(path, content.index(b"bytes") if name == "train.json" else len(content) // 2)
    with pytest.warns(UserWarning, match=f"{name}: .* differs.*; preparing the dataset again"):
        again = prepare([corpus], tmp_path / "data", "bytes")
    assert not again.up_to_date and path.read_bytes() == content
    assert prepare([corpus], tmp_path / "data", "bytes").up_to_date


def test_a_dataset_without_a_description_is_not_called_intact(prefix):
    prefix.with_suffix(".json").unlink()
    missing = "train.json is missing: digests and vocabulary were not checked"
    result = CliRunner().invoke(command, ["verify", str(prefix)])
    assert missing in result.output and "intact" not in result.output
    with pytest.warns(UserWarning, match=f"{missing}; damage to it is not noticed"):
        DataCheck(Data(train=str(prefix)))
