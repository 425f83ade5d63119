"""A training step beside PyTorch's: tokens per second, the programs in turn on the same cores.

The model is a Llama of 34 million parameters, a batch is 8 sequences of 256 tokens, the optimizer
is AdamW with clipping. Every program lives in a process of its own and waits while another takes
its steps, so a machine that slows down slows all of them down. Each begins from weights drawn by
itself and learns the same batches; the last losses are printed to show that all of them learn.

A run of graphtrain on a CPU keeps the memory that it frees, in huge pages; so does ours here. The
peer is as its users have it, and once more, "kept", with that done for it too.

    python tests/benchmarks/train_step.py [--rounds 7] [--json FILE] [--set KEY=VALUE]
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from measuring import ENVIRONMENT, finish, summary

MODEL = {"layers": 8, "embed": 512, "heads": 8, "kv_heads": 8, "mlp": 1408, "vocab": 8192}
SEQUENCES, LENGTH = 8, 256
RATE = 1e-3
STEPS = 4  # of a turn; the first of them, for which caches are cold, does not count
CONTESTANTS = (
    "graphtrain bfloat16",
    "torch.compile bfloat16",
    "torch.compile+kept bfloat16",
    "graphtrain float32",
    "torch float32",
)
GOALS = {"bfloat16": 1.1, "float32": 1.5}

Step = Callable[[Any, Any], float]


def batches() -> Iterator[tuple[Any, Any]]:
    """Tokens and targets: runs of numbers that count up, so that there is something to learn."""
    import numpy as np

    random = np.random.default_rng(0)
    while True:
        starts = random.integers(0, MODEL["vocab"], (SEQUENCES, 1))
        tokens = (starts + np.arange(LENGTH + 1)) % MODEL["vocab"]
        yield tokens[:, :-1].astype(np.int32), tokens[:, 1:].astype(np.int32)


def graphtrain_step(dtype: str, overrides: list[str]) -> Step:
    """The train graph, compiled, written, read and loaded as the commands do."""
    import numpy as np

    import lowering
    from graphtrain.config import load_config
    from graphtrain.config.resolve import resolve
    from graphtrain.graphs.build import build_graph

    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "config.toml"
        file.write_text(_settings(dtype))
        program = resolve(load_config(file, overrides).program)
    target, backend = program.target, lowering.backend(program.target)

    def loaded(name: str) -> Any:
        graph = build_graph(program, name)
        lowered = backend.lower(graph, program.rules, program.mesh, target)
        return backend.load(backend.compile(lowered), target)

    step = loaded("train")
    state = loaded("init")(np.uint32(0))["state"]
    described = step.inputs("batch")
    weights = np.ones((1, SEQUENCES, LENGTH), np.float32)

    def take(tokens: Any, targets: Any) -> float:
        nonlocal state
        batch = {"tokens": tokens[None], "targets": targets[None], "weights": weights}
        outputs = step(state, backend.to_devices(batch, described), np.float32(RATE))
        state = outputs["state"]
        return float(outputs["metrics"]["loss"])

    return take


def _settings(dtype: str) -> str:
    model = "\n".join(f"{name} = {value}" for name, value in MODEL.items())
    return f"""
[program]
target = "cpu:1"
[program.model]
{model}
dtype = "{dtype}"
remat = "none"
unroll = {MODEL["layers"]}
[program.batch]
global_batch_size = {SEQUENCES}
seq_len = {LENGTH}
[run]
directory = "none"
steps = 1
[run.data]
train = "none"
"""


def torch_step(dtype: str, compiled: bool) -> Step:
    """The peer: fused AdamW, and autocast where the dtype is bfloat16."""
    import torch
    from peers.llama_torch import Llama

    torch.manual_seed(0)
    model = Llama(**MODEL)
    forward = torch.compile(model) if compiled else model
    adamw = torch.optim.AdamW(
        model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )

    def take(tokens: Any, targets: Any) -> float:
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
            loss = forward(torch.from_numpy(tokens).long(), torch.from_numpy(targets).long())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adamw.step()
        adamw.zero_grad(set_to_none=True)
        return loss.item()

    return take


def serve(name: str, overrides: list[str]) -> None:
    """Take a turn for every line that comes in; answer with seconds of each step, and the loss."""
    from lowering.machine import host
    from lowering.machine.memory_pages import use_huge_pages

    framework, dtype = name.split()
    kept = framework in ("graphtrain", "torch.compile+kept")
    if kept:
        host.retain_freed_memory()
    if framework == "graphtrain":
        take = graphtrain_step(dtype, overrides)
    else:
        take = torch_step(dtype, compiled=framework != "torch")
    data = batches()
    take(*next(data))
    if kept and (merging := use_huge_pages()):  # as a run does, which does not wait for it
        merging.join()
    print(json.dumps("ready"), flush=True)
    for _ in sys.stdin:
        seconds, loss, used = [], 0.0, 0.0
        for turn in range(STEPS):
            if turn == 1:
                used = _processor_seconds()
            batch = next(data)
            began = time.perf_counter()
            loss = take(*batch)
            seconds.append(time.perf_counter() - began)
        used = (_processor_seconds() - used) / (STEPS - 1)
        print(json.dumps({"seconds": seconds[1:], "used": used, "loss": loss}), flush=True)


def _processor_seconds() -> float:
    """Of all threads of this process, in the kernel too."""
    times = os.times()
    return times.user + times.system


class Contestant:
    """One program in its process."""

    def __init__(self, name: str, overrides: list[str]) -> None:
        words = [sys.executable, __file__, "--serve", name]
        for override in overrides:
            words += ["--set", override]
        self._process = subprocess.Popen(
            words, env=ENVIRONMENT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._read() == "ready"
        self.rates: list[float] = []  # tokens per second, by turn
        self.used: list[float] = []  # seconds of a processor in a step, by turn
        self.loss = 0.0

    def _read(self) -> Any:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("a program ended; its error is above")
        return json.loads(line)

    def take_turn(self) -> None:
        assert self._process.stdin
        print(file=self._process.stdin, flush=True)
        answer = self._read()
        mean = sum(answer["seconds"]) / len(answer["seconds"])
        self.rates.append(SEQUENCES * LENGTH / mean)
        self.used.append(answer["used"])
        self.loss = answer["loss"]

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()


def compare(contestants: dict[str, Contestant], dtype: str, peer: str) -> dict[str, Any]:
    """Ours against a peer, turn by turn."""
    mine, theirs = contestants[f"graphtrain {dtype}"], contestants[f"{peer} {dtype}"]
    ratios = summary([a / b for a, b in zip(mine.rates, theirs.rates, strict=True)])
    return {
        "tokens_per_second": summary(mine.rates)["median"],
        "peer": f"{peer}, {dtype}",
        "peer_tokens_per_second": summary(theirs.rates)["median"],
        "ratio": ratios["median"],
        "ratio_by_turn": ratios,
        "goal": GOALS[dtype],
        "processor_seconds_of_a_step": summary(mine.used)["median"],
        "peer_processor_seconds_of_a_step": summary(theirs.used)["median"],
        "losses": [round(mine.loss, 3), round(theirs.loss, 3)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--set", dest="overrides", action="append", default=[])
    parser.add_argument("--dtype", choices=[*GOALS], action="append", help="by default both")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.serve, arguments.overrides)
        return
    dtypes = arguments.dtype or [*GOALS]
    contestants = {
        name: Contestant(name, arguments.overrides)
        for name in CONTESTANTS
        if name.split()[1] in dtypes
    }
    for _ in range(arguments.rounds):
        for contestant in contestants.values():
            contestant.take_turn()
    for contestant in contestants.values():
        contestant.close()
    peers = {"bfloat16": "torch.compile", "float32": "torch"}
    compared = {dtype: compare(contestants, dtype, peers[dtype]) for dtype in dtypes}
    if "bfloat16" in dtypes:
        compared["bfloat16, kept"] = compare(contestants, "bfloat16", "torch.compile+kept")
    results = {"torch": metadata.version("torch"), "steps_of_a_turn": STEPS - 1, **compared}
    # The first of them is what the whole benchmark is quoted by.
    head = ("tokens_per_second", "peer_tokens_per_second", "ratio")
    finish({name: compared[dtypes[0]][name] for name in head} | results, arguments.json)


if __name__ == "__main__":
    main()
