import subprocess

import jax
import numpy as np
import pytest

from graphtrain.checkpoints.checkpoint import Checkpoints, restore_parameters
from graphtrain.checkpoints.layer_order import LayerOrder
from graphtrain.checkpoints.steps import Retention, saved_steps
from graphtrain.errors import TrainingError
from lowering.xla.arrays import from_shards


def state(rows=8):
    return {
        "parameters": {"head": jax.device_put(np.random.default_rng(0).random((rows, 64)))},
        "step": jax.device_put(np.int32(3)),
    }


def described(tree):
    return jax.tree.map(
        lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding), tree
    )


def test_what_was_saved_is_restored_whole_or_in_part(tmp_path):
    saved = state()
    checkpoints = Checkpoints(tmp_path, Retention(2))
    checkpoints.save(3, saved, {"step": 3})
    checkpoints.wait()
    restored = checkpoints.restore(3, described(saved))
    checkpoints.close()
    np.testing.assert_array_equal(restored.state["parameters"]["head"], saved["parameters"]["head"])
    assert (restored.step, restored.data_position) == (3, {"step": 3})
    parameters = restore_parameters(tmp_path, 3, described(saved["parameters"]))
    np.testing.assert_array_equal(parameters["head"], saved["parameters"]["head"])


def test_only_the_newest_are_kept(tmp_path):
    checkpoints = Checkpoints(tmp_path, Retention(2))
    for step in (1, 2, 3):
        checkpoints.save(step, state(), {})
    checkpoints.close()
    assert saved_steps(tmp_path) == [2, 3]


def test_steps_that_are_a_multiple_are_kept_beside_the_newest(tmp_path):
    checkpoints = Checkpoints(tmp_path, Retention(1, every=2))
    for step in (1, 2, 3, 4, 5):
        checkpoints.save(step, state(), {})
    checkpoints.close()
    assert saved_steps(tmp_path) == [2, 4, 5]


def test_arrays_of_another_program_are_named(tmp_path):
    checkpoints = Checkpoints(tmp_path, Retention(1))
    checkpoints.save(1, state(), {})
    checkpoints.wait()
    with pytest.raises(
        TrainingError, match=r"parameters/head is float32 \[8, 64\] in the checkpoint and float"
    ):
        checkpoints.restore(1, described(state(rows=16)))
    checkpoints.close()


def test_blocks_that_were_saved_one_by_one_are_rows_of_a_stack(tmp_path):
    ups = np.random.default_rng(0).random((3, 4, 2)).astype(np.float32)
    blocks = {str(number): {"up": jax.device_put(up)} for number, up in enumerate(ups)}
    checkpoints = Checkpoints(tmp_path, Retention(1), LayerOrder(None, from_shards, by_shape=True))
    checkpoints.save(1, {"parameters": {"layers": blocks}, "step": jax.device_put(np.int32(1))}, {})
    checkpoints.wait()
    stacked = {"0": {"up": jax.device_put(ups[0])}, "1-2": {"up": jax.device_put(ups[1:])}}
    wanted = {"parameters": {"layers": stacked}, "step": jax.device_put(np.int32(0))}
    restored = checkpoints.restore(1, described(wanted)).state
    assert int(restored["step"]) == 1
    for name, block in stacked.items():
        np.testing.assert_array_equal(restored["parameters"]["layers"][name]["up"], block["up"])
    wanted["parameters"]["layers"]["1-2"]["up"] = jax.device_put(ups[1:, :3])
    with pytest.raises(TrainingError, match=r"layers/1-2/up is float32 \[2, 4, 2\] in the checkpo"):
        checkpoints.restore(1, described(wanted))
    checkpoints.close()


def test_a_full_disk_is_one_error_and_keeps_the_last_checkpoint(tmp_path, capfd):
    mount = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a small file system cannot be mounted here")
    try:
        checkpoints = Checkpoints(tmp_path / "run", Retention(2))
        checkpoints.save(1, state(), {})
        checkpoints.wait()
        checkpoints.save(2, state(rows=4096), {})
        with pytest.raises(TrainingError, match=r"cannot be written; free disk space"):
            checkpoints.wait()
        with pytest.raises(
            TrainingError, match=r"cannot be written; .*\(No space left on device\)"
        ):
            checkpoints.raise_if_failed()  # what a run asks after each step
        assert saved_steps(tmp_path / "run") == [1]
        assert not capfd.readouterr().err
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def test_a_directory_whose_name_is_no_number_is_no_checkpoint(tmp_path):
    for name in ("3", "²", "3.orbax-checkpoint-tmp", "-1"):
        (tmp_path / name).mkdir()
    assert saved_steps(tmp_path) == [3]


def test_rows_in_order_are_read_with_an_axis_of_virtual_stages(tmp_path):
    rows = (0, 1, 2, 3)
    layers = {"layers": {"mlp": jax.device_put(np.arange(8.0).reshape(4, 2))}}
    checkpoints = Checkpoints(tmp_path, Retention(1), LayerOrder(rows, from_shards))
    checkpoints.save(1, {"parameters": layers}, {})
    checkpoints.wait()
    rounds = jax.tree.map(lambda array: array.reshape(2, 2, 2), layers)
    restored = checkpoints.restore(1, {"parameters": described(rounds)}).state["parameters"]
    checkpoints.close()
    np.testing.assert_array_equal(restored["layers"]["mlp"], rounds["layers"]["mlp"])
