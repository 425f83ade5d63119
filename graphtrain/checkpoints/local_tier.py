"""Directory of the checkpoints of a run on another disk: checkpoints/ of the run is a link to it.

So every command finds them in the directory of the run. When the disk is lost, as a RAM disk is
with its machine, the link leads nowhere until the run starts again.
"""

import os
from pathlib import Path

from graphtrain.checkpoints.output_directory import write_errors
from graphtrain.checkpoints.steps import saved_steps
from graphtrain.errors import TrainingError


def link_local_tier(run_directory: Path, local: str, *, fresh: bool = False) -> None:
    """Create the directory `local` and the link to it, if they do not exist.

    Args:
        run_directory: Directory of the run, which the caller has locked.
        local: Setting run.checkpoints.local.
        fresh: Whether the run starts at step 0 in any case.

    Raises:
        TrainingError: the run has checkpoints elsewhere; or `fresh`, and there are some already.
    """
    link, target = run_directory / "checkpoints", Path(local).absolute()
    if fresh and saved_steps(target):
        raise TrainingError(
            f"{target} has checkpoints, from which a later start would resume; with --fresh, move "
            "them away, or set run.checkpoints.local to another directory"
        )
    if _place(link) != target and (steps := saved_steps(link)):
        raise TrainingError(
            f"run.checkpoints.local is {target}, and the checkpoints of this run (steps "
            f"{', '.join(map(str, steps))}) are in {_place(link)}; move them to {target}, or "
            "change run.checkpoints.local"
        )
    with write_errors(target):
        target.mkdir(parents=True, exist_ok=True)
    with write_errors(run_directory):
        if _place(link) == target:
            return
        if link.is_symlink():
            link.unlink()
        elif link.exists():
            link.rmdir()
        link.symlink_to(target, target_is_directory=True)


def remove_link(run_directory: Path) -> None:
    """Remove the link of a run whose checkpoints were on one disk, and are now on several.

    Raises:
        TrainingError: it leads to checkpoints, which the other hosts cannot see.
    """
    link = run_directory / "checkpoints"
    if not link.is_symlink():
        return
    if steps := saved_steps(link):
        raise TrainingError(
            f"the checkpoints of this run (steps {', '.join(map(str, steps))}) are in "
            f"{_place(link)}, a disk of this host that the others do not share; remove the link "
            f"{link}, and move them there"
        )
    with write_errors(run_directory):
        link.unlink()


def _place(link: Path) -> Path:
    """Return the directory that a link leads to, or that is there without a link."""
    return Path(os.readlink(link)) if link.is_symlink() else link.absolute()
