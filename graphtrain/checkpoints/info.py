"""Metadata of a checkpoint: what it contains, and of which model and run it is."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NotRequired

from typing_extensions import TypedDict

from graphtrain.checkpoints import private_orbax
from graphtrain.checkpoints.manifest import DamagedCheckpoint
from graphtrain.checkpoints.storage_errors import checkpoint_errors
from graphtrain.config.identity import identity_changes, is_of_model, model_mathematics, say
from graphtrain.config.schema import Program
from graphtrain.errors import TrainingError
from graphtrain.files import validate
from sharding_rules.pipeline import LayerRows


@dataclass(frozen=True)
class CheckpointInfo:
    """Metadata of a checkpoint."""

    data_position: dict[str, Any]  # position of the data loader
    arrays: dict[str, list[Any]]  # shape and dtype by path
    rows: LayerRows | None  # layer in each row; None as in LayerOrder, and in old checkpoints
    # Settings that determine the mathematics of the run, and digests of its data, by name.
    identity: dict[str, Any] = field(default_factory=dict)
    changes: list[dict[str, Any]] = field(default_factory=list)  # permitted by --allow-change
    journal: dict[str, Any] | None = None  # size and digest of metrics.jsonl up to this step
    validation_loss: float | None = None  # of this step, if it was evaluated
    spikes: dict[str, Any] | None = None  # losses from which the limits of the next steps follow


# A change of a setting that --allow-change permitted.
_Change = TypedDict("_Change", {"step": int, "name": str, "from": Any, "to": Any})


class _Journal(TypedDict):
    """Position in the journal: return value of `graphtrain.run.metrics.Journal.position`."""

    bytes: int
    sha256: str


class _Spikes(TypedDict):
    """Return value of `graphtrain.run.spikes.SpikeWindow.state`."""

    losses: list[tuple[int, float]]
    consecutive: int


class _Metadata(TypedDict):
    """The item "about" of a checkpoint."""

    loader: dict[str, Any]
    arrays: dict[str, tuple[list[int], str]]
    rows: NotRequired[list[int | None] | None]
    identity: NotRequired[dict[str, Any]]
    changes: NotRequired[list[_Change]]
    journal: NotRequired[_Journal | None]
    validation_loss: NotRequired[float | None]
    spikes: NotRequired[_Spikes | None]


def read_checkpoint_info(directory: Path, step: int) -> CheckpointInfo:
    """Read the metadata of a checkpoint, a small JSON file written by Orbax.

    Raises:
        DamagedCheckpoint: it is a copy of the checkpoint of another step.
        TrainingError: the metadata cannot be read.
    """
    checkpoint_path = directory / str(step)
    with checkpoint_errors(
        checkpoint_path, "read; move it away to resume from an earlier checkpoint"
    ):
        return decode_checkpoint_info(
            private_orbax.read_json_item(checkpoint_path, "about"), checkpoint_path, step
        )


def decode_checkpoint_info(metadata: Any, checkpoint_path: Path, step: int) -> CheckpointInfo:
    """Return the metadata of a checkpoint from the JSON object that it contains.

    Args:
        metadata: The object.
        checkpoint_path: Directory of the checkpoint, for messages.
        step: Step of the checkpoint.

    Raises:
        DamagedCheckpoint: it is a copy of the checkpoint of another step.
        ValueError: the object is damaged.
    """
    validate(_Metadata, metadata)
    if (saved := metadata.get("step", step)) != step:  # earlier versions did not record it
        raise DamagedCheckpoint(
            checkpoint_path, f"it is a copy of step {saved}, under the name of step {step}"
        )
    rows = metadata.get("rows")
    return CheckpointInfo(
        metadata["loader"],
        metadata["arrays"],
        None if rows is None else tuple(rows),
        metadata.get("identity", {}),
        metadata.get("changes", []),
        metadata.get("journal"),
        metadata.get("validation_loss"),
        metadata.get("spikes"),
    )


def check_same_model(checkpoint_path: Path, info: CheckpointInfo, program: Program) -> None:
    """Check that a program computes the model whose weights a checkpoint contains.

    Raises:
        TrainingError: a setting of the model differs; names it with both values.
    """
    model = model_mathematics(program)
    if not model or not info.identity:
        return
    of_training = {name: value for name, value in info.identity.items() if is_of_model(name)}
    changed = identity_changes(of_training, model)
    if changed:
        listed = "; ".join(
            f"{name} was {say(saved)} and is {say(value)}"
            for name, (saved, value) in changed.items()
        )
        raise TrainingError(
            f"{checkpoint_path} contains the weights of another model: {listed}; change it back"
        )
