"""Silent data corruption: a device that computes or stores a wrong value is named."""

import socket

import pytest
from places import Place

PLAIN = ["--target", "cpu:4", "--set", "run.checkpoints.local_every=4"]
FOUR = [*PLAIN, "--set", "run.verify_every=4"]

# The command, in which one bit changes on device 2: of the weights before step 6, or of the result
# of a step, which every fourth step has twice, when it is computed for the fifth time.
FLIPPED = """
import sys
import jax, numpy as np
from graphtrain.run import loop
from lowering.trees import flatten, unflatten

what, calls = sys.argv.pop(1), []

def flip(state):
    arrays = flatten(state)
    path = next(one for one in arrays if one.startswith("parameters/") and arrays[one].ndim == 2)
    shards = [np.array(shard.data) for shard in arrays[path].addressable_shards]
    shards[2].view(np.uint32)[5, 7] ^= 1 << 20
    devices = [shard.device for shard in arrays[path].addressable_shards]
    placed = [jax.device_put(shard, device) for shard, device in zip(shards, devices)]
    array = arrays[path]
    make = jax.make_array_from_single_device_arrays
    return unflatten(arrays | {path: make(array.shape, array.sharding, placed)})

compute = loop.TrainingLoop._compute

def computed(self, step, state, inputs, number):
    def counted(*inputs):
        outputs = step(*inputs)
        calls.append(number)
        wrong = what == "computed" and len(calls) == 5
        return outputs | {"state": flip(outputs["state"])} if wrong else outputs

    if what == "stored" and number == 6:
        state = flip(state)
    return compute(self, counted, state, inputs, number)

loop.TrainingLoop._compute = computed
from graphtrain.cli import main
main()
"""


def flipped(place: Place, what: str) -> str:
    """The error of a run in which a bit changes, which must end with the status of corruption."""
    words = ["run", "config.toml", *FOUR, "--set", f"run.directory={what}", "--quiet"]
    process = place.start_python("-c", FLIPPED, what, *words)
    _, err = process.communicate(timeout=200)
    assert process.returncode == 76, err
    return err


@pytest.mark.usefixtures("compiled_quickly")
def test_a_flipped_bit_is_named_before_it_is_saved_and_verification_changes_nothing(cold: Place):
    out, _ = cold.command("compile", "config.toml", *FOUR)
    assert "Total graphs:      5" in out
    cold.command("run", "config.toml", *FOUR)
    cold.command("run", "config.toml", *PLAIN, "--set", "run.directory=plain")
    assert cold.curve() == cold.curve("plain")
    device = f"device 2 of host {socket.gethostname()} (rank 0)"
    stored = flipped(cold, "stored")
    assert f"the state after step 8: {device} stores other values than its replicas" in stored
    computed = flipped(cold, "computed")
    assert (
        "step 4 was computed twice from the same state, with different results on "
        f"{device}" in computed
    )
    kept = [sorted(one.name for one in (cold.path / name / "checkpoints").glob("[0-9]*"))
            for name in ("stored", "computed")]  # fmt: skip
    assert kept == [["4"], []]
    cold.command("run", "config.toml", *FOUR, "--set", "run.directory=stored")
    assert cold.curve("stored") == cold.curve()
