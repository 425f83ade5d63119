"""Time to restore a checkpoint, with its digests verified and without.

    python tests/benchmarks/restore.py [--megabytes 558] [--pairs 7] [--directory DIR]

Restores float32 arrays like those of a run onto one CPU device, from files in the page cache.
Pairs are interleaved, and of both kinds the medians are printed: by the clock, and of the processor
time of all threads, which work of others on the machine hardly changes. "digests alone" is
`verify_files` without a restore beside it.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

os.environ.setdefault("JAX_PLATFORMS", "cpu")
_ARRAYS = 36  # weights and two moments of 12 arrays


def timed(action: Callable[[], object]) -> tuple[float, float]:
    """Return seconds by the clock, and of the processor."""
    clock, processor = time.perf_counter(), time.process_time()
    action()
    return time.perf_counter() - clock, time.process_time() - processor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=float, default=558)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()))
    arguments = parser.parse_args()

    import jax
    import numpy as np

    from graphtrain.checkpoints import checkpoint
    from graphtrain.checkpoints.manifest import verify_files
    from graphtrain.checkpoints.steps import Retention

    side = int((arguments.megabytes * 1e6 / 4 / _ARRAYS) ** 0.5)
    random = np.random.default_rng(0)
    state = {
        f"array{number}": jax.device_put(random.standard_normal((side, side), np.float32))
        for number in range(_ARRAYS)
    }
    sharding = state["array0"].sharding
    described = {
        name: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)
        for name, array in state.items()
    }
    with tempfile.TemporaryDirectory(dir=arguments.directory) as place:
        checkpoints = checkpoint.Checkpoints(Path(place) / "checkpoints", Retention(1))
        checkpoints.save(1, state, {"step": 1})
        checkpoints.wait()
        path = Path(place) / "checkpoints" / "1"

        def restore() -> None:
            jax.block_until_ready(checkpoints.restore(1, described).state)

        def restore_unverified() -> None:
            with mock.patch.object(
                checkpoint, "verified_while_reading", lambda path, **_: nullcontext()
            ):
                restore()

        kinds = {"without": restore_unverified, "with digests": restore}
        kinds["digests alone"] = lambda: verify_files(path)
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in kinds}
        for _ in range(arguments.pairs + 1):  # the first round warms up
            for name, action in kinds.items():
                times[name].append(timed(action))
        checkpoints.close()
    medians = {
        name: [statistics.median(column) for column in zip(*rounds[1:], strict=True)]
        for name, rounds in times.items()
    }
    for name, (clock, processor) in medians.items():
        print(f"{name:<14}{clock:>7.2f} s by the clock {processor:>7.2f} s of the processor")
    ratios = [
        one[0] / other[0]
        for one, other in zip(times["with digests"][1:], times["without"][1:], strict=True)
    ]
    print(
        f"with over without, by the clock: median {statistics.median(ratios):.2f}, "
        f"{min(ratios):.2f} to {max(ratios):.2f}"
    )


if __name__ == "__main__":
    main()
