import hashlib
import json
import shutil
import time

import jax
import numpy as np
import pytest

from graphtrain.checkpoints import verified_reading
from graphtrain.checkpoints.checkpoint import Checkpoints, restore_parameters
from graphtrain.checkpoints.listing import verify_local
from graphtrain.checkpoints.manifest import DamagedCheckpoint, verify_files, write_manifest
from graphtrain.checkpoints.steps import Retention, saved_steps
from graphtrain.checkpoints.verified_reading import verified_while_reading
from graphtrain.files import json_digest
from graphtrain.run import resume
from lowering.xla import distributed

STATE = {"parameters": {"head": np.random.default_rng(0).random((64, 64), np.float32)}}
NOT_READ = {"_CHECKPOINT_METADATA", "commit_success.txt"}  # Orbax's notes, after the manifest


def save(directory, steps=(1,)):
    checkpoints = Checkpoints(directory, Retention(3))
    for step in steps:
        checkpoints.save(step, jax.device_put(STATE), {"step": step})
    checkpoints.close()
    return directory / str(steps[-1])


def described():
    state = jax.device_put(STATE)
    return jax.tree.map(
        lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding), state
    )


def files(path):
    return sorted(file for file in path.rglob("*") if file.is_file())


def flip(path, position):
    content = bytearray(path.read_bytes())
    content[position] ^= 0x10
    path.write_bytes(content)


def restore(directory, step):
    checkpoints = Checkpoints(directory, Retention(3))
    try:
        return checkpoints.restore(step, described()).state["parameters"]["head"]
    finally:
        checkpoints.close()


def test_a_flipped_byte_of_any_file_is_found_and_named(tmp_path):
    step = save(tmp_path)
    names = [file.relative_to(step).as_posix() for file in files(step)]
    assert any(name.startswith("state/ocdbt.process_0/d/") for name in names)
    for name in names:
        content = (step / name).read_bytes()
        flip(step / name, len(content) // 2)
        if name in NOT_READ:
            np.testing.assert_array_equal(restore(tmp_path, 1), STATE["parameters"]["head"])
        else:
            with pytest.raises(DamagedCheckpoint, match=f"is damaged: {name}"):
                restore(tmp_path, 1)
        (step / name).write_bytes(content)
    np.testing.assert_array_equal(restore(tmp_path, 1), STATE["parameters"]["head"])


def test_the_metadata_of_orbax_may_be_damaged_anywhere(tmp_path):
    path = save(tmp_path) / "_CHECKPOINT_METADATA"
    content = path.read_bytes()
    for position in range(0, len(content), max(1, len(content) // 6)):
        flip(path, position)
        np.testing.assert_array_equal(restore(tmp_path, 1), STATE["parameters"]["head"])
        path.write_bytes(content)


def test_a_missing_shortened_or_added_manifest_file_is_said(tmp_path):
    step = save(tmp_path)
    largest = max(files(step / "state"), key=lambda file: file.stat().st_size)
    content = largest.read_bytes()
    largest.write_bytes(content[:-1])
    with pytest.raises(DamagedCheckpoint, match=f"{largest.name} has {len(content) - 1} bytes"):
        verify_files(step)
    largest.unlink()
    with pytest.raises(DamagedCheckpoint, match=f"{largest.name} cannot be read"):
        verify_files(step)
    (step / "manifest.json").unlink()
    with pytest.raises(DamagedCheckpoint, match=r"manifest.json is missing"):
        restore_parameters(tmp_path, 1, described()["parameters"])


def test_a_manifest_of_too_few_files_is_not_called_intact(tmp_path):
    step = save(tmp_path / "checkpoints")
    assert verify_local(tmp_path, 1) is None
    for file in (step / "state").rglob("d/*"):
        file.unlink()
    (step / "manifest.json").unlink()
    write_manifest(step)  # as of a directory into which two runs wrote
    reason = verify_local(tmp_path, 1)
    assert reason is not None and "parameters/head is missing or damaged" in reason


def test_ranks_share_the_files(tmp_path):
    step = save(tmp_path)
    names = [name for name in files(step) if name.name not in {"manifest.json", *NOT_READ}]
    for file in [*names, step / "about" / "metadata"]:
        content = file.read_bytes()
        flip(file, 0)
        found = 0
        for rank in range(3):
            try:
                verify_files(step, part=rank, parts=3)
            except DamagedCheckpoint:
                found += 1
        assert found == 1, file
        file.write_bytes(content)


def be_rank_zero_of_two(monkeypatch, found_by_the_other=()):
    """Act as rank 0 of two; the other finds a damage once, in a copy of its own."""
    answers = [json.dumps(found_by_the_other)]
    answered = {
        "count": lambda: 2,
        "rank": lambda: 0,
        "all_gather_text": lambda word: [word, answers.pop() if answers else "[]"],
    }
    for name, answer in answered.items():
        monkeypatch.setattr(distributed, name, answer)


def test_each_host_verifies_all_of_a_copy_of_its_own(tmp_path, monkeypatch):
    be_rank_zero_of_two(monkeypatch)
    for name in ("a", "b"):
        (tmp_path / name).write_text(name)
    write_manifest(tmp_path)
    with verified_while_reading(tmp_path, is_shared=False):
        pass
    for name in ("a", "b"):
        (tmp_path / name).write_text("c")
        with (
            pytest.raises(DamagedCheckpoint, match=f"on rank 0, {name} does not have the digest"),
            verified_while_reading(tmp_path, is_shared=False),
        ):
            pass
        (tmp_path / name).write_text(name)


def test_a_host_that_verifies_for_long_learns_at_once_of_damage_on_another(tmp_path, monkeypatch):
    (tmp_path / "a").write_text("a")
    write_manifest(tmp_path)
    found, exchanges = [str(tmp_path), "b cannot be read"], []

    def gather(word):  # the other host is done after the third exchange, with a damage
        exchanges.append(word)
        return [word, json.dumps(found) if len(exchanges) > 2 else "[]" if word == "[]" else ""]

    def verify_slowly(path, *, is_wanted, **_):
        while is_wanted():
            time.sleep(0.01)

    be_rank_zero_of_two(monkeypatch)
    monkeypatch.setattr(distributed, "all_gather_text", gather)
    monkeypatch.setattr(verified_reading, "verify_files", verify_slowly)
    monkeypatch.setattr(verified_reading, "_EXCHANGE_SECONDS", 0.01)
    with (
        pytest.raises(DamagedCheckpoint, match="on rank 1, b cannot be read"),
        verified_while_reading(tmp_path, is_shared=False),
    ):
        pass
    assert exchanges == ["[]", "", "[]"]


def test_files_are_left_out_when_their_verification_is_no_longer_wanted(tmp_path):
    (tmp_path / "a").write_text("a")
    write_manifest(tmp_path)
    (tmp_path / "a").write_text("b")
    verify_files(tmp_path, is_wanted=lambda: False)
    with pytest.raises(DamagedCheckpoint):
        verify_files(tmp_path)


def test_what_is_damaged_on_one_host_is_dropped_on_all(tmp_path, monkeypatch):
    place = save(tmp_path / "checkpoints", (1, 2))
    be_rank_zero_of_two(monkeypatch, [str(place), "about/metadata cannot be read"])
    monkeypatch.setattr(resume, "steps_on_all_ranks", lambda steps: (steps, {}))
    monkeypatch.setattr(resume, "on_all_ranks", lambda action: action())
    monkeypatch.setattr(resume, "check_identity", lambda *_: None)
    resumption = resume.Resumption(tmp_path, lambda step: {}, is_shared=False)
    assert resumption.steps == [1]
    assert [one.reason for one in resumption._damaged] == [
        "on rank 1, about/metadata cannot be read"
    ]


def test_a_quarantined_checkpoint_can_be_saved_again(tmp_path):
    directory = tmp_path / "run" / "checkpoints"
    save(directory, (1, 2))
    checkpoints = Checkpoints(directory, Retention(3))
    checkpoints.restore(2, described())
    moved = checkpoints.quarantine(DamagedCheckpoint(directory / "2", "state/x differs"))
    assert saved_steps(directory) == [1] and moved == tmp_path / "run" / "quarantine" / "2-1"
    checkpoints.save(2, jax.device_put(STATE), {"step": 2})
    checkpoints.wait()
    again = checkpoints.quarantine(DamagedCheckpoint(directory / "2", "state/x differs"))
    checkpoints.close()
    assert again.name == "2-2" and saved_steps(directory) == [1]


def test_a_checkpoint_is_complete_with_its_manifest_or_not_at_all(tmp_path, monkeypatch):
    def fail(directory):
        assert directory.name != "2" and (directory / "state").is_dir()
        raise OSError(28, "No space left on device")

    save(tmp_path, (1,))
    monkeypatch.setattr("graphtrain.checkpoints.checkpoint.write_manifest", fail)
    with pytest.raises(Exception, match=r"cannot be written"):
        save(tmp_path, (2,))
    assert saved_steps(tmp_path) == [1]


def test_the_manifest_of_another_directory_lies_beside_it(tmp_path):
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "tokenizer.json").write_text("{}")
    write_manifest(tmp_path / "files", tmp_path / "files.json")
    verify_files(tmp_path / "files", tmp_path / "files.json")
    (tmp_path / "files" / "tokenizer.json").write_text("[]")
    with pytest.raises(DamagedCheckpoint, match=r"tokenizer.json does not have the digest"):
        verify_files(tmp_path / "files", tmp_path / "files.json")


def test_a_copied_checkpoint_is_not_believed_by_its_name(tmp_path):
    shutil.copytree(save(tmp_path), tmp_path / "50")
    with pytest.raises(DamagedCheckpoint, match="50 is damaged: it is a copy of step 1, under the"):
        restore(tmp_path, 50)
    np.testing.assert_array_equal(restore(tmp_path, 1), STATE["parameters"]["head"])


def test_the_sha_256_of_an_earlier_version_is_verified(tmp_path):
    (tmp_path / "array").write_bytes(b"weights")
    sha256 = hashlib.sha256(b"weights").hexdigest()
    content = {"version": 1, "files": {"array": {"size": 7, "sha256": sha256}}}
    content["digest"] = json_digest(content)
    (tmp_path / "manifest.json").write_text(json.dumps(content))
    verify_files(tmp_path)
    (tmp_path / "array").write_bytes(b"Weights")
    with pytest.raises(DamagedCheckpoint, match="array does not have the digest"):
        verify_files(tmp_path)


def test_the_digest_is_the_published_xxh3(tmp_path):
    """The value for no bytes is in the vectors of the reference implementation."""
    (tmp_path / "empty").touch()
    write_manifest(tmp_path)
    entry = json.loads((tmp_path / "manifest.json").read_text())["files"]["empty"]
    assert entry == {"size": 0, "xxh3_128": "99aa06d3014798d86001c324468d497f"}
