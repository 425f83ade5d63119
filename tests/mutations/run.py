"""Change one number of the training mathematics at a time, and require that the tests fail.

    python tests/mutations/run.py [NAME ...]

Works on a copy of the repository. A mutant that survives its tests is a gap in the suite; the
status is then 1. Each mutant takes as long as its tests, so this is in no tier.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Mutant:
    """One change of a source file, and the tests of which at least one must fail."""

    file: str
    old: str  # occurs once in the file
    new: str
    tests: tuple[str, ...]


MUTANTS = {
    "rate one step late": Mutant(
        "graphtrain/run/loop.py",
        "learning_rate(run.learning_rate, run.steps, index)",
        "learning_rate(run.learning_rate, run.steps, index - 1)",
        ("tests/run/test_road.py::test_each_step_has_the_rate_of_the_schedule",),
    ),
    "z-loss twice as large": Mutant(
        "graphtrain/graphs/token_loss.py",
        "value + loss.z_loss * squares",
        "value + 2 * loss.z_loss * squares",
        ("tests/graphs/test_training.py::test_steps_equal_optax_adamw",),
    ),
    "z-loss of chunks twice as large": Mutant(
        "graphtrain/models/chunk_losses.py",
        "weights * (1 + 2 * scored.z_loss * log_z)",
        "weights * (1 + 4 * scored.z_loss * log_z)",
        ("tests/graphs/test_chunked.py",),
    ),
    "balance loss twice as large": Mutant(
        "graphtrain/models/routing.py",
        'mixture.balance_loss * means["balance_loss"]',
        '2 * mixture.balance_loss * means["balance_loss"]',
        ("tests/graphs/test_mixture.py",),
    ),
    "clip at twice the norm": Mutant(
        "graphtrain/graphs/optimizer.py",
        "factor = limit / jnp.maximum(optax.tree.norm(updates), limit)",
        "factor = 2 * limit / jnp.maximum(optax.tree.norm(updates), 2 * limit)",
        ("tests/unit/test_optimizer.py", "tests/graphs/test_training.py"),
    ),
    "decay of norms": Mutant(
        "graphtrain/graphs/optimizer.py",
        "and len(axes) > 1",
        "and len(axes) > 0",
        ("tests/unit/test_optimizer.py", "tests/graphs/test_training.py"),
    ),
    "rotary angles": Mutant(
        "graphtrain/models/attention/rope_scaling.py",
        "-jnp.arange(half, dtype=jnp.float32) / half",
        "-jnp.arange(half, dtype=jnp.float32) / (half + 1)",
        ("tests/extras/weights/test_rope.py",),
    ),
    "loss mask one position late": Mutant(
        "graphtrain/data/batches/document_packing.py",
        "self._learned.mask(document, len(tokens))[1:]",
        "self._learned.mask(document, len(tokens))[:-1]",
        ("tests/unit/data",),
    ),
    "the same order in every epoch": Mutant(
        "graphtrain/data/batches/concat_packing.py",
        "permutation(count, self._seed, epoch_index)",
        "permutation(count, self._seed, 0)",
        ("tests/unit/data",),
    ),
    "evaluation counts every target": Mutant(
        "graphtrain/graphs/build.py",
        "return token_losses(program, combined, batch)[0][1], weights.sum()",
        "return token_losses(program, combined, batch)[0][1], weights.size * 1.0",
        ("tests/graphs/test_training.py::test_masked_targets_do_not_count",),
    ),
    "LoRA scale twice as large": Mutant(
        "graphtrain/models/lora/layers.py",
        "low_rank, adapted.b) * adapted.scale",
        "low_rank, adapted.b) * (2 * adapted.scale)",
        ("tests/extras/weights/test_peft.py", "tests/graphs/test_adapters.py"),
    ),
}


def main() -> int:
    """Run the mutants; print which are killed and which survive."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="mutants to run; all by default")
    names = parser.parse_args().names or list(MUTANTS)
    survivors = []
    for name in names:
        killed_by = kill(MUTANTS[name])
        print(f"{name}: {f'killed by {killed_by}' if killed_by else 'SURVIVES'}", flush=True)
        survivors += [] if killed_by else [name]
    return 1 if survivors else 0


def kill(mutant: Mutant) -> str | None:
    """Return the first test that fails with the mutant; None if all pass."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        ignored = shutil.ignore_patterns(".git", "cache", "*cache__", ".*_cache", ".hypothesis")
        shutil.copytree(ROOT, copy, ignore=_outside_packages(ignored))
        path = copy / mutant.file
        source = path.read_text()
        if source.count(mutant.old) != 1:
            raise SystemExit(
                f"{mutant.file}: {mutant.old!r} occurs {source.count(mutant.old)} times"
            )
        path.write_text(source.replace(mutant.old, mutant.new))
        run = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *mutant.tests],
            cwd=copy,
            env=os.environ | {"PYTHONPATH": str(copy)},
            capture_output=True,
            text=True,
        )
    if run.returncode not in (0, 1):  # not an outcome of the tests
        raise SystemExit(run.stdout[-2000:] + run.stderr[-2000:])
    failed = [line for line in run.stdout.splitlines() if line.startswith("FAILED ")]
    return failed[0].split()[1] if failed else None


def _outside_packages(ignore):
    """Apply an ignore function of shutil.copytree at the top of the repository only."""
    return lambda folder, names: ignore(folder, names) if Path(folder) == ROOT else set()


if __name__ == "__main__":
    sys.exit(main())
