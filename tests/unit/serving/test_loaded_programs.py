"""Programs of a server are loaded when they are used."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest

import lowering
from graphtrain.errors import GraphtrainError
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
    loaded = looked_up(monkeypatch, {"prefill_8": artifact})
    weights = loaded.inputs("prefill_8", "weights")
    assert (weights["a"].shape, weights["a"].dtype) == ((4, 2), np.dtype("bfloat16"))
    assert loaded.inputs("prefill_8", "tokens").shape == (1, 8)


def test_a_program_that_is_needed_waits_for_no_other_one(monkeypatch):
    began, goes_on = threading.Event(), threading.Event()

    def load(artifact, target):
        if artifact.payload == b"slow":
            began.set()
            assert goes_on.wait(10)
        if artifact.payload == b"broken":
            raise ValueError("no program")
        return artifact.payload

    monkeypatch.setattr(lowering, "backend", lambda target: SimpleNamespace(load=load))
    names = ("slow", "broken", "fast", "last")
    artifacts = {name: Artifact(name.encode(), {}) for name in names}
    loaded = looked_up(monkeypatch, artifacts)
    loaded.load_in_background(names)
    assert began.wait(10)
    assert loaded["fast"] == loaded["fast"] == b"fast"
    goes_on.set()
    with pytest.raises(GraphtrainError, match="the compiled broken step cannot be loaded"):
        loaded["broken"]
    assert loaded["slow"] == b"slow" and loaded["last"] == b"last"


def looked_up(monkeypatch, artifacts: dict[str, Artifact]) -> programs.LoadedPrograms:
    """Return programs of a cache that holds these."""
    served = SimpleNamespace(target=Target.parse("cpu:1"))
    monkeypatch.setattr(programs, "request_keys", lambda program, names: {n: n for n in names})
    cache = SimpleNamespace(get_by_request=artifacts.get)
    return programs.LoadedPrograms(served, cache, list(artifacts), "")  # type: ignore[arg-type]
