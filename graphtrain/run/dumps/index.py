"""Index of a dump: what its steps have in common, of the records of their programs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from graphtrain.config.resolve import ResolvedProgram
from graphtrain.config.schema import Config, Run
from graphtrain.errors import DumpError
from graphtrain.graphs.names import DUMP
from graphtrain.run.dumps.files import ArrayEntry, DumpIndex, StepEntry
from graphtrain.run.resume import identity_of
from lowering.machine.toolchain import Toolchain


def make_index(
    program: ResolvedProgram,
    run: Run,
    record: Mapping[str, Any],
    arrays: Mapping[str, np.ndarray],
    program_digest: str,
    steps: list[StepEntry],
) -> DumpIndex:
    """Return the index of a dump by compiled programs.

    Args:
        program: program of the run.
        run: settings of the run.
        record: record of the program of the first step.
        arrays: arrays of the first step.
        program_digest: digest of the request key of the program.
        steps: the steps.
    """
    facts = {fact["name"]: fact for fact in record[DUMP]["arrays"]}
    entries = []
    for name, array in arrays.items():
        fact = facts.get(name)
        dtype = array.dtype.name if fact is None else fact["dtype"]
        shape = list(array.shape) if fact is None else fact["shape"]
        entries.append(ArrayEntry(name, shape, dtype, fact["lines"] if fact else []))
    toolchain = Toolchain.current(program.target.platform)
    config = Config(program=program.run_settings, run=run)
    return DumpIndex(
        target=str(program.target),
        mesh={axis: size for axis, size in program.mesh.axes.items() if size > 1},
        dtype=program.model.dtype,
        summary=record[DUMP]["summary"],
        program=program_digest,
        identity=identity_of(config, steps[0]["step"]),
        versions=dict(toolchain.versions),
        arrays=entries,
        steps=steps,
    )


def changed_shapes(
    first: Mapping[str, Any], record: Mapping[str, Any], step: int
) -> dict[str, list[int]]:
    """Return the shapes that differ from those of the first step, because of another phase.

    Args:
        first: record of the program of the first step.
        record: record of the program of this step.
        step: number of the step, from 1.

    Raises:
        DumpError: the two programs have different arrays.
    """
    before, now = (
        {fact["name"]: fact["shape"] for fact in one[DUMP]["arrays"]} for one in (first, record)
    )
    if unlike := sorted(before.keys() ^ now.keys()):
        raise DumpError(
            f"step {step} is of another phase, which {'lacks' if unlike[0] in before else 'has'} "
            f"{unlike[0]}; leave it out with --arrays, or dump the steps of one phase"
        )
    return {name: shape for name, shape in now.items() if shape != before[name]}
