"""lm-eval on an engine without a model: requests, answers, examples, data and errors."""

import json
import math
import random
from pathlib import Path

import pytest
from task_files import COUNT, SPLITS, row, write_tasks
from toy_engine import ToyEngine

from graphtrain.config import load_config
from graphtrain.config.schema import Config
from graphtrain.data.prepare.chat_templates import find_template
from graphtrain.data.tokenizers.byte import ByteTokenizer
from graphtrain.data.tokenizers.huggingface import HuggingFaceTokenizer
from graphtrain.errors import DataError
from graphtrain.run.batch_generation import Continuation
from graphtrain.run.evaluation.answer_journal import AnswerJournal, NoAnswers
from graphtrain.run.evaluation.evaluate_tasks import evaluate_tasks
from graphtrain.run.evaluation.harness_model import EngineModel
from graphtrain.run.evaluation.loaded_tasks import LoadedTasks
from graphtrain.run.evaluation.task_catalog import TaskCatalog
from graphtrain.run.evaluation.task_directory import check_directory, errors_of, fill_script
from graphtrain.run.evaluation.task_results import metric_values
from graphtrain.run.evaluation.task_settings import TaskSettings
from graphtrain.run.evaluation.text_format import TextFormat, ends_of_texts
from graphtrain.run.serving.chat_format import ChatFormat

# The engine says that a text is impossible where a model would give it a small probability.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")

TOKENIZER = ByteTokenizer()


@pytest.fixture
def place(tmp_path) -> Path:
    write_tasks(tmp_path / "tasks")
    return tmp_path


def evaluated(place: Path, *tasks: str, engine: ToyEngine | None = None, **settings):
    engine = engine or ToyEngine(context_length=4096, chunk=256)
    given = {"data": place / "tasks", "limit": 3, **settings}
    progress = given.pop("progress", lambda kind, finished, count: None)
    return evaluate_tasks(
        TaskSettings(tasks=tasks, **given),
        lambda: (engine, TextFormat(TOKENIZER, ())),
        {"run": "toy", "step": 1},
        place / "answers.jsonl",
        progress,
    )


def test_log_likelihoods_are_those_of_the_texts_and_examples_are_in_the_prompts(place):
    results = evaluated(place, "boolq", "mmlu_anatomy", fewshot=2)
    engine = ToyEngine(context_length=4096, chunk=256)
    for task in ("boolq", "mmlu_anatomy"):
        samples = results.samples[task]
        assert len(samples) == 3
        for sample in samples:
            for (context, end), (answer,) in zip(sample["arguments"], sample["resps"], strict=True):
                begin = len(context.encode())
                choices = engine.score((context + end).encode())[begin:]
                assert math.isclose(answer[0], sum(one.log_prob for one in choices))
                assert context.count("Answer:") == 3
    example = row("mmlu_anatomy", 0)  # the first rows of the split dev
    assert example["question"] in results.samples["mmlu_anatomy"][0]["arguments"][0][0]
    assert results.document["n-shot"] == {"boolq": 2, "mmlu_anatomy": 2}
    assert 0 <= results.document["results"]["boolq"]["acc,none"] <= 1
    assert "boolq" in results.table()
    document = json.loads(results.json())
    assert document["graphtrain"]["data"]["boolq"]["validation"]["file"].endswith(".jsonl")
    assert len(results.sample_lines().splitlines()) == 6


def test_texts_end_before_stop_strings_and_answers_are_not_computed_again(place):
    counts: list[tuple] = []

    class Interrupted(Exception):
        pass

    def interrupt(kind, finished, count):
        if finished == 2:
            raise Interrupted

    task = "bbh_zeroshot_boolean_expressions"
    with pytest.raises(Interrupted):
        evaluated(place, task, progress=interrupt)
    results = evaluated(place, task, progress=lambda *given: counts.append(given))
    assert counts[0] == ("generating", 2, 3) and counts[-1] == ("generating", 3, 3)
    assert results.document["graphtrain"]["reused_answers"] == 2
    again = ToyEngine(context_length=4096, chunk=256)
    same = evaluated(place, task, engine=again)
    assert again.calls == []
    assert same.samples[task] == results.samples[task]
    for sample in results.samples[task]:
        (context, settings), ((answer,),) = sample["arguments"][0], sample["resps"]
        prompt = list(context.encode())
        toy = ToyEngine(context_length=4096, chunk=256)
        tokens: list[int] = []
        while len(tokens) < 256 and not any(
            stop in bytes(tokens).decode(errors="replace") for stop in settings["until"]
        ):
            tokens.append(toy._answer([*prompt, *tokens], 0))
        want = bytes(tokens).decode(errors="replace")
        for stop in settings["until"]:
            want = want.partition(stop)[0]
        assert answer == want


def test_a_group_has_the_tasks_that_lm_eval_gives_it(place):
    reports = check_directory(["mmlu", "bbh_zeroshot", "ceval-valid", "agieval"], place / "tasks")
    names = [report.task for report in reports]
    assert sum(name.startswith("mmlu_") for name in names) == 57
    assert sum(name.startswith("bbh_zeroshot_") for name in names) == 27
    assert sum(name.startswith("ceval-valid_") for name in names) == 52
    assert sum(name.startswith("agieval_") for name in names) == 21
    found = [report for report in reports if report.problem is None]
    assert sorted(one.task for one in found) == sorted(
        task for task in SPLITS if task.startswith(("mmlu", "bbh", "ceval", "agieval"))
    )
    assert {file["rows"] for one in found for file in one.files.values()} == {COUNT}
    (told,) = errors_of(reports, ["mmlu", "agieval"], place / "tasks")
    assert told.startswith(f"{place}/tasks has no files of 153 of 157 tasks: mmlu_abstract_alge")
    assert "of mmlu_abstract_algebra, no " in told and "tasks mmlu agieval --script" in told
    (place / "tasks" / "mmlu_anatomy" / "test.jsonl").write_text("")
    reports = check_directory(["mmlu_stem", "mmlu_anatomy"], place / "tasks")
    assert len(errors_of(reports, ["mmlu_stem"], place / "tasks")) == 2  # a damaged file is named


def test_a_group_that_is_evaluated_has_its_own_result(place, tmp_path):
    (tmp_path / "pair.yaml").write_text(json.dumps({
        "group": "pair", "task": ["boolq", "agieval_aqua_rat"],
        "aggregate_metric_list": [{"metric": "acc", "weight_by_size": True}],
    }))  # fmt: skip
    results = evaluated(place, str(tmp_path / "pair.yaml")).document
    parts = [results["results"][task]["acc,none"] for task in ("boolq", "agieval_aqua_rat")]
    assert results["groups"]["pair"]["acc,none"] == pytest.approx(sum(parts) / 2)


def test_what_is_missing_is_named(place, tmp_path):
    def fails(message, *tasks, **settings):
        with pytest.raises(DataError, match=message):
            evaluated(place, *tasks, **settings)

    fails(r"--tasks bolq: lm-eval has no task.*did you mean.*boolq", "bolq")
    empty = tmp_path / "empty"
    empty.mkdir()
    fails(rf"boolq: no {empty}/boolq/validation.jsonl or {empty}/super_glue/boolq/", "boolq",
          data=empty)  # fmt: skip
    (place / "tasks" / "boolq" / "train.jsonl").unlink()
    assert evaluated(place, "boolq").document["n-samples"]["boolq"]["effective"] == 3
    fails(r"boolq: no .*/boolq/train.jsonl.*; there is validation.jsonl", "boolq", fewshot=2)
    file = place / "tasks" / "boolq" / "validation.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    del rows[1]["label"]
    file.write_text("".join(f"{json.dumps(one)}\n" for one in rows))
    fails(r"validation.jsonl: row 2 has no field 'label'", "boolq")
    file.write_text('{"passage": "a", "label": 1}\n')
    fails(r"validation.jsonl: has no field 'question'", "boolq")
    file.write_text("not json\n")
    fails(r"validation.jsonl: cannot be read as rows \(line 1 is no JSON", "boolq")
    file.write_bytes(b'{"passage": "a"}\n{"passage": "\xff"}\n')
    fails("validation.jsonl: line 2 is not UTF-8", "boolq")
    for line, reason in (
        ('["a"]', "is no object of JSON"),
        ('{"passage": "a", "passage": "b"}', "has the field 'passage' twice"),
        ('{"passage": "\\ud83d"}', "has half of a surrogate pair"),
    ):
        file.write_text(f'{{"passage": "a"}}\n{line}\n')
        fails(rf"validation.jsonl: cannot be read as rows \(line 2 {reason}", "boolq")
    file.write_text(f'{{"passage": {"[" * 100_000}{"]" * 100_000}, "question": "a", "label": 1}}\n')
    fails("validation.jsonl: line 1 is nested too deeply", "boolq")
    fails("the task boolq reads data; name its directory with --data", "boolq", data=None)
    fails("humaneval runs code that the model writes; pass --allow-code", "humaneval")
    unconfined = "longproc_pseudo_to_code_0.5k"
    fails(f"{unconfined} runs code .* by its own means", unconfined, allow_code=True)
    (file.parent / "validation.parquet").touch()
    fails("validation.jsonl and .*validation.parquet are the same split", "boolq")
    (file.parent / "validation.parquet").unlink()
    (place / "tasks" / "super_glue" / "boolq").mkdir(parents=True)
    (place / "tasks" / "super_glue" / "boolq" / "validation.jsonl").touch()
    fails("boolq/validation.jsonl and .*super_glue/boolq/validation.jsonl are the same", "boolq")
    (place / "tasks" / "super_glue" / "boolq" / "validation.jsonl").unlink()
    file.write_text("")
    fails("validation.jsonl: has no rows", "boolq")
    small = ToyEngine(context_length=200, chunk=64)
    fails(r"gsm8k: generates up to 256 tokens, which leaves no room", "agieval_aqua_rat", "gsm8k",
          engine=small)  # fmt: skip
    assert small.calls == []  # found before anything is computed


@pytest.mark.parametrize(
    ("task", "changed", "message"),
    [
        ("boolq", {"label": 2}, "answer 2 is none of the 2 choices"),
        ("boolq", {"label": -1}, "answer -1 is none of the 2 choices; test sets whose"),
        ("mmlu_anatomy", {"answer": 4}, "answer 4 is none of the 4 choices"),
        ("mmlu_anatomy", {"choices": ["a", None, "c", "d"]}, "null or NaN in its field 'choices'"),
        ("boolq", {"passage": float("nan")}, "has no field 'passage'"),
        ("mmlu_anatomy", {"choices": ["a", "b"]}, "the task cannot read it (UndefinedError: list"),
        (
            "ceval-valid_law",
            {"answer": "E"},
            "the task cannot read it (ValueError: 'E' is not in list)",
        ),
        ("agieval_aqua_rat", {"gold": [0, 7]}, "answer 7 is none of the 2 choices"),
        ("boolq", {"label": 0.5}, "answer 0.5 is none of the 2 choices"),
        ("agieval_aqua_rat", {"gold": []}, "it has no answer"),
        ("boolq", {"passage": ["a"]}, "its field 'passage' is a list, and in the rows before it a"),
        ("gsm8k", {"answer": " "}, "it has no answer"),
        ("gsm8k", {"answer": "7"}, "its answer has no '#### ', after which the result is read"),
    ],
)
def test_a_row_that_no_score_can_be_made_of_is_named(place, task, changed, message):
    file = place / "tasks" / task / f"{SPLITS[task][-1]}.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    rows[2] |= changed
    (place / "tasks" / "boolq" / "train.jsonl").unlink()  # its labels are integers
    file.write_text("".join(f"{json.dumps(one)}\n" for one in rows))
    with pytest.raises(DataError) as raised:
        evaluated(place, task)
    told = str(raised.value)
    assert str(file) in told and "row 3" in told and message in told
    (report,) = check_directory([task], place / "tasks")
    assert report.problem == told


@pytest.mark.parametrize(
    ("task", "changed", "message"),
    [
        ("mmlu_anatomy", {"answer": -1}, "its answer -1 is none of the 4 choices"),
        ("mmlu_anatomy", {"answer": 9}, "its answer 9 is none of the 4 choices"),
        ("gsm8k", {"answer": ""}, "it has no answer"),
    ],
)
def test_a_row_that_is_no_example_is_named(place, task, changed, message):
    file = place / "tasks" / task / f"{SPLITS[task][0]}.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    rows[1] |= changed
    file.write_text("".join(f"{json.dumps(one)}\n" for one in rows))
    with pytest.raises(DataError) as raised:
        evaluated(place, task, fewshot=3)
    assert f"{task}: row 2 of {file}: {message}" in str(raised.value)
    (report,) = check_directory([task], place / "tasks")
    assert (report.problem is None) == (task == "mmlu_anatomy")  # whose prompts have none
    if task == "mmlu_anatomy":
        assert evaluated(place, task).document["n-shot"] == {task: 0}


def test_files_that_a_task_names_itself_are_checked_and_have_digests(place, monkeypatch):
    monkeypatch.chdir(place)
    task, rows = place / "own.yaml", [json.dumps(row("boolq", index)) for index in range(4)]

    def write(**files: str) -> None:
        own = {"task": "own", "dataset_path": "json", "dataset_name": None, "training_split": None}
        own |= {"dataset_kwargs": {"data_files": files}}
        (base,) = TaskCatalog().tasks("boolq")
        task.write_text(json.dumps({"include": str(base.path), **own}))

    write(validation="own/*.jsonl")
    (place / "own").mkdir()
    hidden = json.dumps(row("boolq", 3) | {"label": -1})
    for message, line in (
        ("row 4 of {}: its answer -1 is none of the 2 choices", hidden),
        ("{}: cannot be read as rows (line 4 has half of a surr", '{"passage": "\\ud83d"}'),
        ("{}: row 4 has no field 'passage'", '{"question": "a", "label": 1}'),
    ):
        file = place / "own" / "rows.jsonl"
        file.write_text("\n".join([*rows[:3], line]))
        with pytest.raises(DataError) as raised:
            evaluated(place, str(task), data=None, limit=None)
        assert message.format(file) in str(raised.value)
        (report,) = check_directory([str(task)], place)
        assert report.problem == str(raised.value)
    file.write_text("\n".join(rows))
    (place / "own" / "more.jsonl").write_text(rows[0])
    results = evaluated(place, str(task), data=None, limit=None).document
    digests = results["graphtrain"]["data"]["own"]
    assert {name: one["file"] for name, one in digests.items()} == {
        "validation.1": str(place / "own" / "more.jsonl"), "validation.2": str(file)
    }  # fmt: skip
    (report,) = check_directory([str(task)], place)
    assert report.files["validation.2"] == digests["validation.2"] | {"rows": 4}
    write(validation="absent.jsonl")
    with pytest.raises(DataError, match=rf"own: {place}/absent.jsonl: no such file; .* of {place}"):
        evaluated(place, str(task), data=None)


def test_fields_that_have_other_types_in_the_examples_are_named(place):
    file = place / "tasks" / "mmlu_anatomy" / "dev.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    file.write_text("".join(f"{json.dumps(one | {'answer': 'A'})}\n" for one in rows))
    with pytest.raises(DataError, match=r"the field 'answer' is .*, and in .*it is .*write both"):
        evaluated(place, "mmlu_anatomy")


def test_what_lm_eval_cannot_do_is_said_in_one_line(place, monkeypatch):
    with pytest.raises(
        DataError, match=r"evaluate agieval_aqua_rat with 1 examples \(AssertionErr"
    ):
        evaluated(place, "agieval_aqua_rat", fewshot=1)
    monkeypatch.setattr(ToyEngine, "score_packed", lambda *given: [].pop())
    with pytest.raises(IndexError):  # a defect of ours keeps its traceback
        evaluated(place, "boolq")


def test_code_runs_confined(place):
    results = evaluated(place, "humaneval", "boolq", allow_code=True, limit=2)
    assert results.document["results"]["humaneval"]["pass@1,create_test"] == 0.0
    for sample in results.samples["humaneval"]:
        (said,) = sample["code_eval"]
        assert said.startswith("failed: ")
    assert not any("code_eval" in sample for sample in results.samples["boolq"])


def test_answers_that_are_drawn_repeatedly_give_majorities_and_pass_at_k(place):
    """Of eight answers with seeds of their own, the last five are right."""

    def answer(tokens, seed: int) -> int:
        told = bytes(tokens)
        begin = max(told.rfind(b"A:") + 2, told.rfind(b"x +") + 3)
        texts = (b" The answer is 42.\n\n", b" -1\n#") if seed > 2 else (b" 7\n\n", b" 7\n#")
        text = texts[b"x +" in told]
        return text[(len(told) - begin) % len(text)]

    for name, base, count in (("majority", "gsm8k_cot_self_consistency", 24),
                              ("programs", "humaneval_64", 12)):  # fmt: skip
        file = f"{packaged(base)}\ntask: {name}\nrepeats: 8\n"
        (place / f"{name}.yaml").write_text(file + f"generation_kwargs: {settings_of(base, count)}")
        (place / "tasks" / name).symlink_to(SOURCES[base])
    tasks = [str(place / f"{name}.yaml") for name in ("majority", "programs")]
    engine = ToyEngine(context_length=4096, chunk=256, answer=answer)
    found = evaluated(place, *tasks, engine=engine, allow_code=True, limit=1)
    results, (sample,) = found.document["results"], found.samples["programs"]
    assert [said == "passed" for said in sample["code_eval"]] == [False] * 3 + [True] * 5
    assert results["majority"]["exact_match,score-first"] == 0
    assert results["majority"]["exact_match,maj@8"] == 1
    wrong = math.comb(3, 2) / math.comb(8, 2)  # all of two answers
    assert results["programs"]["pass@2,create_test"] == pytest.approx(1 - wrong)
    assert results["programs"]["pass@8,create_test"] == 1


SOURCES = {"gsm8k_cot_self_consistency": "gsm8k", "humaneval_64": "humaneval"}


def packaged(task: str) -> str:
    """The line that includes a packaged task."""
    (task_file,) = TaskCatalog().tasks(task)
    return f"include: {task_file.path}"


def settings_of(task: str, count: int) -> str:
    """The settings of generation of a packaged task, with shorter texts."""
    (task_file,) = TaskCatalog().tasks(task)
    return json.dumps(task_file.settings["generation_kwargs"] | {"max_gen_toks": count})


def test_texts_that_are_cut_are_counted(place):
    engine = ToyEngine(context_length=60, chunk=16)
    assert evaluated(place, "boolq", engine=engine).document["graphtrain"]["cut_texts"] == 6
    (place / "answers.jsonl").unlink()
    assert evaluated(place, "boolq").document["graphtrain"]["cut_texts"] == 0


def test_datasets_of_two_owners_may_have_the_same_name(place):
    (place / "tasks" / "boolq").rename(place / "tasks" / "moved")
    (place / "tasks" / "aps" / "super_glue").mkdir(parents=True)
    (place / "tasks" / "moved").rename(place / "tasks" / "aps" / "super_glue" / "boolq")
    results = evaluated(place, "boolq").document["graphtrain"]["data"]["boolq"]
    assert "/aps/super_glue/boolq/" in results["validation"]["file"]


def test_a_program_fills_a_directory(tmp_path):
    script = fill_script(["boolq", "mmlu_anatomy"], tmp_path)
    compile(script, "fill.py", "exec")
    assert "('boolq', 'aps/super_glue', 'boolq', ['validation', 'train'], {})" in script
    assert "('mmlu_anatomy', 'cais/mmlu', 'anatomy', ['test', 'dev'], {})" in script


def test_tasks_that_are_loaded_once_give_each_model_the_same_requests(place, tmp_path):
    settings = TaskSettings(tasks=("boolq",), data=place / "tasks", limit=3, fewshot=2)
    random.seed(5)
    before = random.getstate()
    (tmp_path / "scratch").mkdir()
    tasks = LoadedTasks(settings, tmp_path / "scratch")
    results = []
    for _ in range(2):
        engine = ToyEngine(context_length=4096, chunk=256)
        model = EngineModel(engine, TextFormat(TOKENIZER, ()), NoAnswers(), lambda *given: None)
        results.append(tasks.evaluate(model, is_chat=False, bootstrap_iterations=0))
    assert random.getstate() == before
    assert results[0]["samples"] == results[1]["samples"]
    assert metric_values(results[0]["results"]) == metric_values(results[1]["results"])


def test_metrics_have_the_names_of_lm_evals_loggers():
    results = {
        "boolq": {"alias": "boolq", "acc,none": 0.5, "acc_stderr,none": 0.1},
        "gsm8k": {"exact_match,strict-match": 0, "exact_match_stderr,strict-match": "N/A"},
    }
    assert metric_values(results) == {"boolq/acc": 0.5, "gsm8k/exact_match,strict-match": 0.0}
    assert metric_values(results, errors=True) == {"boolq/acc": 0.1}


SHUFFLED = """
task: shuffled
dataset_path: shuffled
test_split: test
output_type: generate_until
process_docs: !function shuffled.process
doc_to_text: "{{word}}"
doc_to_target: "{{word}}"
generation_kwargs: {until: ["x"], max_gen_toks: 1}
metric_list: [{metric: exact_match}]
"""
PROCESS = """
import random

def process(dataset):
    return dataset.map(lambda row: {"word": random.choice("abcdefghijklmnopqrstuvwxyz")})
"""


def test_tasks_that_draw_when_they_are_loaded_draw_from_the_seed_of_lm_eval(place):
    (place / "shuffled.yaml").write_text(SHUFFLED)
    (place / "shuffled.py").write_text(PROCESS)
    (place / "tasks" / "shuffled").mkdir()
    rows = "".join(json.dumps({"row": index}) + "\n" for index in range(8))
    (place / "tasks" / "shuffled" / "test.jsonl").write_text(rows)
    random.seed(7)
    results = evaluated(place, str(place / "shuffled.yaml"), limit=8)
    seeded = random.Random(0)
    want = [seeded.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(8)]
    assert [one["arguments"][0][0] for one in results.samples["shuffled"]] == want


def test_examples_that_a_group_asks_for_are_not_taken_from_the_rows_that_are_evaluated(place):
    member = {"task": "mmlu_anatomy", "num_fewshot": 2}
    (place / "shots.yaml").write_text(json.dumps({"group": "shots", "task": [member]}))
    results = evaluated(place, str(place / "shots.yaml"))
    assert results.document["n-shot"]["mmlu_anatomy"] == 2
    (place / "tasks" / "mmlu_anatomy" / "dev.jsonl").unlink()
    with pytest.raises(DataError, match=r"mmlu_anatomy: no .*/mmlu_anatomy/dev.jsonl"):
        evaluated(place, str(place / "shots.yaml"))


@pytest.fixture
def journal(tmp_path):
    with AnswerJournal(tmp_path / "answers.jsonl") as opened:
        yield opened


def harness_model(journal, engine: ToyEngine, chat: ChatFormat | None = None) -> EngineModel:
    return EngineModel(engine, TextFormat(TOKENIZER, (), chat), journal, lambda *given: None)


def test_a_text_after_no_token_is_refused(journal):
    model = harness_model(journal, ToyEngine())
    for end in ([5], [5, 6]):
        with pytest.raises(DataError, match="a context of spaces alone"):
            model._loglikelihood_tokens([(None, [], end)])


def test_what_ends_an_answer_of_a_conversation_ends_a_text_and_the_penalty_is_kept(journal):
    chat = ChatFormat(find_template("chatml", TOKENIZER), TOKENIZER, (), (65, 66), ("END",))
    model = harness_model(journal, ToyEngine(context_length=512), chat)
    settings = {"until": ["x"], "repetition_penalty": 1.5, "top_k": 3, "do_sample": False}
    request = model._sequence("prompt", settings, 0, "task")
    assert set(request.sampling.stop_tokens) == {65, 66} | ({TOKENIZER.eod} - {None})
    assert "END" in request.stop and "x" in request.stop
    assert request.sampling.repetition_penalty == 1.5
    assert (request.sampling.temperature, request.sampling.top_k) == (0.0, 0)


def test_a_text_has_no_space_where_the_decoder_begins_a_text_without_one(journal):
    import tokenizers

    words = {word: index for index, word in enumerate(["\u2581it", "\u2581is", "\u2581so", "</s>"])}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(words, []))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    made.decoder = tokenizers.decoders.Metaspace()
    made.add_special_tokens(["</s>"])
    text = TextFormat(HuggingFaceTokenizer(made.to_str().encode()), (0,))
    model = EngineModel(ToyEngine(), text, journal, lambda *given: None)
    answers = [Continuation(" is so", (1, 2), "length", 0.0), Continuation("", (), "stop", 0.0)]
    assert [model._answer(one, ["x"]) for one in answers] == ["is so", ""]
    assert made.decode([1, 2]) == "is so"  # as lm-eval's own models decode it


def test_bytes_that_are_no_character_are_decoded_with_those_beside_them(journal):
    import tokenizers

    pieces = ["\u2581it", "<0xE5>", "<0x5D>", "<0x37>", "\u2581is", "</s>"]
    words = {word: index for index, word in enumerate(pieces)}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(words, [], byte_fallback=True))
    made.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace("\u2581", " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
        ]
    )
    made.add_special_tokens(["</s>"])
    text = TextFormat(HuggingFaceTokenizer(made.to_str().encode()), (0,))
    model = EngineModel(ToyEngine(), text, journal, lambda *given: None)
    grown = Continuation("7\ufffd]7 is", (3, 1, 2, 3, 4), "length", 0.0)  # token by token
    assert model._answer(grown, ["x"]) == made.decode([3, 1, 2, 3, 4]) == "\ufffd" * 4 + " is"
    assert model._answer(grown, [" i"]) == "\ufffd" * 4


def test_what_generates_nothing_is_refused(journal):
    model = harness_model(journal, ToyEngine(context_length=512))
    for settings, problem in (
        ({"until": ["x", ""]}, "task: until has an empty text"),
        ({"until": ["x"], "max_gen_toks": 0}, "task: max_gen_toks is 0"),
    ):
        with pytest.raises(DataError, match=problem):
            model.check_generation(settings, "task")


def test_a_text_ends_at_all_tokens_that_end_it_for_transformers(tmp_path, journal):
    settings = """
[program]
target = "cpu:1"
model = { layers = 1, embed = 8, heads = 2, mlp = 8, vocab = 264 }
batch = { global_batch_size = 8, seq_len = 8 }
[run]
directory = "run"
steps = 1
data = { train = "data" }
"""
    folder = tmp_path / "converted" / "hugging_face"
    folder.mkdir(parents=True)
    config = load_config(settings, [f'run.init_from="{folder.parent}"'])

    def stop_tokens() -> tuple[int, ...]:
        engine = ToyEngine(context_length=512)
        model = EngineModel(engine, _with_ends(config), journal, lambda *given: None)
        return tuple(model._sequence("a", {"until": ["x"]}, 0, "task").sampling.stop_tokens)

    assert stop_tokens() == (256,)
    (folder / "config.json").write_text('{"eos_token_id": 7}')
    assert stop_tokens() == (256, 7)
    (folder / "generation_config.json").write_text('{"eos_token_id": [256, 8, 9]}')
    assert stop_tokens() == (256, 8, 9)
    (folder / "generation_config.json").write_text('{"eos_token_id": ["a"]}')
    with pytest.raises(DataError, match=r"generation_config.json: eos_token_id = \['a'\] is no"):
        stop_tokens()


def _with_ends(config: Config) -> TextFormat:
    return TextFormat(TOKENIZER, (), ends=ends_of_texts(config))
