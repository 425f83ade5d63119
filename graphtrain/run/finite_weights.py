"""Check of the last weights of a run, from which no further step will show a loss."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from graphtrain.errors import TrainingError
from graphtrain.run.agreement import on_all_ranks
from lowering.trees import Tree, flatten


def check_finite_weights(
    parameters: Tree, step: int, good: Callable[[], str], *, has_constants: bool = False
) -> None:
    """Check on every rank that the weights after a step are finite; each shard is read once.

    Args:
        parameters: Weights on the devices.
        step: Number of completed steps, for messages.
        good: Returns where the last good checkpoint is, for messages.
        has_constants: Whether some are not trained, as the masks of an imported model: infinite
            elements are then no error.

    Raises:
        TrainingError: an element is not; names the array.
    """

    def is_wrong(values: np.ndarray) -> np.ndarray:
        return np.isnan(values) if has_constants else ~np.isfinite(values)

    def check() -> None:
        for path, array in flatten(parameters).items():
            if bad := sum(_count(is_wrong, values) for values in _shards(array)):
                raise TrainingError(
                    f"step {step} made weights that are not finite, though its loss was: {bad} "
                    f"elements of {path}; they are not saved; last good checkpoint: {good()}; "
                    "lower run.learning_rate.peak, and check program.optimizer"
                )

    on_all_ranks(check)


def _shards(array: object) -> list[np.ndarray]:
    """Return the shards of this process's devices, without copies of the same one."""
    shards = getattr(array, "addressable_shards", None)
    if shards is None:
        return [np.asarray(array)]
    return [np.asarray(shard.data) for shard in shards if shard.replica_id == 0]


def _count(is_wrong: Callable[[np.ndarray], np.ndarray], values: np.ndarray) -> int:
    if not np.issubdtype(values.dtype, np.floating) and values.dtype.name != "bfloat16":
        return 0
    return int(np.count_nonzero(is_wrong(values)))
