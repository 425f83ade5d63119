"""Dumps by several processes, while the run that they are of trains."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from graphtrain.graphs.names import DUMP
from graphtrain.run.dumps import take


class _Restored(Exception):
    """The step that is restored."""


@pytest.mark.parametrize(("processes", "step"), [(1, None), (2, 100)])
def test_all_processes_restore_the_step_that_they_agreed_on(monkeypatch, processes, step):
    """A single one may look for the newest again, if the run deletes that one meanwhile."""

    def restore(program, directory, step, described):
        raise _Restored(step)

    programs = {DUMP: SimpleNamespace(inputs=lambda name: {})}
    stands: dict[str, Any] = {
        "saved_steps": lambda directory: [100],
        "check_same_checkpoints": lambda directory, steps: None,
        "check_same_executables": lambda programs: None,
        "on_all_ranks": lambda action: action(),
        "InitialWeights": SimpleNamespace(open=lambda *_, **__: None),
        "_phase_programs": lambda *_, **__: [SimpleNamespace(programs=programs)],
        "_create": lambda directory, stack: directory,
        "_restored": restore,
    }
    for name, value in stands.items():
        monkeypatch.setattr(take, name, value)
    backend = SimpleNamespace(forbid_tracing=nullcontext)
    monkeypatch.setattr(take.lowering, "backend", lambda target: backend)
    monkeypatch.setattr(take.distributed, "count", lambda: processes)
    program: Any = SimpleNamespace(target=None)
    run: Any = SimpleNamespace(directory="run")
    cache: Any = None
    with pytest.raises(_Restored) as restored:
        take.take_dump(program, run, cache, Path("dump"), steps=1, start=None, compile_hint="")
    assert restored.value.args == (step,)
