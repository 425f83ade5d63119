"""How many tokens a second the loader gives, and how long a step would wait for it.

    python tests/benchmarks/loader.py [--seconds 5] [--consumed 40000] [--json FILE]

Of plain text, a blend of three datasets, text with documents apart, conversations packed and
padded, and pairs: tokens a second when nothing else is done, the share of them that are targets,
and what a step that takes as long as training (--consumed tokens a second) waits for its batch: at
most 1 % of its time is the goal, at 20 times the tokens that a step of 34M parameters on 2 cores
takes (train_step.py). Processor seconds are those of all threads while steps are only waited for.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from measuring import finish, summary

GOAL = 0.01  # of the time of a step


def write_data(place: Path, megabytes: float) -> None:
    from graphtrain.data.prepare.instructions import instruct
    from graphtrain.data.prepare.text import prepare
    from graphtrain.data.samples.instructions import write_instructions, write_preferences
    from graphtrain.data.samples.text import write_sample

    write_sample(place / "text.jsonl", limit=int(megabytes * 1e6))
    write_instructions(place / "chats.jsonl")
    write_preferences(place / "pairs.jsonl")
    # Whole files make documents of many rows; lines make documents as short as conversations.
    lines = [json.loads(line)["text"] for line in (place / "text.jsonl").open()]
    with (place / "lines.txt").open("w") as file:
        file.writelines(f"{text}\n" for text in lines)
    prepare([place / "text.jsonl"], place / "text", "bytes", validation=0)
    prepare([place / "lines.txt"], place / "lines", "bytes", validation=0)
    for name in ("chats", "pairs"):
        settings: dict[str, Any] = {"template": "chatml", "validation": 0}
        instruct([place / f"{name}.jsonl"], place / name, "bytes", **settings)


def measured(seconds: float, consumed: float, data: Any, **options: Any) -> dict[str, Any]:
    """Open a loader and take batches from it for a while, then as a run does."""
    from graphtrain.data.batches.loader import Loader

    began = time.perf_counter()
    loader = Loader(data, seed=0, overlong="truncate", **options)
    next(loader)
    opened = time.perf_counter() - began
    size, batches, targets = options["global_batch_size"] * options["seq_len"], 0, 0.0
    began = time.perf_counter()
    while time.perf_counter() - began < seconds:
        targets += float(next(loader)["weights"].sum())
        batches += 1
    rate = batches * size / (time.perf_counter() - began)
    waits, step, used = [], size / consumed, time.process_time()
    for _ in range(max(3, min(100, int(seconds / step)))):
        time.sleep(step)  # as long as a step takes
        began = time.perf_counter()
        next(loader)
        waits.append(time.perf_counter() - began)
    used = time.process_time() - used
    loader.close()
    return {
        "tokens_per_second": round(rate),
        "targets": round(targets / batches / size, 3),
        "times_what_steps_take": round(rate / consumed, 1),
        "opening_seconds": round(opened, 3),
        "steps": len(waits),
        "stall_seconds": summary(waits),
        "stalled": round(sum(waits) / len(waits) / step, 6),
        "processor_seconds_of_a_step": round(used / len(waits), 6),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=5, help="for each")
    parser.add_argument("--consumed", type=float, default=40_000, help="tokens a second")
    parser.add_argument("--megabytes", type=float, default=20)
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    from graphtrain.config.schema import BlendPart

    shape = {"global_batch_size": arguments.sequences, "seq_len": arguments.length}
    results: dict[str, Any] = {"goal": GOAL, "consumed": arguments.consumed, **shape}
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        write_data(place, arguments.megabytes)
        names = ("text", "lines", "chats")
        blend = [BlendPart(dataset=str(place / name / "train"), weight=1.0) for name in names]
        cases: dict[str, tuple[Any, dict[str, Any]]] = {
            "plain": (place / "text/train", {}),
            "short documents": (place / "lines/train", {}),
            "documents apart": (place / "lines/train", {"isolate_documents": True}),
            "blend": (blend, {"isolate_documents": True}),
            "conversations packed": (place / "chats/train", {"isolate_documents": True}),
            "conversations padded": (place / "chats/train", {}),
            "pairs": (place / "pairs/train", {}),
        }
        for name, (data, options) in cases.items():
            results[name] = measured(
                arguments.seconds, arguments.consumed, data, **shape, **options
            )
    finish(results, arguments.json)


if __name__ == "__main__":
    main()
