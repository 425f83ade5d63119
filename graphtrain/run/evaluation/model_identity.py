"""Identity of a model that is evaluated: its weights and its programs."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any

from graphtrain.checkpoints.manifest import NAME as MANIFEST
from graphtrain.checkpoints.steps import saved_steps
from graphtrain.compile.request_keys import request_keys
from graphtrain.config.resolve import ResolvedProgram
from graphtrain.config.schema import Run
from graphtrain.files import content_digest, json_digest
from graphtrain.graphs.names import graphs_for
from graphtrain.weights.base import NAME as BASE_RECORD
from graphtrain.weights.digests import NAME as WEIGHTS_RECORD


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
    served, names = graphs_for(program, "evaluate")
    keys = request_keys(served, names)
    if step is None:
        weights = weights_digest(Path(run.init_from or run.directory))
    else:
        folder = checkpoints / str(step)
        weights = _digest(folder, [folder / MANIFEST])
    if step is not None and run.init_from is not None and program.adapter is not None:
        weights = json_digest([weights, weights_digest(Path(run.init_from))])
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


def weights_digest(folder: Path) -> str:
    """Return the digest of the weights of a run's last checkpoint, or of a folder.

    Args:
        folder: Directory of a run, converted folder, or folder of Hugging Face.
    """
    return _digest(folder, _recorded(folder))


def _digest(folder: Path, records: list[Path]) -> str:
    """Return the digest of the records that exist, else of all files."""
    files = [file for file in records if file.is_file()]
    files = files or sorted(path for path in folder.rglob("*") if path.is_file())
    return json_digest({str(path.relative_to(folder)): content_digest(path) for path in files})


def _recorded(folder: Path) -> list[Path]:
    """Return the files that have the digests of the others; none in a folder of Hugging Face."""
    if (folder / "model.toml").is_file():
        return [folder / WEIGHTS_RECORD]
    checkpoints = folder / "checkpoints"
    return [checkpoints / str(step) / MANIFEST for step in saved_steps(checkpoints)[-1:]] + [
        folder / BASE_RECORD
    ] * checkpoints.is_dir()
