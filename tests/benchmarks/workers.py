"""Compile time of a set of graphs with one worker and with one for each core.

Two programs of three graphs each go through `compile_tasks`, as `graphtrain compile` does it, into
an empty cache. Each measurement is a fresh process, so that each pays for
starting its workers; the numbers of workers take turns.

    python tests/benchmarks/workers.py [--rounds 3] [--jobs 1 N] [--json FILE]
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from measuring import ENVIRONMENT, finish, summary

from graphtrain.config.resolve import resolve


def measure(jobs: int) -> None:
    """Compile the set into an empty cache and print the report."""
    from graphtrain.cache import Cache
    from graphtrain.compile.driver import compile_tasks
    from graphtrain.compile.tasks import Limits, tasks_of
    from graphtrain.config.schema import Batch, Mesh, Model, Program

    programs = {
        name: Program(
            target="cpu:8",
            mesh=Mesh(fsdp=4, tensor=2),
            model=Model(layers=8, embed=embed, heads=8, kv_heads=4, mlp=3 * embed, vocab=4096),
            batch=Batch(global_batch_size=8, seq_len=128),
        )
        for name, embed in (("narrow", 256), ("wide", 512))
    }
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:jobs])  # one compilation, one core
    with tempfile.TemporaryDirectory() as store:
        report = compile_tasks(
            tasks_of({name: resolve(one) for name, one in programs.items()}),
            Cache(Path(store)),
            Limits(jobs),
        )
    busy = sum(outcome.seconds for outcome in report.outcomes) / jobs / report.seconds
    used = {"processor_seconds": _processor_seconds(), "busy": busy}
    print(json.dumps(report.as_json() | used))


def _processor_seconds() -> float:
    """Of this process, its forkserver and the workers, all of which have ended."""
    forkserver._forkserver._stop()  # has no public name; waits, so that its time is counted
    whose = resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN
    used = [resource.getrusage(who) for who in whose]
    return sum(one.ru_utime + one.ru_stime for one in used)


def measured(jobs: int) -> dict[str, Any]:
    """The report of one fresh process."""
    words = [sys.executable, __file__, "--measure", str(jobs)]
    done = subprocess.run(words, env=ENVIRONMENT, check=True, stdout=subprocess.PIPE, text=True)
    report = json.loads(done.stdout)
    if report["successful"] != report["total"]:
        raise SystemExit(f"not all graphs were compiled: {report}")
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--jobs", type=int, nargs="+", default=[1, os.cpu_count() or 1])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--measure", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        measure(arguments.measure)
        return
    runs: dict[int, list[dict[str, Any]]] = {jobs: [] for jobs in arguments.jobs}
    for _ in range(arguments.rounds):
        for jobs, reports in runs.items():
            reports.append(measured(jobs))
    results = {
        str(jobs): {
            "seconds": summary([report["seconds"] for report in reports]),
            "graphs": {
                graph["label"]: round(graph["seconds"], 3) for graph in reports[0]["graphs"]
            },
        }
        for jobs, reports in runs.items()
    }
    first, last = (results[str(jobs)]["seconds"]["median"] for jobs in (min(runs), max(runs)))
    finish(
        {"workers": results, "ratio_of_medians": round(last / first, 4)},
        arguments.json,
    )


if __name__ == "__main__":
    main()
