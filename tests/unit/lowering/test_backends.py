import importlib
import inspect

import pytest

import lowering
from lowering.xla import backend as xla

# What the package asks of the backend of a target, whichever it is.
ASKED = [
    "checkpoint_arrays", "compile", "compile_devices", "devices", "forbid_tracing", "from_shards",
    "load", "lower", "make_mesh", "memory_in_use", "peak_memory", "plan_graph", "to_devices",
]  # fmt: skip


@pytest.mark.parametrize("name", sorted(set(lowering._BACKENDS.values())))
@pytest.mark.parametrize("function", ASKED)
def test_every_backend_has_what_is_asked_of_it(name, function):
    ours = inspect.signature(getattr(importlib.import_module(name), function))
    first = inspect.signature(getattr(xla, function))
    required = [p.name for p in first.parameters.values() if p.default is p.empty]
    assert [p.name for p in ours.parameters.values() if p.default is p.empty] == required
