"""All problems of a configuration for one purpose."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from graphtrain.api.checks.checkpoint import checkpoint_problems, has_checkpoints
from graphtrain.api.checks.code import code_problems
from graphtrain.api.checks.data import data_problems
from graphtrain.api.checks.export import export_problems
from graphtrain.api.checks.fallback import fallback_problems
from graphtrain.api.checks.images import room_problems
from graphtrain.api.checks.machine import (
    compiler_problems,
    model_problems,
    output_problems,
    page_problems,
    place_problems,
    precision_problems,
    run_problems,
    verification_problems,
)
from graphtrain.api.checks.positions import position_problems
from graphtrain.api.checks.problem import Problem
from graphtrain.api.checks.program import program_problems
from graphtrain.api.checks.purpose import CHECK, Purpose
from graphtrain.api.checks.samples import samples_problems
from graphtrain.api.checks.tasks import tasks_problems
from graphtrain.api.checks.trackers import trackers_problems
from graphtrain.api.checks.weights_folder import normalization_problems
from graphtrain.config.schema import Config

_BATCH = ("program", "batch", "global_batch_size")


def problems(
    config: Config,
    purpose: Purpose = CHECK,
    *,
    outputs: Mapping[str, Path | None] | None = None,
    allowed_changes: Sequence[str] = (),
) -> list[Problem]:
    """Return everything that is known to be wrong before anything is traced or compiled.

    Args:
        config: the configuration.
        purpose: what it is going to be used for.
        outputs: files that will be written, by the option that names each.
        allowed_changes: settings that may differ from those of the checkpoint.
    """
    kinds = purpose.kinds
    saved = not purpose.fresh and has_checkpoints(config)
    found = [*program_problems(config.program), *position_problems(config)]
    if purpose.trains_batches:
        found += room_problems(config, saved=saved or purpose.weights_only)
        found += normalization_problems(config, saved=saved)
    found += _outputs({option: path for option, path in (outputs or {}).items() if path})
    trains = purpose.trains_batches and not purpose.weights_only
    if trains and not found:  # fewer hosts would have the same problems
        found += fallback_problems(config)
        found += verification_problems(config)
    found += code_problems(config.program, trains=trains)
    if "machine" in kinds:
        found += model_problems(config.program)
        found += precision_problems(config.program) if trains else []
    if "compiler" in kinds:
        found += compiler_problems(config.program)
    if "missing_data" in kinds and "machine" in kinds:
        found += run_problems(config)
        found += trackers_problems(config)
    if kinds & {"data", "missing_data"}:
        fetch = "missing_data" in kinds
        found += data_problems(config, train=purpose.train, fetch=fetch, saved=saved)
        found += samples_problems(config)
    if "missing_data" in kinds and not purpose.weights_only:  # the run trains, here or later
        found += place_problems(config)
        found += export_problems(config)
        found += tasks_problems(config)
    if "checkpoint" in kinds:
        found += checkpoint_problems(config, allowed_changes, weights_only=purpose.weights_only)
    ignored = set() if purpose.trains_batches else {_BATCH}
    return [one for one in found if one.kind in kinds and ignored.isdisjoint(one.settings)]


def _outputs(paths: Mapping[str, Path]) -> Iterator[Problem]:
    """Yield that files of options cannot be written, or that two options have the same one."""
    options: dict[Path, str] = {}
    for option, path in paths.items():
        if option == "--html":
            yield from page_problems()
        yield from output_problems(option, path)
        other = options.setdefault(path.resolve(), option)
        if other != option:
            message = f"{path} is the file of {other} too; name another file"
            yield Problem("machine", message, location=option)
