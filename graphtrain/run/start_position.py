"""Position at which a run begins: a checkpoint or step 0, and what is still to do there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from graphtrain.run.agreement import check_same_data, on_all_ranks
from graphtrain.run.checkpoint_places import (
    fetch_instead,
    open_uploads,
    prepare_checkpoints,
    shares_directory,
)
from graphtrain.run.goodput import activities
from graphtrain.run.owed import are_scores_owed, is_evaluation_owed
from graphtrain.run.resume import Resumption, identity_of
from graphtrain.run.surroundings import RunRequest, Surroundings
from graphtrain.run.validation_history import ValidationHistory, recorded_history

if TYPE_CHECKING:
    from graphtrain.run.host_disks import HostDisks
    from graphtrain.run.uploads import Uploads


@dataclass(frozen=True)
class StartPosition:
    """The checkpoints of a run, and what an earlier start left to do."""

    identity: Callable[[int], dict[str, Any]]  # what the run computes now, in the phase of a step
    resumption: Resumption
    disks: HostDisks | None  # of the hosts, if run.checkpoints.local is one
    uploads: Uploads | None
    history: ValidationHistory
    is_saved: bool  # there is a checkpoint
    is_stalled: bool  # the validation loss has not fallen for run.early_stopping_patience
    evaluation_owed: bool
    scores_owed: bool

    @property
    def step(self) -> int:
        """Step from which the run goes on; an earlier one after damaged checkpoints were found."""
        return self.resumption.start

    @property
    def is_shared(self) -> bool:
        """Return whether all hosts see the same directory of the run."""
        return shares_directory(self.disks)

    def is_complete(self, steps: int) -> bool:
        """Return whether nothing is left to do of a run of so many steps."""
        is_owed = self.evaluation_owed or self.scores_owed
        return (self.step >= steps or self.is_stalled) and not is_owed


def find_position(request: RunRequest, around: Surroundings, *, fresh: bool) -> StartPosition:
    """Find the checkpoint from which a run goes on; download it if only the store has it.

    Called on every rank.

    Raises:
        TrainingError: a place of checkpoints cannot be used, all are damaged or of another run, or
            the hosts have different data.
    """
    run, changes, timeline = request.run, request.allowed_changes, around.timeline
    identity = partial(identity_of, request.config)
    check_same_data(on_all_ranks(identity))  # which reads descriptions of datasets
    timeline.move(activities.RESTORE)
    disks = prepare_checkpoints(
        run, identity, changes, around.watchdog, around.log, around.stack, fresh=fresh
    )
    timeline.move(activities.PREPARE)
    uploads = open_uploads(run, around.log, disks)
    if uploads is not None:
        around.observers.insert(1, uploads)
        around.stack.callback(uploads.close)
    resumption = Resumption(
        request.directory,
        identity,
        changes,
        fresh=fresh,
        fetch=fetch_instead(run, disks, identity, changes, around.watchdog),
        peer_steps=disks.steps if disks else None,
        is_shared=shares_directory(disks),
    )
    is_saved = bool(resumption.steps)
    history = recorded_history(request.directory, resumption.start)
    return StartPosition(
        identity,
        resumption,
        disks,
        uploads,
        history,
        is_saved,
        history.has_stalled(run.early_stopping_patience),
        evaluation_owed=is_saved and is_evaluation_owed(run, resumption.start),
        scores_owed=is_saved and are_scores_owed(run, resumption.start),
    )
