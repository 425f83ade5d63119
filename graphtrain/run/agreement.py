"""Agreement of all ranks before a run starts: a failure on one rank ends all of them.

Uses JAX's distributed service, before the first collective of the run. Without this, the other
ranks would wait for a rank that has failed.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from graphtrain.cache.key import CacheKey
from graphtrain.checkpoints.output_directory import write_errors
from graphtrain.errors import MissingProgram, TrainingError
from graphtrain.files import json_digest
from graphtrain.run.programs import LoadedPrograms
from lowering.errors import PeerLost, RankFailed
from lowering.xla import distributed, lost_ranks
from sharding_rules.errors import UserError

T = TypeVar("T")
_LONG_ACTION_SECONDS = 10.0  # after which the ranks agree that rank 0 still works


def on_all_ranks(action: Callable[[], T]) -> T:
    """Run `action` on every rank. If any rank raises a user error, every rank raises one.

    Raises:
        MissingProgram, TrainingError: another rank failed; the message names it. An error of
            this rank is raised unchanged.
        PeerLost: a rank is lost; the watchdog reports it to the others, which may wait for it.
    """
    if distributed.count() == 1:
        return action()
    result, failed = None, None
    try:
        result = action()
    except UserError as error:
        if isinstance(error, PeerLost) and lost_ranks.is_watched.is_set():
            raise
        failed = error
    error_texts = distributed.all_gather_text(
        f"{type(failed).__name__}: {failed}" if failed else ""
    )
    if failed is not None:
        if isinstance(failed, RankFailed):
            failed.others_are_there = True
        raise failed
    for rank, error_text in enumerate(error_texts):
        if error_text:
            kind, _, message = error_text.partition(": ")
            error = MissingProgram if kind == "MissingProgram" else TrainingError
            raise error(f"{distributed.names([rank])}: {message}")
    return result  # pyright: ignore[reportReturnType]


def on_rank_zero(action: Callable[[], None], wait: Callable[[], None]) -> None:
    """Run a long `action` on rank 0 while the others wait. If it raises a user error, all do.

    Args:
        action: what rank 0 does.
        wait: called on every rank now and then meanwhile.

    Raises:
        TrainingError: it failed on rank 0; there, its own error.
    """
    _run_long(action if distributed.rank() == 0 else None, wait)


def on_all_ranks_long(action: Callable[[], None], wait: Callable[[], None]) -> None:
    """Run a long `action` on every rank, as `on_all_ranks`.

    Args:
        action: what each rank does.
        wait: called on every rank now and then meanwhile.

    Raises:
        TrainingError: another rank failed; an error of this rank is raised unchanged.
    """
    _run_long(action, wait)


def _run_long(action: Callable[[], None] | None, wait: Callable[[], None]) -> None:
    """Run a long action on the ranks that have one, while all agree now and then."""
    if distributed.count() == 1:
        if action is not None:
            action()
        return
    with ThreadPoolExecutor(1) as pool:
        started = pool.submit(action) if action is not None else None
        while True:
            if started is not None:
                futures.wait([started], timeout=_LONG_ACTION_SECONDS)
            is_over = started is None or started.done()
            if all(distributed.all_gather_text("over" if is_over else "")):
                break
            wait()
    on_all_ranks(lambda: started.result() if started is not None else None)


def check_shared_directory(setting: str, directory: Path, wait_seconds: float = 10.0) -> None:
    """Check that all ranks see the directory of the checkpoints that rank 0 sees.

    Otherwise each would save its shards for itself, and no checkpoint would be complete.

    Args:
        setting: Setting that names the directory, for the message.
        directory: The directory, which exists on rank 0.
        wait_seconds: For a new file to be seen on another host.

    Raises:
        TrainingError: a rank sees another one.
    """
    if distributed.count() == 1:
        return
    probe = directory / f".shared-{secrets.token_hex(8)}"
    if distributed.rank() == 0:
        with suppress(OSError):  # then no rank sees it
            probe.touch()
    name = distributed.all_gather_text(probe.name)[0]
    deadline = time.monotonic() + wait_seconds
    while not (is_seen := (directory / name).exists()) and time.monotonic() < deadline:
        time.sleep(0.1)
    seen_by = distributed.all_gather_text("seen" if is_seen else "")
    with suppress(OSError):
        if distributed.rank() == 0:
            probe.unlink()
    if blind := [rank for rank, seen in enumerate(seen_by) if not seen]:
        raise TrainingError(
            f"{distributed.names(blind)} does not see the files of {distributed.names([0])} in "
            f"{directory}; {setting} must be on a file system that all hosts share. Disks of the "
            "hosts themselves are for run.checkpoints.local"
        )


def is_shared_directory(
    setting: str, directory: Path, wait_seconds: float = 10.0, alone_seconds: float = 1.0
) -> bool:
    """Return whether all ranks see the same directory; False if each has one of its own.

    Args:
        setting: Setting that names the directory, for the message.
        directory: The directory, which exists on every rank.
        wait_seconds: For a new file to be seen on the other hosts.
        alone_seconds: The same, while no file of another rank is seen.

    Raises:
        TrainingError: some share it and others do not, or a rank cannot write to it.
    """
    if distributed.count() == 1:
        return True
    probe = directory / f".shared-{distributed.rank()}-{secrets.token_hex(8)}"
    on_all_ranks(partial(_touch, probe))
    names, own = distributed.all_gather_text(probe.name), distributed.rank()
    started = time.monotonic()
    while True:
        seen = [rank for rank, name in enumerate(names) if (directory / name).exists()]
        limit = alone_seconds if seen == [own] else wait_seconds
        if len(seen) == len(names) or time.monotonic() > started + limit:
            break
        time.sleep(0.1)
    seen_by = [json.loads(word) for word in distributed.all_gather_text(json.dumps(seen))]
    with suppress(OSError):
        probe.unlink()
    if all(seen == [rank] for rank, seen in enumerate(seen_by)):
        return False
    if odd := [rank for rank, seen in enumerate(seen_by) if len(seen) < len(names)]:
        raise TrainingError(
            f"{distributed.names(odd)} shares {directory} with {distributed.names(seen_by[odd[0]])}"
            f" only; {setting} must be on a file system that all hosts share, or on a disk of each"
        )
    return True


def _touch(path: Path) -> None:
    with write_errors(path.parent):
        path.touch()


def check_same_checkpoints(directory: str, steps: list[int]) -> None:
    """Check that all ranks see the same checkpoints.

    Raises:
        TrainingError: they do not; the run directory is not shared by all hosts.
    """
    steps_by_rank = distributed.all_gather_text(json.dumps(steps))
    for rank, rank_steps in enumerate(steps_by_rank):
        if rank_steps != steps_by_rank[0]:
            raise TrainingError(
                f"{distributed.names([rank])} sees checkpoints {rank_steps} in {directory}, but "
                f"{distributed.names([0])} sees {steps_by_rank[0]}; run.directory must be on a "
                "file system that all hosts share"
            )


def steps_on_all_ranks(steps: Sequence[int]) -> tuple[list[int], dict[int, int]]:
    """Return the steps that every rank has; and those that only some have, each with one that does.

    Args:
        steps: Steps of this rank.
    """
    words = distributed.all_gather_text(json.dumps(list(steps)))
    by_rank = [set(json.loads(word)) for word in words]
    common = set.intersection(*by_rank)
    others = {
        step: rank for rank, found in reversed(list(enumerate(by_rank))) for step in found - common
    }
    return sorted(common), others


def check_same_data(identity: Mapping[str, Any]) -> None:
    """Check that all ranks have the same training data and tokenizers.

    Args:
        identity: What the run computes, with digests of its data.

    Raises:
        TrainingError: they do not, as where a dataset is replaced while the hosts read it.
    """
    word = json_digest([identity["run.data.train"], identity["tokenizer"]])
    words = distributed.all_gather_text(word)
    if others := [rank for rank, word in enumerate(words) if word != words[0]]:
        raise TrainingError(
            f"{distributed.names(others)} has other training data than {distributed.names([0])}: "
            "the digests of the datasets (run.data) or of their tokenizers differ; copy the same "
            "files to all hosts, or start again if a dataset in an object store was replaced"
        )


def check_same_executables(programs: LoadedPrograms) -> None:
    """Check that all ranks found the same executables; different ones would hang or diverge.

    Raises:
        TrainingError: they did not; names the graph, the ranks, and the key part that differs.
    """
    if distributed.count() == 1:
        return
    local_digests = programs.digests()
    digests_by_rank = [
        json.loads(text) for text in distributed.all_gather_text(json.dumps(local_digests))
    ]
    differing = next(
        (
            name
            for name in local_digests
            if len({rank_digests[name] for rank_digests in digests_by_rank}) > 1
        ),
        None,
    )
    if differing is None:
        return
    digests = [rank_digests[differing] for rank_digests in digests_by_rank]
    groups = [
        [r for r, d in enumerate(digests) if d == digest] for digest in dict.fromkeys(digests)
    ]
    ranks = " and ".join(distributed.names(group) for group in groups)
    keys = distributed.all_gather_text(json.dumps(programs.keys[differing].to_json()))
    raise TrainingError(
        f"{ranks} found different executables of {differing}: "
        f"{_difference(keys[groups[0][0]], keys[groups[1][0]])}"
    )


def _difference(first_key: str, second_key: str) -> str:
    differences = CacheKey.from_json(json.loads(first_key)).differences(
        CacheKey.from_json(json.loads(second_key))
    )
    if not differences:
        return (
            "the same key was compiled twice, on hosts that do not share a cache; copy the cache "
            "of one host to all others, or use a shared one"
        )
    first = differences[0]
    return f"{' '.join(first.path)}: {first.current} and {first.stored}; make it equal on all hosts"
