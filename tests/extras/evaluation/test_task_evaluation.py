"""Tasks of lm-eval on compiled programs: what lm-eval's own model of transformers gives."""

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers
from click.testing import CliRunner
from random_models import LLAMA
from task_files import COUNT, SPLITS, write_tasks

from graphtrain.api.evaluation import evaluate_tasks
from graphtrain.api.programs import compile as compile_programs
from graphtrain.cli import evaluate as evaluate_command
from graphtrain.data.tokenizers.huggingface import train_bpe
from graphtrain.errors import DataError, MissingProgram
from graphtrain.run.evaluation.harness_tasks import _metrics_offline
from graphtrain.run.evaluation.task_results import TaskResults
from graphtrain.weights.hf_import import import_hugging_face

CONTEXT = 640
LIMIT = 3
SHORT = "humaneval_short"  # HumanEval with shorter answers
TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}</>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)

CONFIG = """
[program]
target = "cpu:8"
mesh = {{ data = 2, fsdp = 2, tensor = 2 }}
batch = {{ global_batch_size = 4, seq_len = 64 }}
serve = {{ slots = 8, context_length = {context}, prefill = [32], tokens_per_call = 8 }}

[program.model]
layers = 2
embed = 32
heads = 4
kv_heads = 2
mlp = 48
vocab = 264
vocab_padding = 7
dtype = "float32"
norm_epsilon = 1e-6

[run]
directory = "{path}/run"
init_from = "{path}/ours"
steps = 1
data = {{ train = "data" }}
"""


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    connect, getaddrinfo = socket.socket.connect, socket.getaddrinfo

    def connect_here(self, address):
        is_file = isinstance(address, str)  # of the processes that compile
        assert is_file or address[0] == "127.0.0.1", "a socket was used"
        return connect(self, address)

    def find_here(host, *arguments, **settings):
        assert host == "127.0.0.1", "a socket was used"
        return getaddrinfo(host, *arguments, **settings)

    monkeypatch.setattr(socket.socket, "connect", connect_here)
    monkeypatch.setattr(socket, "getaddrinfo", find_here)


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with random weights, ours and theirs, their programs, and data of tasks."""
    path = tmp_path_factory.mktemp("evaluation")
    source = transformers.LlamaConfig(
        **LLAMA.to_diff_dict() | {"eos_token_id": 0, "bos_token_id": 0, "pad_token_id": 0}
    )
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(source).save_pretrained(path / "source")
    train_bpe(["the fox"], 257).save(path / "source")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>",
                "chat_template": TEMPLATE}  # fmt: skip
    (path / "source" / "tokenizer_config.json").write_text(json.dumps(settings))
    import_hugging_face(path / "source", path / "ours", lambda done, count: None)
    (path / "a.toml").write_text(CONFIG.format(path=path, context=CONTEXT))
    write_tasks(path / "tasks")
    short = {"include": packaged("humaneval"), "task": SHORT}
    short |= {"generation_kwargs": {"until": ["\n"], "max_gen_toks": 24, "do_sample": False}}
    short |= {"dataset_path": "json", "dataset_name": None} | data_of(path, "humaneval")
    (path / f"{SHORT}.yaml").write_text(json.dumps(short))
    compile_programs(path / "a.toml", cache=path / "cache", purpose="evaluate")
    return path


def ours(place: Path, tasks, **settings) -> TaskResults:
    given = {"data": place / "tasks", "cache": place / "cache", "limit": LIMIT} | settings
    return evaluate_tasks(place / "a.toml", tasks, **given)


@pytest.fixture(scope="module")
def hugging_face(place: Path):
    """The same weights as lm-eval's own model of transformers."""
    from lm_eval.models.huggingface import HFLM

    return HFLM(
        pretrained=str(place / "source"), device="cpu", dtype="float32", max_length=CONTEXT,
        batch_size=COUNT,
    )  # fmt: skip


def theirs(model, place: Path, tasks, limit: int = LIMIT, **settings):
    """What lm-eval gives with transformers, on task files that name the same data."""
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.tasks import TaskManager

    include = place / f"include-{'-'.join(tasks)}"
    include.mkdir(exist_ok=True)
    import lm_eval

    folder = Path(lm_eval.__file__).parent / "tasks"
    for task in tasks:
        if task == SHORT:
            (include / f"{task}.yaml").write_text((place / f"{task}.yaml").read_text())
            continue
        (file,) = [
            one
            for one in folder.rglob("*.yaml")
            if f"\ntask: {task}\n" in "\n" + one.read_text().replace('"', "")
        ]
        dataset = {"dataset_path": "json", "dataset_name": None}
        if task == "wikitext":  # lm-eval reads the examples even where prompts have none
            dataset |= {"training_split": None, "validation_split": None}
        text = json.dumps({"include": str(file), "task": task} | dataset | data_of(place, task))
        (include / f"{task}.yaml").write_text(text)
    with _metrics_offline():  # their metric of programs is fetched
        return simple_evaluate(
            model,
            tasks=list(tasks),
            task_manager=TaskManager(include_path=str(include), include_defaults=False),
            limit=limit,
            confirm_run_unsafe_code=True,
            **settings,
        )


def data_of(place: Path, task: str) -> dict:
    files = {split: str(place / "tasks" / task / f"{split}.jsonl") for split in SPLITS[task]}
    return {"dataset_kwargs": {"data_files": files, "cache_dir": str(place / "datasets")}}


def numbers(results) -> dict:
    """The metrics of each task, without names and errors of sampling."""
    return {
        task: {
            name: value
            for name, value in metrics.items()
            if isinstance(value, int | float) and "stderr" not in name
        }
        for task, metrics in results.items()
    }


CHOICES = ["boolq", "mmlu_anatomy", "ceval-valid_law", "agieval_aqua_rat"]
TEXTS = ["gsm8k", "bbh_zeroshot_boolean_expressions", SHORT]


def same_answers(got: TaskResults, want) -> None:
    """Compare prompts, log-likelihoods, texts and metrics."""
    for task, samples in want["samples"].items():
        assert len(got.samples[task]) == len(samples) > 0
        for mine, other in zip(got.samples[task], samples, strict=True):
            assert mine["arguments"] == other["arguments"]
            assert mine["doc_id"] == other["doc_id"]
            for (answer,), (expected,) in zip(mine["resps"], other["resps"], strict=True):
                if isinstance(expected, str):
                    assert answer == expected
                elif isinstance(expected, float):  # of a text of a thousand tokens
                    assert answer == pytest.approx(expected, rel=1e-5)
                else:
                    assert answer[0] == pytest.approx(expected[0], abs=1e-4)
                    assert answer[1] == expected[1]
    assert got.document["n-shot"] == want["n-shot"]
    assert got.document["versions"] == want["versions"]
    for task, metrics in numbers(want["results"]).items():
        assert numbers(got.document["results"])[task] == pytest.approx(
            metrics, rel=1e-3 if task == "wikitext" else 1e-12
        )


@pytest.mark.parametrize(
    ("tasks", "limit"), [(CHOICES, COUNT), (TEXTS, COUNT), (["wikitext"], LIMIT)]
)
def test_scores_and_texts_are_those_of_transformers(place, hugging_face, tasks, limit):
    files = [str(place / f"{SHORT}.yaml") if task == SHORT else task for task in tasks]
    got = ours(place, files, limit=limit, allow_code=True)
    same_answers(got, theirs(hugging_face, place, tasks, limit))


def test_conversations_are_those_of_transformers(place, hugging_face):
    tasks = ["boolq", "mmlu_anatomy", SHORT]
    files = [*tasks[:2], str(place / f"{SHORT}.yaml")]
    got = ours(place, files, apply_chat_template=True, allow_code=True, fewshot=2)
    chat = {"apply_chat_template": True, "fewshot_as_multiturn": True, "num_fewshot": 2}
    want = theirs(hugging_face, place, tasks, **chat)
    assert "<user>" in want["samples"]["boolq"][0]["arguments"][0][0]
    same_answers(got, want)


def test_a_folder_of_hugging_face_is_evaluated_as_it_is(place, hugging_face):
    small = ["program.serve.prefill=[32]", "program.serve.slots=2"]
    compile_programs(
        place / "source", cache=place / "cache", purpose="evaluate", set=small, target="cpu:1"
    )
    words = [word for one in small for word in ("--set", one)]
    words += ["--tasks", "mmlu_anatomy", "--data", "tasks", "--limit", "2", "--cache", "cache"]
    command = [sys.executable, "-m", "graphtrain", "evaluate", "source", *words]
    files = ["--samples", "folder.jsonl", "--report", "folder.json"]
    subprocess.run([*command, *files], cwd=place, check=True, stdout=subprocess.DEVNULL)
    want = theirs(hugging_face, place, ["mmlu_anatomy"], 2)
    got = [json.loads(line) for line in (place / "folder.jsonl").read_text().splitlines()]
    for mine, other in zip(got, want["samples"]["mmlu_anatomy"], strict=True):
        for ((log_prob, is_greedy),), (expected,) in zip(
            mine["resps"], other["resps"], strict=True
        ):
            assert log_prob == pytest.approx(expected[0], abs=1e-4) and is_greedy == expected[1]
    report = json.loads((place / "folder.json").read_text())
    assert numbers(report["results"]) == numbers(want["results"])
    assert not (place / "source" / "evaluation").exists()


SMALL = ["boolq", "agieval_aqua_rat"]  # 2 answers a row


@pytest.fixture(scope="module")
def served(place: Path) -> Iterator[str]:
    """The address of the same weights, served."""
    compile_programs(place / "a.toml", cache=place / "cache", purpose="serve")
    words = ["serve", str(place / "a.toml"), "--cache", str(place / "cache"), "--port", "0"]
    with subprocess.Popen(
        [sys.executable, "-m", "graphtrain", *words], stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        lines = iter(process.stderr.readline, "")
        url = next(line for line in lines if line.startswith("listening on ")).split()[-1]
        assert any(line.startswith("ready after ") for line in lines)
        yield url
        process.terminate()


def test_the_client_of_lm_eval_gives_the_same_scores_of_a_server(place, hugging_face, served):
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    client = LocalCompletionsAPI(
        base_url=f"{served}/v1/completions", model="run", tokenizer=str(place / "source"),
        tokenizer_backend="huggingface", max_length=CONTEXT,
    )  # fmt: skip
    tasks = [*SMALL, SHORT]
    got, want = (theirs(model, place, tasks) for model in (client, hugging_face))
    for task in tasks:
        for mine, other in zip(got["samples"][task], want["samples"][task], strict=True):
            for (answer,), (expected,) in zip(mine["resps"], other["resps"], strict=True):
                if isinstance(expected, str):
                    assert answer == expected
                else:
                    assert answer[0] == pytest.approx(expected[0], abs=1e-4)
                    assert answer[1] == expected[1]
    assert numbers(got["results"]) == numbers(want["results"])


KILLED = """
import os, signal, sys
from graphtrain.api.evaluation import evaluate_tasks

def on_progress(kind, finished, count):
    if (kind, finished) == {at!r}:
        os.kill(os.getpid(), signal.SIGKILL)

evaluate_tasks(
    sys.argv[1] + "/a.toml", {tasks!r}, data=sys.argv[1] + "/tasks", cache=sys.argv[1] + "/cache",
    limit={limit}, step="last", set=["run.directory=" + sys.argv[1] + "/killed"],
    on_progress=on_progress, allow_code=True,
)
"""


def test_an_evaluation_that_was_killed_twice_computes_only_the_rest(place):
    """Its scores and texts are those of an evaluation that was not."""
    tasks = [*SMALL, str(place / f"{SHORT}.yaml")]
    for at in (("scoring", 7), ("generating", 2)):
        script = KILLED.format(tasks=tasks, limit=LIMIT, at=at)
        killed = subprocess.run([sys.executable, "-c", script, str(place)], check=False)
        assert killed.returncode == -signal.SIGKILL
    directory = {"set": [f"run.directory={place}/killed"]}
    counts = []
    resumed = ours(
        place, tasks, on_progress=lambda *given: counts.append(given), allow_code=True, **directory
    )
    requests = LIMIT * 2 * len(SMALL)
    assert resumed.document["graphtrain"]["reused_answers"] == requests + 2
    assert sorted(counts) == [
        *(("generating", done, LIMIT) for done in range(2, LIMIT + 1)),
        ("scoring", requests, requests),
    ]
    whole = ours(place, tasks, allow_code=True)
    assert numbers(resumed.document["results"]) == numbers(whole.document["results"])
    for task in [*SMALL, SHORT]:
        for mine, other in zip(resumed.samples[task], whole.samples[task], strict=True):
            for (answer,), (expected,) in zip(mine["resps"], other["resps"], strict=True):
                if isinstance(expected, str):
                    assert answer == expected
                    continue
                # Texts were beside others in a call, which may have had another size.
                assert answer[0] == pytest.approx(expected[0], abs=1e-5)
                assert answer[1] == expected[1]


def test_the_command_prints_and_writes_results(place, tmp_path):
    words = [str(place / "a.toml"), "--tasks", "boolq,mmlu_anatomy", "--data", str(place / "tasks"),
             "--cache", str(place / "cache"), "--limit", "2", "--fewshot", "1"]  # fmt: skip
    files = ["--samples", str(tmp_path / "samples.jsonl"), "--report", str(tmp_path / "r.json")]
    result = CliRunner().invoke(evaluate_command.command, [*words, *files])
    assert result.exit_code == 0, result.exception
    assert "boolq" in result.stdout and "anatomy" in result.stdout
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["n-shot"] == {"boolq": 1, "mmlu_anatomy": 1}
    origin = report["graphtrain"]
    assert origin["step"] == 0 and len(origin["data"]["boolq"]["validation"]["sha256"]) == 64
    lines = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert [one["task"] for one in lines] == ["boolq"] * 2 + ["mmlu_anatomy"] * 2
    printed = CliRunner().invoke(evaluate_command.command, [*words, "--json"])
    assert json.loads(printed.stdout)["results"] == report["results"]


def test_code_of_a_task_file_runs_confined_and_only_if_it_is_allowed(place):
    with pytest.raises(DataError, match="humaneval_short runs code that the model writes; pass"):
        ours(place, [str(place / f"{SHORT}.yaml")])
    got = ours(place, [str(place / f"{SHORT}.yaml")], allow_code=True, limit=2)
    assert got.document["results"]["humaneval_short"]["pass@1,create_test"] == 0.0
    with pytest.raises(DataError, match=r"humaneval: generates up to 1024 tokens, which leaves no"):
        ours(place, ["humaneval"], allow_code=True, limit=2)


def packaged(task: str) -> str:
    import lm_eval

    return str(Path(lm_eval.__file__).parent / "tasks" / task / f"{task}.yaml")


def test_a_missing_program_is_an_error_before_anything_is_computed(place, tmp_path):
    with pytest.raises(MissingProgram, match="compile") as missing:
        ours(place, ["boolq"], cache=tmp_path)
    assert missing.value.exit_status == 3
