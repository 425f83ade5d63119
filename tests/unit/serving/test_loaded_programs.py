"""Programs of a server are loaded when they are used."""

from types import SimpleNamespace

import numpy as np

from graphtrain.run import programs
from lowering.artifact import Artifact
from lowering.machine.target import Target


def test_the_inputs_of_a_program_are_known_before_it_is_loaded(monkeypatch):
    """The weights of a server are mapped as a program takes them that no prompt may ever need."""
    facts = {
        "weights/a": {"shape": [4, 2], "dtype": "bfloat16", "split": [[], []], "memory": "device"},
        "tokens": {"shape": [1, 8], "dtype": "int32", "split": [[], []], "memory": "device"},
    }
    record = {"mesh": {"data": 1}, "inputs": facts}
    artifact = Artifact(b"cannot be loaded", record)
    served = SimpleNamespace(target=Target.parse("cpu:1"))
    monkeypatch.setattr(programs, "request_keys", lambda program, names: dict.fromkeys(names))
    cache = SimpleNamespace(get_by_request=lambda key: artifact)
    loaded = programs.LoadedPrograms(served, cache, ["prefill_8"], "")  # type: ignore[arg-type]

    weights = loaded.inputs("prefill_8", "weights")
    assert (weights["a"].shape, weights["a"].dtype) == ((4, 2), np.dtype("bfloat16"))
    assert loaded.inputs("prefill_8", "tokens").shape == (1, 8)
