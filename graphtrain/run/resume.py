"""Resumption: the newest sound checkpoint of a run, if it is a checkpoint of the same run."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphtrain.checkpoints.checkpoint import Checkpoints, RestoredState
from graphtrain.checkpoints.info import CheckpointInfo, read_checkpoint_info
from graphtrain.checkpoints.manifest import DamagedCheckpoint, verify_files
from graphtrain.checkpoints.steps import saved_steps
from graphtrain.checkpoints.verified_reading import first_damage
from graphtrain.config.identity import STEPS, identity_changes, mathematics, say
from graphtrain.config.schema import Config, Data, Run
from graphtrain.data.indexed.dataset import dataset_paths
from graphtrain.data.indexed.description import read_description
from graphtrain.errors import DataError, TrainingError
from graphtrain.files import missing_dataset_file
from graphtrain.run.agreement import check_same_checkpoints, on_all_ranks, steps_on_all_ranks
from graphtrain.run.data_sources import source_identity
from graphtrain.run.learning_rate import learning_rate
from graphtrain.run.trained_tokenizer import tokenizer_digests
from lowering.trees import Tree
from lowering.xla import distributed

if TYPE_CHECKING:
    from graphtrain.checkpoints.peer_steps import PeerStep, PeerSteps


class UnknownChange(TrainingError):
    """A change that is allowed is of nothing that a checkpoint records."""


def identity_of(config: Config, step: int = 0) -> dict[str, Any]:
    """Return what a run computes, as JSON: settings by name, digests of its data and tokenizers.

    With phases, settings of the batch and the model are those of the phase of a step.

    Raises:
        DataError: a dataset is absent, or its description is damaged.
    """
    data = config.run.data.local
    train = data.train
    is_single = isinstance(train, str)
    prefixes = data.train_datasets
    parts = [{}] if is_single else [{"weight": p.weight, "epochs": p.epochs} for p in train]
    return {
        **mathematics(config, step),
        "run.data.train": [
            _dataset_identity(data, prefix) | part
            for prefix, part in zip(prefixes, parts, strict=True)
        ],
        "tokenizer": tokenizer_digests(prefixes),
        STEPS: config.run.steps,
    }


def _dataset_identity(data: Data, dataset: str) -> dict[str, Any]:
    if any(code.reference == dataset for code in data.user_code):
        return source_identity(data, dataset)
    return {"digest": _dataset_digest(dataset)}


def _dataset_digest(prefix: str) -> str | None:
    """Return a digest of the digests in a dataset's description; without one, its sizes."""
    description = read_description(prefix)
    if description is None or description.digests is None:
        paths = dataset_paths(prefix)
        if absent := [path for path in paths if not path.is_file()]:
            raise DataError(missing_dataset_file(prefix, absent[0].suffix))
        sizes = [path.stat().st_size for path in paths]
        return f"{sizes[0]} + {sizes[1]} bytes"
    conversations = description.conversations
    digests = [description.digests, conversations and conversations.digests]
    if description.images is not None:
        digests.append(description.images.digests)
    return hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()[:16]


@dataclass
class Resumption:
    """The checkpoints from which a run can resume, none of them read yet.

    Args:
        directory: Directory of the run.
        identity: Returns what the run computes now, in the phase of a step.
        allowed: Names whose values may differ from those of the checkpoint.
        fresh: Whether to start at step 0 in any case.
        fetch: Called on every rank with two steps: downloads the newest checkpoint after the first
            one and up to the second one, which is damaged; returns its step, or None.
        peer_steps: Steps on disks of the hosts; None if there are none.
        is_shared: Whether all ranks see the same directory.
    """

    directory: Path
    identity: Callable[[int], Mapping[str, Any]]
    allowed: Sequence[str] = ()
    fresh: bool = False
    fetch: Callable[[int, int], int | None] = lambda low, high: None
    peer_steps: PeerSteps | None = None
    is_shared: bool = True
    steps: list[int] = field(init=False)  # candidates, oldest first
    _damaged: list[DamagedCheckpoint] = field(default_factory=list)
    _fetched: set[int] = field(default_factory=set)  # steps

    def __post_init__(self) -> None:
        """Find the newest checkpoint whose metadata is sound, and check that it is of this run.

        Raises:
            TrainingError: every checkpoint is damaged, or the newest is of another run.
        """
        self.steps = [] if self.fresh else saved_steps(self.directory / "checkpoints")
        others: dict[int, int] = {}
        if self.is_shared:
            check_same_checkpoints(str(self.directory), self.steps)
        else:
            self.steps, others = steps_on_all_ranks(self.steps)
        if self.peer_steps is not None and not self.fresh:
            for step in self.steps:
                self._use_whole(step)
            self.steps = sorted({*self.steps, *self.peer_steps.found})
            _check_lost(self.peer_steps.lost, self.start)
            _check_seen_by_all(self.directory, others, self.start)
        self._find_newest()

    @property
    def start(self) -> int:
        """Step of the checkpoint from which the run resumes; 0 for a new run."""
        return self.steps[-1] if self.steps else 0

    def restore(self, checkpoints: Checkpoints, described: Tree) -> RestoredState:
        """Load the newest sound checkpoint, and quarantine the damaged ones after it.

        Raises:
            TrainingError: every checkpoint is damaged, or one is of another program.
        """
        while True:
            try:
                restored = checkpoints.restore(self.start, described)
                break
            except DamagedCheckpoint as damaged:
                self._use_whole(self.start)
                if not self._replace(checkpoints):
                    self._skip(damaged)
                self._find_newest()
        for damaged in self._damaged:
            destination = checkpoints.quarantine(damaged)
            if distributed.rank() == 0:
                warnings.warn(
                    f"{damaged.checkpoint_path} is damaged: {damaged.reason}; moved it to "
                    f"{destination}, resuming from step {self.start}",
                    stacklevel=1,
                )
        return restored

    @property
    def info(self) -> CheckpointInfo:
        """Metadata of the checkpoint from which the run resumes."""
        if (found := self._on_hosts(self.start)) is not None:
            return found.info
        return read_checkpoint_info(self.directory / "checkpoints", self.start)

    def changes(self) -> list[dict[str, Any]]:
        """Return the permitted changes, of this resumption and of those before it."""
        if not self.steps:
            return []
        info = self.info
        return info.changes + [
            {"step": self.start, "name": name, "from": saved, "to": value}
            for name, (saved, value) in identity_changes(
                info.identity, self.identity(self.start)
            ).items()
        ]

    def _find_newest(self) -> None:
        """Drop checkpoints whose metadata is damaged; check the settings of the newest other.

        Called on every rank; what is damaged on one is dropped on all.
        """
        while self.steps:
            own = on_all_ranks(self._newest_damage)
            if (damaged := first_damage(own, is_shared=self.is_shared)) is None:
                on_all_ranks(self._check_newest)
                return
            self._skip(damaged)

    def _newest_damage(self) -> DamagedCheckpoint | None:
        """Return what is wrong with the metadata of the newest checkpoint; None if it is sound."""
        try:
            if self._on_hosts(self.start) is None:
                verify_files(self.directory / "checkpoints" / str(self.start), only="about/")
                _ = self.info  # which may be a copy of another step
        except DamagedCheckpoint as damaged:
            return damaged
        return None

    def _check_newest(self) -> None:
        path = self.directory / "checkpoints" / str(self.start)
        check_identity(path, self.info, self.identity(self.start), self.allowed)

    def _replace(self, checkpoints: Checkpoints) -> bool:
        """Fetch the newest copy after the last sound checkpoint; return whether it is of this step.

        What was fetched, and is found damaged, is not fetched again.
        """
        high = self.start
        if high in self._fetched or (step := self.fetch(self._sound_before(), high)) is None:
            return False
        self._fetched.add(step)
        checkpoints.reread()
        self.steps = [one for one in self.steps if one < step]
        self.steps += [step] if step == high else [step, high]
        return step == high

    def _sound_before(self) -> int:
        """Return the last step before this one whose metadata is sound; 0 if there is none."""
        for step in reversed(self.steps[:-1]):
            if self._on_hosts(step) is not None:
                return step
            with suppress(DamagedCheckpoint):
                verify_files(self.directory / "checkpoints" / str(step), only="about/")
                return step
        return 0

    def _on_hosts(self, step: int) -> PeerStep | None:
        """Return a step that is restored from the disks of the hosts; None if it is whole."""
        return None if self.peer_steps is None else self.peer_steps.found.get(step)

    def _use_whole(self, step: int) -> None:
        """Do not restore a step from the disks of the hosts."""
        if self.peer_steps is not None:
            self.peer_steps.found.pop(step, None)

    def _skip(self, damaged: DamagedCheckpoint) -> None:
        """Continue with the checkpoint before a damaged one.

        Raises:
            TrainingError: there is none; the files stay where they are, so that a run is never
                silently started anew.
        """
        self._damaged.append(damaged)
        self.steps.pop()
        if not self.steps:
            reasons = "; ".join(
                f"{one.checkpoint_path.name}: {one.reason}" for one in self._damaged
            )
            raise TrainingError(
                f"{self.directory}/checkpoints contains no sound checkpoint ({reasons}); restore "
                "one from a copy, or set run.directory to a new directory to start again"
            )


def _check_lost(lost: Mapping[int, Sequence[int]], start: int) -> None:
    """Report the steps after `start` of which hosts have lost their parts.

    Raises:
        TrainingError: there is no other checkpoint, so that the run would silently start anew.
    """
    if not (after := [step for step in lost if step > start]):
        return
    step = max(after)
    what = (
        f"step {step} on the disks of the hosts (run.checkpoints.local) is not whole: "
        f"{distributed.names(lost[step]) or 'a host'} has lost its part"
    )
    if not start:
        raise TrainingError(
            f"{what}, and there is no other checkpoint; to start at step 0, remove the parts of "
            "the other hosts; run.checkpoints.copies = 1 and remote_every make up for a lost disk"
        )
    if distributed.rank() == 0:
        warnings.warn(f"{what}; resuming from step {start}", stacklevel=1)


def _check_seen_by_all(directory: Path, others: Mapping[int, int], start: int) -> None:
    """Check that no rank has a later checkpoint in its directory of the run than all can resume.

    Args:
        directory: Directory of the run, which the hosts do not share.
        others: Checkpoints that only some ranks have, each with one that has it.
        start: Step from which the run would resume.

    Raises:
        TrainingError: one has; the run would silently start before that step.
    """
    if (step := max(others, default=0)) > start:
        raise TrainingError(
            f"only {distributed.names([others[step]])} has the checkpoint of step {step} in "
            f"{directory}, which the hosts do not share; copy it into run.checkpoints.remote with "
            f"graphtrain checkpoints push, or move it away to resume from step {start}"
        )


def check_identity(
    path: Path | str, info: CheckpointInfo, identity: Mapping[str, Any], allowed: Sequence[str]
) -> None:
    """Check that a checkpoint is of the same run, except for permitted changes.

    Raises:
        TrainingError: a setting or the data differs; names each with both values.
    """
    changed = identity_changes(info.identity, identity)
    if unknown := [name for name in allowed if name not in info.identity | dict(identity)]:
        raise UnknownChange(
            f"--allow-change {unknown[0]}: no such setting in {path}; the names are those in "
            "the error message of a refused change"
        )
    if refused := {name: both for name, both in changed.items() if name not in allowed}:
        listed = "; ".join(
            f"{name} was {say(saved)} and is {say(value)}"
            for name, (saved, value) in refused.items()
        )
        raise TrainingError(
            f"{path} was saved by another program or with other data: {listed}; change it "
            "back, set run.directory to a new directory, or permit it with "
            + " ".join(f"--allow-change {name}" for name in refused)
        )


def data_changed(changes: Sequence[Mapping[str, Any]], start: int) -> bool:
    """Return whether a change permitted at step `start` makes the order of the data another one.

    Another batch size or sequence length does not: the data continues where it stopped.
    """
    names = ("run.data.", "tokenizer", "run.seed")
    return any(change["step"] == start and change["name"].startswith(names) for change in changes)


def batch_changed(changes: Sequence[Mapping[str, Any]], start: int) -> bool:
    """Return whether a change permitted at step `start` is of batch size or sequence length."""
    names = ("program.batch.global_batch_size", "program.batch.seq_len")
    return any(change["step"] == start and change["name"] in names for change in changes)


def schedule_note(run: Run, saved_identity: Mapping[str, Any], start: int) -> str | None:
    """Say how another number of steps changes the learning rate from here on; None if it does not.

    Args:
        run: Settings of the run.
        saved_identity: Identity in the checkpoint.
        start: Step of the checkpoint.
    """
    steps = saved_identity.get(STEPS)
    if steps in (None, run.steps) or not 0 < start < run.steps:
        return None
    last = learning_rate(run.learning_rate, steps, start - 1)
    # The earlier schedule has no rate for steps beyond its end.
    planned = learning_rate(run.learning_rate, steps, start) if start < steps else last
    rate = learning_rate(run.learning_rate, run.steps, start)
    if rate == planned:
        return None
    return (
        f"run.steps was {steps} and is {run.steps}: the {run.learning_rate.schedule} schedule of "
        f"the learning rate now ends at step {run.steps}; it was {last:.3e} at step {start} "
        f"and is {rate:.3e} at step {start + 1}"
    )
