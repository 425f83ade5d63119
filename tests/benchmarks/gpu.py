"""A training step on one NVIDIA card: tokens per second and utilisation, beside torch.compile.

Llamas of 1.3 and 3 billion parameters, bfloat16 with float32 master weights, AdamW with clipping,
sequences of 2048. Three programs take turns on the card, every turn in a process of its own, since
the card's memory is too small for all of them:

- here, compiled with no card in sight (CUDA_VISIBLE_DEVICES is empty), stored, and loaded to run;
- here, compiled on the card, where XLA tunes its products: the difference is what tuning gains;
- torch.compile with PyTorch's flash attention, autocast to bfloat16.

Without a card the first is compiled for `--target` and described; nothing runs.

    python tests/benchmarks/gpu.py [--model 1.3B] [--target h200:1] [--rounds 3] [--json FILE]
"""

import argparse
import json
import pickle
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from measuring import ENVIRONMENT, finish, summary

MODELS = {
    "1.3B": {"layers": 24, "embed": 2048, "heads": 16, "kv_heads": 16, "mlp": 5504},
    "3B": {"layers": 28, "embed": 3072, "heads": 24, "kv_heads": 8, "mlp": 8192},
}
VOCAB, LENGTH = 32000, 2048
SEQUENCES = {"1.3B": 16, "3B": 8}
RATE = 1e-4
STEPS = 12  # of a turn; the first two, which tune and fill caches, do not count
DEVICELESS, ON_THE_CARD, PEER = "deviceless", "on the card", "torch.compile"
NO_CARD = "no CUDA device was found: nothing ran, and no speed is known"

Step = Callable[[Any, Any], float]


def program(model: str, target: str) -> Any:
    from graphtrain.config.schema import Batch, Model, Program

    return Program(
        target=target,
        model=Model(**MODELS[model], vocab=VOCAB),
        batch=Batch(global_batch_size=SEQUENCES[model], seq_len=LENGTH),
    )


def compile_to(directory: Path, model: str, target: str, graphs: list[str]) -> dict[str, Any]:
    """Compile graphs with no card, leave them in a directory, and describe the training step."""
    from graphtrain.compile import worker
    from graphtrain.config.resolve import resolve
    from graphtrain.cost_model.memory import memory
    from lowering.xla import backend as xla

    of, record = resolve(program(model, target)), {}
    for name in graphs:
        lowered = worker.lower(of, name)
        artifact = xla.compile(lowered)
        (directory / name).write_bytes(pickle.dumps(artifact))
        record = artifact.record | {"options": lowered.options, "payload": len(artifact.payload)}
    predicted = memory(of)
    return {
        "target": target,
        "compile_seconds": record["compile_seconds"],
        "peak_bytes": record["memory"]["peak"],
        "predicted_peak_bytes": predicted.peak,
        "capacity_bytes": predicted.capacity,
        "payload_bytes": record["payload"],
        "kernels": record["kernels"],
        "options": record["options"],
    }


def graphtrain_step(directory: Path | None, model: str, target: str) -> Step:
    """The training step, from artifacts of a directory; else compiled by JAX on the card."""
    import numpy as np

    from graphtrain.config.resolve import resolve
    from graphtrain.graphs.build import build_graph
    from lowering.xla import backend as xla

    of = resolve(program(model, target))

    def loaded(name: str) -> Any:
        if directory is not None:  # written by this script a moment ago
            return xla.load(pickle.loads((directory / name).read_bytes()), of.target)
        card = xla.devices(of.target)
        lowered = xla.lower(build_graph(of, name), of.rules, of.mesh, of.target, card)
        return lowered.handle.compile()  # with XLA's own options: it tunes all of its products

    init, step = loaded("init"), loaded("train")
    state = init(np.uint32(0))["state"]
    weights = np.ones((1, SEQUENCES[model], LENGTH), np.float32)

    def take(tokens: Any, targets: Any) -> float:
        nonlocal state
        batch = {"tokens": tokens[None], "targets": targets[None], "weights": weights}
        outputs = step(state, batch, np.float32(RATE))
        state = outputs["state"]
        return float(outputs["metrics"]["loss"])

    return take


def torch_step(model: str) -> Step:
    """The peer: fused AdamW, autocast, and no attention but the flash kernel."""
    import torch
    from peers.llama_torch import Llama
    from torch.nn.attention import SDPBackend, sdpa_kernel

    torch.manual_seed(0)
    llama = Llama(**MODELS[model], vocab=VOCAB).cuda()
    forward = torch.compile(llama)
    adamw = torch.optim.AdamW(
        llama.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )

    def take(tokens: Any, targets: Any) -> float:
        given = (torch.from_numpy(x).long().cuda() for x in (tokens, targets))
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION), torch.autocast("cuda", torch.bfloat16):
            loss = forward(*given)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(llama.parameters(), 1.0)
        adamw.step()
        adamw.zero_grad(set_to_none=True)
        return loss.item()

    return take


def batches(model: str) -> Iterator[tuple[Any, Any]]:
    """Tokens and targets: runs of numbers that count up, so that there is something to learn."""
    import numpy as np

    random = np.random.default_rng(0)
    while True:
        starts = random.integers(0, VOCAB, (SEQUENCES[model], 1))
        tokens = ((starts + np.arange(LENGTH + 1)) % VOCAB).astype(np.int32)
        yield tokens[:, :-1].copy(), tokens[:, 1:].copy()


def serve(name: str, model: str, target: str, directory: Path) -> None:
    """Take a turn; print tokens per second, and the last loss."""
    if name == PEER:
        take = torch_step(model)
    else:
        take = graphtrain_step(directory if name == DEVICELESS else None, model, target)
    data, seconds, loss = batches(model), [], 0.0
    for _ in range(STEPS):
        batch = next(data)
        began = time.perf_counter()
        loss = take(*batch)  # reads the loss, so it waits for the card
        seconds.append(time.perf_counter() - began)
    mean = sum(seconds[2:]) / len(seconds[2:])
    print(json.dumps({"rate": SEQUENCES[model] * LENGTH / mean, "loss": loss}))


def compare(turns: dict[str, list[Any]], model: str, target: str) -> dict[str, Any]:
    """Rates, utilisation in both conventions, and how many times a program's rate ours is."""
    from graphtrain.config.resolve import resolve
    from graphtrain.cost_model.time import mfu

    of, found = resolve(program(model, target)), {}
    rates = {name: [turn["rate"] for turn in taken] for name, taken in turns.items()}
    for name, taken in rates.items():
        rate = summary(taken)["median"]
        seconds = of.batch.tokens / rate
        found[name] = {
            "tokens_per_second": rate,
            "mfu": round(mfu(of, seconds), 4),
            "mfu_causal": round(mfu(of, seconds, causal=True), 4),
            "ratio": summary([a / b for a, b in zip(rates[DEVICELESS], taken, strict=True)]),
            "loss": turns[name][-1]["loss"],
        }
    return found


def card() -> str:
    """The name of the first card; empty where there is none."""
    if shutil.which("nvidia-smi") is None:
        return ""
    words = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    said = subprocess.run(words, capture_output=True, text=True)
    return said.stdout.partition("\n")[0].strip() if said.returncode == 0 else ""


def compiled_without_card(arguments: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """In a process that sees no card."""
    words = ["--model", arguments.model, "--target", arguments.target]
    subprocess.run(
        [sys.executable, __file__, *words, "--compile-to", str(directory)],
        env=ENVIRONMENT | {"CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu"},
        check=True,
    )
    return json.loads((directory / "description").read_text())


def measure(arguments: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """All programs, in turn."""
    words = ["--model", arguments.model, "--target", arguments.target]
    words += ["--directory", str(directory)]
    turns: dict[str, list[Any]] = {name: [] for name in (DEVICELESS, ON_THE_CARD, PEER)}
    for _ in range(arguments.rounds):
        for name, taken in turns.items():
            said = subprocess.run(
                [sys.executable, __file__, *words, "--serve", name],
                env=ENVIRONMENT,
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )
            taken.append(json.loads(said.stdout.splitlines()[-1]))
    return compare(turns, arguments.model, arguments.target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, default="1.3B")
    parser.add_argument("--target", default="h200:1")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--compile-to", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    found = card()
    if arguments.serve:
        serve(arguments.serve, arguments.model, arguments.target, arguments.directory)
        return
    if arguments.compile_to:
        graphs = ["init", "train"] if found else ["train"]
        to, model = arguments.compile_to, arguments.model
        described = compile_to(to, model, arguments.target, graphs)
        (to / "description").write_text(json.dumps(described))
        return
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        results = {"model": arguments.model, "card": found or NO_CARD}
        results["compiled without a card"] = compiled_without_card(arguments, directory)
        if found:
            results["measured"] = measure(arguments, directory)
        finish(results, arguments.json)
    if not found:
        print(NO_CARD, file=sys.stderr)


if __name__ == "__main__":
    main()
