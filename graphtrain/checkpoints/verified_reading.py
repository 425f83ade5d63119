"""Verification of a checkpoint while it is read, by all ranks of a run, which agree on damage."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from graphtrain.checkpoints.manifest import DamagedCheckpoint, verify_files
from lowering.xla import distributed

_EXCHANGE_SECONDS = 10.0  # between exchanges of the ranks while they verify


def _verified_by_all(verify: Callable[..., None], *, is_shared: bool) -> DamagedCheckpoint | None:
    """Verify on every rank; return the damage that one has found, on all of them at once.

    A rank may need long for its files. The watchdog limits the time (run.watchdog.phase_timeout).

    Args:
        verify: Verifies the files of this rank, as `verify_files`.
        is_shared: As of `first_damage`.
    """
    is_wanted = threading.Event()
    is_wanted.set()
    with ThreadPoolExecutor(1) as pool:
        verification = pool.submit(verify, is_wanted=is_wanted.is_set)
        while True:
            done, _ = futures.wait([verification], timeout=_EXCHANGE_SECONDS)
            own = verification.exception() if done else None
            if own is not None and not isinstance(own, DamagedCheckpoint):
                raise own
            if damaged := first_damage(own, is_shared=is_shared):
                is_wanted.clear()
                return damaged
            if all(distributed.all_gather_text("done" if done else "")):
                return None


def first_damage(own: DamagedCheckpoint | None, *, is_shared: bool) -> DamagedCheckpoint | None:
    """Return the damage that the lowest rank has found, if one has. Called on every rank.

    All ranks return the same, so that they agree which checkpoints are not used.

    Args:
        own: What this rank has found.
        is_shared: Whether all ranks see the same directory; otherwise the reason names the rank.
    """
    found = [] if own is None else [str(own.checkpoint_path), own.reason]
    for rank, word in enumerate(distributed.all_gather_text(json.dumps(found))):
        if found := json.loads(word):
            where = "" if is_shared else f"on {distributed.names([rank])}, "
            return DamagedCheckpoint(Path(found[0]), where + found[1])
    return None


@contextmanager
def verified_while_reading(checkpoint_path: Path, *, is_shared: bool = True) -> Iterator[None]:
    """Verify a checkpoint while the block reads it; raise at the end of the block if it is damaged.

    Several processes verify it before the block: all must agree to read it, because reading it
    synchronizes them.

    Args:
        checkpoint_path: Directory of the checkpoint.
        is_shared: Whether all processes see the same directory, so that each verifies a share of
            the files; otherwise each has a copy of its own, and verifies all of it.

    Raises:
        DamagedCheckpoint: a file is not as it was written. What the block returned, or raised
            because of the damage, must not be used.
    """
    count = distributed.count()
    if count > 1:
        part, parts = (distributed.rank(), count) if is_shared else (0, 1)
        verify = partial(verify_files, checkpoint_path, part=part, parts=parts)
        if damaged := _verified_by_all(verify, is_shared=is_shared):
            raise damaged
        yield
        return
    with ThreadPoolExecutor(1) as pool:
        verification = pool.submit(verify_files, checkpoint_path)
        try:
            yield
        except Exception as error:
            if isinstance(damage := verification.exception(), DamagedCheckpoint):
                raise damage from error
            raise
        verification.result()
