"""The cache commands on 10,000 programs: medians of whole processes.

Programs are small, since nothing here reads their payloads but push.

    python tests/benchmarks/cache.py [--programs 10000] [--rounds 3] [--json FILE]
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from measuring import ENVIRONMENT, ROOT, finish, summary


def fill(root: Path, count: int) -> None:
    """Programs as the compiler records them, with keys of the usual size."""
    from graphtrain.cache import Cache
    from graphtrain.config import load_config
    from graphtrain.key import CacheKey
    from graphtrain.requests import request_keys
    from lowering.artifact import Artifact

    cache = Cache(root)
    program = load_config(ROOT / "examples/quickstart.toml", [], None).program
    request = request_keys(program)["train"].to_json()
    for number in range(count):
        key = CacheKey.of(graph="train", text=str(number), toolchain=request["toolchain"])
        cache.put(key, Artifact(b"payload", {"graph": "train", "arrays": ["a" * 50] * 100}))
        cache.link(CacheKey.from_json(request | {"graph": f"train {number}"}), key, graph="train")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results = {}
    with tempfile.TemporaryDirectory() as scratch:
        store, copy, keys = (Path(scratch) / name for name in ("store", "copy", "keys"))
        began = time.perf_counter()
        fill(store, arguments.programs)
        results["fill_seconds"] = round(time.perf_counter() - began, 1)
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
            results[name] = summary([run(words, environment) for _ in range(rounds)])
            print(name, results[name], file=sys.stderr, flush=True)
    finish({"programs": arguments.programs, "seconds": results}, arguments.json)


def run(words: list[str], environment: dict[str, str]) -> float:
    """Seconds of one command."""
    began = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "graphtrain", "cache", *words],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
