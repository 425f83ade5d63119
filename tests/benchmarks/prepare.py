"""`data prepare` against Megatron-LM's preprocessing, with one tokenizer on the same text.

    python tests/benchmarks/prepare.py [--megabytes 60] [--rounds 3] [--workers 2] [--json FILE]

Megatron's way is that of its tools/preprocess_data.py, which no package carries, with the parts of
the megatron-core package: worker processes, each with megatron-core's tokenizer, take JSON lines
one by one, 32 at a time; the first process adds each document to megatron-core's builder. Its
seconds begin when its workers are ready; ours are of the whole call, digests and start-up included.
Both .bin files have to be equal. Seconds of all processors are given besides, because they hardly
depend on what else the machine does.

Needs megatron-core, tokenizers and transformers. Source: tools/preprocess_data.py of
https://github.com/NVIDIA/Megatron-LM, core_v0.16.1
"""

import argparse
import json
import multiprocessing
import multiprocessing.forkserver
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from measuring import ENVIRONMENT, finish, summary


def write_corpus(path: Path, megabytes: float) -> None:
    """The sample corpus again and again; each time with a mark that makes its words others."""
    from graphtrain.data.samples.text import write_sample

    sample = path.with_name("sample.jsonl")
    write_sample(sample, limit=60_000_000)
    documents = [json.loads(line)["text"] for line in sample.open()]
    written = repeat = 0
    with path.open("w") as file:
        while written < megabytes * 1e6:
            for text in documents:
                # Some words differ in every copy, as in real text, so that no cache holds them all.
                changed = text.replace("self", f"self{repeat}").replace("the ", f"the{repeat} ")
                written += file.write(json.dumps({"text": changed}) + "\n")
                if written >= megabytes * 1e6:
                    return
            repeat += 1


def theirs(corpus: Path, tokenizer: Path, library: str, output: Path, workers: int) -> None:
    sys.path.remove(str(Path(__file__).parent))  # it has another megatron.py
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    own = _megatron_tokenizer(tokenizer, library)
    ready, start = multiprocessing.Barrier(workers + 1), multiprocessing.Value("d", 0.0)
    pool = multiprocessing.Pool(workers, _build, (tokenizer, library, ready, start))
    ready.wait()
    began, start.value = time.perf_counter(), start.value + time.process_time()
    dtype = DType.optimal_dtype(own.vocab_size)
    builder = IndexedDatasetBuilder(f"{output}.bin", dtype=dtype)
    tokens = 0
    with corpus.open(encoding="utf-8") as file:
        for numbers in pool.imap(_encode, file, 32):
            builder.add_document(numbers, [len(numbers)])
            tokens += len(numbers)
    builder.finalize(f"{output}.idx")
    pool.close()
    pool.join()
    _report(began, tokens, start.value)


def ours(corpus: Path, tokenizer: Path, library: str, output: Path, workers: int) -> None:
    from graphtrain.data.prepare.text import prepare

    began = time.perf_counter()
    options: dict[str, Any] = {"validation": 0, "workers": workers}
    if library == "sentencepiece":
        tokenizer = tokenizer / "tokenizer.model"
    made = prepare([corpus], output, str(tokenizer), **options)
    # Its workers count as used only when it has ended.
    multiprocessing.forkserver._forkserver._stop()  # type: ignore[attr-defined]
    _report(began, made.train.tokens)


_state: dict[str, Any] = {}


def _megatron_tokenizer(path: Path, library: str) -> Any:
    from megatron.core.tokenizers import MegatronTokenizer

    metadata = {"library": library}
    if library == "sentencepiece":
        path = path / "tokenizer.model"
    return MegatronTokenizer.from_pretrained(tokenizer_path=str(path), metadata_path=metadata)


def _build(path: Path, library: str, ready: Any, start: Any) -> None:
    _state["tokenizer"] = _megatron_tokenizer(path, library)
    with start.get_lock():
        start.value += time.process_time()
    ready.wait()


def _encode(line: str) -> list[int]:
    tokenizer = _state["tokenizer"]
    numbers = list(tokenizer.tokenize(json.loads(line)["text"]))
    if numbers:
        numbers.append(tokenizer.eod)
    return numbers


def _report(began: float, tokens: int, start: float = 0.0) -> None:
    """Print what a run took; `start` are processor seconds that do not count."""
    seconds = time.perf_counter() - began
    used = sum(
        usage.ru_utime + usage.ru_stime
        for usage in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )
    print(json.dumps({"seconds": seconds, "processor_seconds": used - start, "tokens": tokens}))


def measured(kind: str, *arguments: str) -> dict[str, float]:
    """Run one of the two in a process of its own."""
    command = [sys.executable, __file__, "--only", kind, *arguments]
    ended = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True)
    if ended.returncode:
        raise SystemExit(ended.stderr)
    return json.loads(ended.stdout.splitlines()[-1])


def compared(library: str, tokenizer: Path, corpus: Path, rounds: int, workers: int) -> Any:
    """Seconds of both, taking turns."""
    seconds: dict[str, list[float]] = {"ours": [], "theirs": []}
    processor: dict[str, list[float]] = {"ours": [], "theirs": []}
    tokens = 0
    for _ in range(rounds):
        with tempfile.TemporaryDirectory(dir=corpus.parent) as scratch:
            for kind in seconds:
                one = measured(kind, str(corpus), str(tokenizer), library, scratch, str(workers))
                seconds[kind].append(one["seconds"])
                processor[kind].append(one["processor_seconds"])
                tokens = int(one["tokens"])
            files = [Path(scratch, name).read_bytes() for name in ("ours/train.bin", "theirs.bin")]
            assert files[0] == files[1], f"{library}: the tokens differ"
    used = {kind: summary(each)["median"] for kind, each in processor.items()}
    medians = {kind: summary(each)["median"] for kind, each in seconds.items()}
    return {
        "tokens": tokens,
        **{f"{kind}_seconds": summary(each) for kind, each in seconds.items()},
        **{f"{kind}_processor_seconds": summary(each) for kind, each in processor.items()},
        **{f"{kind}_tokens_per_second": round(tokens / medians[kind]) for kind in medians},
        "times_as_fast": round(medians["theirs"] / medians["ours"], 2),
        "times_as_fast_by_processor": round(used["theirs"] / used["ours"], 2),
    }


def main() -> None:
    if sys.argv[1:2] == ["--only"]:
        kind, corpus, tokenizer, library, scratch, workers = sys.argv[2:]
        run = {"ours": ours, "theirs": theirs}[kind]
        run(Path(corpus), Path(tokenizer), library, Path(scratch) / kind, int(workers))
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=float, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--vocab", type=int, default=32_000)
    parser.add_argument("--libraries", nargs="+", default=["huggingface", "sentencepiece"])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    from graphtrain.data.tokenizers.train import train_tokenizer

    results = {}
    kinds = {"huggingface": "bpe", "sentencepiece": "sentencepiece"}
    with tempfile.TemporaryDirectory() as scratch:
        corpus = Path(scratch) / "corpus.jsonl"
        write_corpus(corpus, arguments.megabytes)
        for library in arguments.libraries:
            tokenizer = Path(scratch) / library
            sample = Path(scratch) / "sample.jsonl"
            train_tokenizer([sample], tokenizer, kinds[library], arguments.vocab)
            results[library] = compared(
                library, tokenizer, corpus, arguments.rounds, arguments.workers
            )
            print(library, results[library], file=sys.stderr, flush=True)
    finish(results, arguments.json)


if __name__ == "__main__":
    main()
