"""Identity of a model that is evaluated: its weights and its programs."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any

from graphtrain.checkpoints.checkpoint import saved_steps
from graphtrain.compile.request_keys import request_keys
from graphtrain.config.resolve import ResolvedProgram
from graphtrain.config.schema import Run
from graphtrain.files import content_digest, json_digest
from graphtrain.graphs.names import graphs_for

_RECORDS = ("manifest.json", "weights.json")  # digests of the files of a folder


def model_identity(
    program: ResolvedProgram, run: Run, step: int | None, tokenizer: str
) -> dict[str, Any]:
    """Return what the answers of a model depend on, as JSON; equal ones give equal answers.

    Args:
        program: The program that was trained.
        run: The run.
        step: Step of the checkpoint; None for the last, or for run.init_from if there is none.
        tokenizer: Digest of the tokenizer.
    """
    checkpoints = Path(run.directory) / "checkpoints"
    steps = saved_steps(checkpoints)
    step = steps[-1] if step is None and steps else step
    folder = Path(run.init_from or run.directory) if step is None else checkpoints / str(step)
    served, names = graphs_for(program, "evaluate")
    keys = request_keys(served, names)
    weights = _digest_of_folder(folder)
    if step is not None and run.init_from is not None and program.adapter is not None:
        weights = json_digest([weights, _digest_of_folder(Path(run.init_from))])
    return {
        "run": str(Path(run.directory).resolve()),
        "step": step or 0,
        "weights": weights,
        "programs": {name: keys[name].digest for name in names},
        "tokenizer": tokenizer,
        "version": version("graphtrain"),
    }


def identity_digest(identity: dict[str, Any]) -> str:
    """Return the digest of a model, which does not depend on where the run is."""
    return json_digest({name: value for name, value in identity.items() if name != "run"})[:32]


def _digest_of_folder(folder: Path) -> str:
    """Return the digest of weights: that of their record, else of all files themselves."""
    for name in _RECORDS:
        if (folder / name).is_file():
            return content_digest(folder / name)
    files = sorted(path for path in folder.glob("*") if path.is_file())
    return json_digest({path.name: content_digest(path) for path in files})
