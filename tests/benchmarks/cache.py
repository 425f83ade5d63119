"""The cache commands on 10,000 programs: medians of whole processes.

Programs are small, since nothing here reads their payloads but push. With --s3, the last sync is
with an S3 server on this machine (rclone). CPU seconds are those of this process's children alone,
and less at the mercy of other work on the machine.

    python tests/benchmarks/cache.py [--programs 10000] [--rounds 3] [--s3] [--json FILE]
"""

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from measuring import ENVIRONMENT, ROOT, finish, summary


def fill(root: Path, count: int) -> None:
    """Programs as the compiler records them, with keys of the usual size."""
    from graphtrain.cache import Cache
    from graphtrain.cache.key import CacheKey
    from graphtrain.compile.request_keys import request_keys
    from graphtrain.config import load_config
    from graphtrain.config.resolve import resolve
    from lowering.artifact import Artifact

    cache = Cache(root)
    program = resolve(load_config(ROOT / "examples/quickstart.toml", [], None).program)
    request = request_keys(program)["train"].to_json()
    for number in range(count):
        key = CacheKey.of(graph="train", text=str(number), toolchain=request["toolchain"])
        cache.put(key, Artifact(b"payload", {"graph": "train", "arrays": ["a" * 50] * 100}))
        cache.record_request(
            CacheKey.from_json(request | {"graph": f"train {number}"}), key, graph="train"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--s3", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    seconds, processor = {}, {}
    with tempfile.TemporaryDirectory() as scratch:
        store, copy, keys = (Path(scratch) / name for name in ("store", "copy", "keys"))
        began = time.perf_counter()
        fill(store, arguments.programs)
        filled = round(time.perf_counter() - began, 1)
        environment = ENVIRONMENT | {"XDG_CONFIG_HOME": str(keys), "GRAPHTRAIN_CACHE": str(store)}
        commands = {
            "ls": ["ls"],
            "explain": ["explain", str(ROOT / "examples/quickstart.toml")],
            "gc": ["gc", "--max-size", "1TB"],
            "gc --other-toolchains": ["gc", "--other-toolchains"],
            "push, the first time": ["push", str(copy)],
            "sync, nothing new": ["sync", str(copy)],
        }
        run(["key", "new"], environment)
        for name, words in commands.items():
            rounds = 1 if "first" in name else arguments.rounds
            seconds[name], processor[name] = measure(words, environment, rounds)
        if arguments.s3:
            sys.path.insert(0, str(ROOT / "tests/run"))
            from storage import credentials, s3_server

            with s3_server(Path(scratch)) as url:
                name, environment = "sync with S3, nothing new", environment | credentials(url)
                words = ["sync", "s3://copy"]
                seconds[name], processor[name] = measure(words, environment, arguments.rounds)
    results = {"fill_seconds": filled, "seconds": seconds, "cpu_seconds": processor}
    finish({"programs": arguments.programs, **results}, arguments.json)


def measure(
    words: list[str], environment: dict[str, str], rounds: int
) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds that pass and seconds of the processor, for a command."""
    times = [run(words, environment) for _ in range(rounds)]
    passed, used = (summary(one) for one in zip(*times, strict=True))
    print(*words[:1], passed, used, file=sys.stderr, flush=True)
    return passed, used


def run(words: list[str], environment: dict[str, str]) -> tuple[float, float]:
    """Seconds that pass and seconds of the processor, once."""
    began, used = time.perf_counter(), _processor_seconds()
    subprocess.run(
        [sys.executable, "-m", "graphtrain", "cache", *words],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=True,
    )
    return time.perf_counter() - began, _processor_seconds() - used


def _processor_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    main()
