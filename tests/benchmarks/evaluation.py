"""Tasks of multiple choice beside lm-eval with transformers: questions per second.

A Llama of 125 million random weights in float32. `letters` is shaped like MMLU: subjects, each with
five examples of its own before every question, and the letters A to D. MMLU has 57 subjects of 246
questions on average (14,042 in all); here are `--subjects` of `--questions` each. With fewer
questions of a subject than MMLU has, its examples weigh more, and what is gained by computing them
once is understated: with 12, they weigh as much as half of the questions. `texts` is shaped like
HellaSwag: no examples, `--questions` questions, and four endings of 20 words. Lengths vary, from
half to one and a half of the mean, as those of MMLU's questions and examples do.

Each contestant runs in a process of its own, in turn; what is timed is lm-eval's call of the model
with all requests, after a call with those of two questions of each subject. In the call that is
timed, graphtrain also loads its programs; the weights are loaded before, as those of transformers.
Processor seconds are those of all threads: on a busy machine, their ratio tells more than that of
the rates.

    python tests/benchmarks/evaluation.py [--rounds 3] [--subjects 2] [--questions 60]
        [--json FILE] [--directory DIR]
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
from pathlib import Path
from typing import Any

from decode import SIZES
from measuring import ENVIRONMENT, finish, summary

OURS = "graphtrain"
CONTESTANTS = (OURS, "transformers, batch of 1", "transformers, batch of 8")
WORDS = [f"w{index}" for index in range(SIZES["vocab_size"] - 200)]
MARKS = ["Answer:", *(f"{letter}{mark}" for letter in "ABCD" for mark in ("", "."))]
LETTERS = "{{question}} A. {{a}} B. {{b}} C. {{c}} D. {{d}} Answer:"
TASKS: dict[str, dict[str, Any]] = {
    "letters": {"doc_to_text": LETTERS, "doc_to_choice": list("ABCD"), "num_fewshot": 5},
    "texts": {"doc_to_text": "{{question}}", "doc_to_choice": "{{[a, b, c, d]}}",
              "num_fewshot": 0},
}  # fmt: skip
LENGTHS = {"letters": (40, 5), "texts": (60, 20)}  # mean words of a question and of a choice


def make_model(directory: Path) -> None:
    """Write the weights as Hugging Face and as graphtrain read them; compile the programs."""
    import tokenizers
    import torch
    import transformers

    torch.manual_seed(0)
    end = len(WORDS) + len(MARKS)
    config = transformers.LlamaConfig(**SIZES | {"eos_token_id": end, "bos_token_id": end})
    transformers.LlamaForCausalLM(config).save_pretrained(directory / "hf")
    words = {word: index for index, word in enumerate([*WORDS, *MARKS, "<end>"])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(directory / "hf/tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>"}
    (directory / "hf/tokenizer_config.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "graphtrain"]
    convert = [*command, "convert", "hf-to-graphtrain", directory / "hf", directory / "ours"]
    subprocess.run(convert, env=ENVIRONMENT, check=True)
    (directory / "evaluation.toml").write_text(
        f"""[program]
target = "cpu:1"
model = {{ preset = "{directory}/ours/model.toml" }}
batch = {{ global_batch_size = 8, seq_len = 512 }}
serve = {{ context_length = 512, dtype = "float32", weights_dtype = "float32" }}
[run]
directory = "{directory}/run"
steps = 1
init_from = "{directory}/ours"
data = {{ train = "{directory}/absent" }}
"""
    )
    compile_it = ["compile", directory / "evaluation.toml", "--for", "evaluate"]
    subprocess.run(
        [*command, *compile_it, "--cache", directory / "cache"], env=ENVIRONMENT, check=True
    )


def write_task(directory: Path, kind: str, subject: int, questions: int) -> Path:
    """Write rows of random words, and the file of the task."""
    task = f"{kind}{subject}"
    source = random.Random(task)
    length, choice = LENGTHS[kind]

    def words(mean: int) -> str:
        return " ".join(source.choices(WORDS, k=source.randint(mean // 2, mean * 3 // 2)))

    for split, count in (("dev", 5), ("test", questions)):
        rows = [
            {"question": words(length), **{name: words(choice) for name in "abcd"},
             "answer": index % 4}
            for index in range(count)
        ]  # fmt: skip
        (directory / f"{task}-{split}.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    files = {split: str(directory / f"{task}-{split}.jsonl") for split in ("dev", "test")}
    settings = TASKS[kind] | {
        "task": task, "dataset_path": "json", "output_type": "multiple_choice",
        "dataset_kwargs": {"data_files": files, "cache_dir": str(directory / "datasets")},
        "test_split": "test", "fewshot_split": "dev", "doc_to_target": "answer",
        "fewshot_config": {"sampler": "first_n"}, "metric_list": [{"metric": "acc"}],
    }  # fmt: skip
    path = directory / f"{task}.yaml"
    path.write_text(json.dumps(settings))
    return path


def seconds_of_calls(model: Any) -> list[tuple[float, float]]:
    """Return a list to which each call of a model adds its seconds, and the processor's."""
    seconds, original = [], model.loglikelihood

    def timed(requests: list, **settings: Any) -> list:
        begin = time.perf_counter(), time.process_time()
        answers = original(requests, **settings)
        end = time.perf_counter(), time.process_time()
        seconds.append((end[0] - begin[0], end[1] - begin[1]))
        return answers

    model.loglikelihood = timed
    return seconds


def contestant(name: str, directory: Path, tasks: list[Path]) -> tuple[float, float]:
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    if name == OURS:
        return of_graphtrain(directory, tasks)
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    model = HFLM(
        pretrained=str(directory / "hf"), device="cpu", dtype="float32", max_length=512,
        batch_size=int(name[-1]),
    )  # fmt: skip
    seconds = seconds_of_calls(model)
    manager = TaskManager(include_path=str(directory), include_defaults=False)
    for limit in (2, None):
        names: list[Any] = [task.stem for task in tasks]
        simple_evaluate(model, tasks=names, task_manager=manager, limit=limit, bootstrap_iters=0)
    return seconds[-1]


def of_graphtrain(directory: Path, tasks: list[Path]) -> tuple[float, float]:
    import shutil

    from graphtrain.run.evaluation import harness_model

    models: list[Any] = []
    original = harness_model.EngineModel.__init__

    def timed(self: Any, *arguments: Any) -> None:
        original(self, *arguments)
        self.calls = seconds_of_calls(self)
        models.append(self)

    harness_model.EngineModel.__init__ = timed
    import graphtrain as gt

    for limit in (2, None):
        shutil.rmtree(directory / "run/evaluation", ignore_errors=True)  # the answers so far
        names = [str(task) for task in tasks]
        gt.evaluate_tasks(
            directory / "evaluation.toml", names, limit=limit, cache=directory / "cache"
        )
    return models[-1].calls[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--subjects", type=int, default=2, help="of letters")
    parser.add_argument("--questions", type=int, default=60, help="of each subject")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--directory", type=Path, help="keep the model and the programs here")
    parser.add_argument("--contestant", choices=CONTESTANTS, help=argparse.SUPPRESS)
    parser.add_argument("--task", type=Path, action="append", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.contestant:
        seconds = contestant(arguments.contestant, arguments.directory, arguments.task)
        print("seconds", *seconds)
        return
    directory = arguments.directory or Path(tempfile.mkdtemp())
    if not (directory / "evaluation.toml").is_file():
        make_model(directory)
    results: dict[str, Any] = {}
    spent: dict[str, Any] = {}
    for task in TASKS:
        subjects = arguments.subjects if task == "letters" else 1
        files = [write_task(directory, task, at, arguments.questions) for at in range(subjects)]
        questions = subjects * arguments.questions
        rates: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
        costs: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
        for _ in range(arguments.rounds):
            for name in CONTESTANTS:
                words = ["--contestant", name, "--directory", directory]
                words += [word for file in files for word in ("--task", file)]
                done = subprocess.run(
                    [sys.executable, __file__, *words], env=ENVIRONMENT, check=True, text=True,
                    stdout=subprocess.PIPE,
                )  # fmt: skip
                seconds, processor_seconds = map(float, done.stdout.split()[-2:])
                rates[name].append(questions / seconds)
                costs[name].append(processor_seconds / questions)
        ratios = {
            f"{OURS} / {name}": round(
                statistics.median(a / b for a, b in zip(rates[OURS], rates[name], strict=True)), 2
            )
            for name in CONTESTANTS[1:]
        }
        results[task] = {name: summary(taken) for name, taken in rates.items()} | ratios
        spent[task] = {name: summary(taken) for name, taken in costs.items()}
    finish(
        {
            "questions per second": results,
            "processor seconds of a question": spent,
            "sizes": json.dumps(SIZES),
        },
        arguments.json,
    )


if __name__ == "__main__":
    main()
