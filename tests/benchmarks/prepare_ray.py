"""`data prepare --ray` on one machine: throughput with several Ray workers against one.

    python tests/benchmarks/prepare_ray.py [--megabytes 30] [--rounds 3] [--workers 2] [--json FILE]

Each measurement is a process of its own, which starts a local Ray cluster of so many CPUs before
the clock. The seconds are of the whole call: reading, encoding, writing, digests. All must write
the same bytes. The first process reads and writes beside the workers, so N workers need N + 1 cores
to be N times as fast; its own processor seconds are given, because they bound the throughput.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from measuring import ENVIRONMENT, finish, summary
from prepare import write_corpus


def prepare_on(corpus: Path, tokenizer: Path, output: Path, workers: int) -> None:
    """Prepare on a cluster of this machine, and print what it took."""
    import ray

    from graphtrain.data.prepare.text import prepare

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(address="local", num_cpus=workers, include_dashboard=False, log_to_driver=False)
    warm = ray.remote(num_cpus=1)(_import)
    ray.get([warm.remote() for _ in range(workers)])  # every worker process has begun
    began, used = time.perf_counter(), time.process_time()
    made = prepare([corpus], output, str(tokenizer), validation=0, ray="auto")
    seconds, used = time.perf_counter() - began, time.process_time() - used
    digest = hashlib.sha256((output / "train.bin").read_bytes()).hexdigest()
    ray.shutdown()
    print(
        json.dumps(
            {
                "seconds": seconds,
                "processor_seconds_of_first_process": used,
                "tokens": made.train.tokens,
                "digest": digest,
            }
        )
    )


def _import() -> None:
    """Import what encodes, for long enough that every worker process does it."""
    import graphtrain.data.prepare.text

    assert graphtrain.data.prepare.text
    time.sleep(2)


def measured(corpus: Path, tokenizer: Path, workers: int) -> dict[str, Any]:
    """Measure one call in a process of its own."""
    with tempfile.TemporaryDirectory(dir=corpus.parent) as scratch:
        words = map(str, (corpus, tokenizer, Path(scratch, "data"), workers))
        command = [sys.executable, __file__, "--only", *words]
        ended = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True)
    if ended.returncode:
        raise SystemExit(ended.stderr)
    return json.loads(ended.stdout.splitlines()[-1])


def main() -> None:
    """Measure one worker and several, taking turns."""
    if sys.argv[1:2] == ["--only"]:
        corpus, tokenizer, output, workers = sys.argv[2:]
        prepare_on(Path(corpus), Path(tokenizer), Path(output), int(workers))
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=float, default=30)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--vocab", type=int, default=32_000)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    from graphtrain.data.tokenizers.train import train_tokenizer

    found: dict[int, list[dict[str, Any]]] = {1: [], arguments.workers: []}
    with tempfile.TemporaryDirectory() as scratch:
        corpus, tokenizer = Path(scratch, "corpus.jsonl"), Path(scratch, "tokenizer")
        write_corpus(corpus, arguments.megabytes)
        train_tokenizer([Path(scratch, "sample.jsonl")], tokenizer, "bpe", arguments.vocab)
        for _ in range(arguments.rounds):
            for workers, ones in found.items():
                ones.append(measured(corpus, tokenizer, workers))
                print(workers, ones[-1], file=sys.stderr, flush=True)
    assert len({one["digest"] for ones in found.values() for one in ones}) == 1, "bytes differ"
    names = ("seconds", "processor_seconds_of_first_process")
    seconds = {
        workers: {name: summary([one[name] for one in ones]) for name in names}
        for workers, ones in found.items()
    }
    ratio = seconds[1]["seconds"]["median"] / seconds[arguments.workers]["seconds"]["median"]
    finish({"workers": seconds, "times_as_fast": round(ratio, 2)}, arguments.json)


if __name__ == "__main__":
    main()
