"""What generate writes is what transformers writes with the same weights, token for token."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import peft
import pytest
import tokenizers
import torch
import transformers
from click.testing import CliRunner
from random_models import GEMMA2, GPT2, LLAMA, config_of, save_model

from graphtrain.cache import Cache
from graphtrain.cli.generate import command
from graphtrain.config import render
from graphtrain.config.resolve import resolve
from graphtrain.config.schema import (
    Adapter,
    Batch,
    Config,
    Data,
    Mesh,
    Program,
    Run,
    Serve,
    TorchModel,
)
from graphtrain.config.serving_program import serving_program
from graphtrain.data.prepare.text import prepare
from graphtrain.data.tokenizers.huggingface import train_bpe
from graphtrain.errors import GraphtrainError
from graphtrain.run.generate import generate_tokens, open_generator
from graphtrain.run.serving.engine import CompiledEngine
from graphtrain.run.serving.engine_protocol import SamplingParameters

# A prompt of several chunks, and short ones; a mesh of one kind, of three, and a pipeline.
CASES = {
    "llama": (LLAMA, {"data": 2, "fsdp": 2, "tensor": 2}, 70),
    "gpt2": (GPT2, {"fsdp": 2, "tensor": 4}, 9),
    "pipeline": (LLAMA, {"stage": 2, "data": 4}, 1),
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Cache:
    return Cache(tmp_path_factory.mktemp("cache"))


def greedy_text(folder: Path, prompt: list[int], count: int) -> list[int]:
    """The tokens that transformers generates."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    settings = transformers.GenerationConfig(
        max_new_tokens=count, do_sample=False, pad_token_id=0, eos_token_id=None
    )
    tokens = torch.tensor([prompt])
    made = model.generate(tokens, settings, attention_mask=torch.ones_like(tokens))
    return made[0, len(prompt) :].tolist()


def engine_of(config: Config, cache: Cache) -> CompiledEngine:
    program = resolve(config.program)
    return open_generator(program, config.run, cache, lambda label, stage: None, None, 257)


def greedy(count: int, **settings) -> SamplingParameters:
    return SamplingParameters(temperature=0.0, max_tokens=count, **settings)


@pytest.mark.parametrize("name", CASES)
def test_the_best_tokens_are_those_of_transformers(name, cache, tmp_path):
    source, mesh, length = CASES[name]
    config = config_of(tmp_path, source, **mesh)
    prompt = np.random.default_rng(0).integers(0, 257, length).tolist()
    want = greedy_text(tmp_path / "source", prompt, 24)
    engine = engine_of(config, cache)
    assert list(generate_tokens(engine, prompt, greedy(24))) == want
    assert len(set(want)) > 3  # it does not repeat itself
    # Beyond the context of 96 tokens it goes on from the later half; a second prompt does not see
    # the first.
    text = [*prompt, *generate_tokens(engine, prompt, greedy(96 - length + 9))]
    assert text[97:] == list(generate_tokens(engine, text[97 - 48 : 97], greedy(8)))
    long = np.random.default_rng(1).integers(0, 257, 200).tolist()
    assert list(generate_tokens(engine, long, greedy(1))) == list(
        generate_tokens(engine, long[-95:], greedy(1))
    )
    drawn = SamplingParameters(temperature=1.0, top_k=50, seed=3, max_tokens=9)
    first, second = (list(generate_tokens(engine, prompt, drawn)) for _ in range(2))
    assert first == second != want[:9]
    with pytest.raises(GraphtrainError, match="the prompt is empty"):
        next(generate_tokens(engine, [], greedy(24)))


def test_a_sequence_does_not_depend_on_those_beside_it(cache, tmp_path):
    config = config_of(tmp_path, LLAMA, data=2, fsdp=2, tensor=2)
    engine = engine_of(config, cache)
    random = np.random.default_rng(0)
    prompts = [random.integers(0, 257, length).tolist() for length in (1, 17, 60, 70)]
    settings = [greedy(20), SamplingParameters(seed=1, max_tokens=20, top_p=0.9),
                SamplingParameters(seed=2, max_tokens=7, min_p=0.01),
                SamplingParameters(seed=1, max_tokens=20, repetition_penalty=1.3)]  # fmt: skip
    alone = [
        list(generate_tokens(engine, prompt, sampling))
        for prompt, sampling in zip(prompts, settings, strict=True)
    ]
    assert alone[0] == greedy_text(tmp_path / "source", prompts[0], 20)
    together: list[list[int]] = []
    for slot, (prompt, sampling) in enumerate(zip(prompts, settings, strict=True)):
        for offset in range(0, len(prompt), engine.chunk):
            chunk = prompt[offset : offset + engine.chunk]
            is_last = offset + engine.chunk >= len(prompt)
            choice = engine.prefill(
                slot, chunk, offset, sampling if is_last else None, prompt=prompt
            )
        together.append([choice.token])
    while any(map(engine.is_active, range(4))):
        for tokens, added in zip(together, engine.decode(), strict=False):
            tokens += [choice.token for choice in added]
    assert together == alone


def test_an_imported_model_generates_what_transformers_does(cache, tmp_path):
    save_model(tmp_path / "source", GEMMA2)
    model = TorchModel(hf=str(tmp_path / "source"), dtype="float32")
    program = Program(
        target="cpu:8", mesh=Mesh(data=4, fsdp=2), model=model,
        batch=Batch(global_batch_size=8, seq_len=96), serve=Serve(slots=2, prefill=(8, 32)),
    )  # fmt: skip
    run = Run(directory=str(tmp_path / "run"), steps=1, data=Data(train="data"),
              init_from=str(tmp_path / "source"))  # fmt: skip
    prompt = np.random.default_rng(0).integers(0, 257, 40).tolist()
    want = greedy_text(tmp_path / "source", prompt, 24)
    engine = engine_of(Config(program=program, run=run), cache)
    assert list(generate_tokens(engine, prompt, greedy(24))) == want


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "presence_penalty"])
def test_what_is_no_number_is_refused(name):
    with pytest.raises(GraphtrainError, match=f"{name} = nan: must be "):
        SamplingParameters(**{name: np.nan})


def test_a_prompt_of_other_bytes_than_text_is_refused():
    result = CliRunner().invoke(command, ["c.toml", "\udcff"])
    assert result.exit_code == 2 and "the prompt is not UTF-8 text" in result.output


def test_an_adapter_that_it_would_leave_out_is_refused_before_compiling(cache, tmp_path):
    config = config_of(tmp_path, LLAMA, data=8)
    adapted = dataclasses.replace(config.program, adapter=Adapter(rank=2, alpha=2.0))
    run = dataclasses.replace(config.run, init_adapter_from="adapter")
    with pytest.raises(GraphtrainError, match=r"does not read run\.init_adapter_from"):
        open_generator(resolve(adapted), run, cache, lambda label, stage: None, None)


def test_stages_hold_shards_and_slots_divide_among_replicas(tmp_path):
    config = config_of(tmp_path, LLAMA, data=2, fsdp=2, tensor=2)
    batch = Batch(global_batch_size=16, seq_len=96, microbatches=2)
    serve = Serve(slots=3, prefill=(64, 512))
    staged = dataclasses.replace(
        config.program, mesh=Mesh(stage=2, data=2, tensor=2), batch=batch, serve=serve
    )
    served = serving_program(resolve(staged))
    assert served.mesh.axes["fsdp"] == 2 and served.mesh.axes.get("stage", 1) == 1
    assert served.stages is None
    assert served.settings.serve.slots == 4
    assert served.settings.serve.prefill == (64, 96)  # no more than the context


def test_a_prompt_begins_as_the_documents_of_its_data(cache, tmp_path):
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    train_bpe(["the fox"], 257).save(folder)
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    (tmp_path / "corpus.jsonl").write_text('{"text": "the fox"}')
    config = config_of(tmp_path, LLAMA, data=8)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)

    def prompt(bos: bool | None, *arguments: str) -> dict:
        """The prompt's ids, of a run on data that was prepared with --bos, --no-bos or neither."""
        data = str(tmp_path / f"data-{bos}")
        prepare([tmp_path / "corpus.jsonl"], data, str(folder), bos=bos, validation=0)
        run = dataclasses.replace(config.run, data=Data(train=f"{data}/train"))
        (tmp_path / "c.toml").write_text(render(Config(program=config.program, run=run)))
        command_line = [str(tmp_path / "c.toml"), "the fox", "--tokens", "1", "--json"]
        command_line += ["--cache", str(cache.root), *arguments]
        result = CliRunner().invoke(command, command_line)
        assert result.exit_code == 0, result.exception
        answer = json.loads(result.stdout)
        assert answer["text"].startswith("the fox")
        return answer["prompt"]

    plain = theirs("the fox", add_special_tokens=False).input_ids
    assert prompt(None) == theirs("the fox").input_ids == [0, *plain]
    assert prompt(False) == prompt(None, "--no-bos") == plain
    assert prompt(False, "--bos") == [0, *plain]


@pytest.mark.filterwarnings(  # of peft and transformers to each other
    "ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"
)
def test_an_adapter_of_peft_is_merged(cache, tmp_path):
    config = config_of(tmp_path, LLAMA, data=8)
    train_bpe(["the fox"], 257).save(tmp_path / "ours")
    (tmp_path / "c.toml").write_text(render(config))
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "source")
    settings = peft.LoraConfig(r=3, lora_alpha=5, target_modules=["q_proj", "down_proj"])
    adapted = peft.get_peft_model(model, settings)
    torch.manual_seed(0)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            parameter.data = 0.2 * torch.randn(parameter.shape)
    adapted.save_pretrained(tmp_path / "adapter")
    adapted.merge_and_unload().save_pretrained(tmp_path / "merged")
    command_line = [str(tmp_path / "c.toml"), "the fox", "--tokens", "8", "--json", "--no-bos"]
    command_line += ["--cache", str(cache.root), "--temperature", "0"]

    def answer(*arguments: str) -> dict:
        result = CliRunner().invoke(command, [*command_line, *arguments])
        assert result.exit_code == 0, result.exception
        return json.loads(result.stdout)

    base = answer()
    expected = greedy_text(tmp_path / "merged", base["prompt"], 8)
    assert expected != base["tokens"]
    for word in (f"{tmp_path}/adapter", f"tuned={tmp_path}/adapter"):
        assert answer("--adapter", word)["tokens"] == expected


def test_without_a_tokenizer_it_says_where_one_could_be(tmp_path):
    config = config_of(tmp_path, LLAMA, data=8)
    (tmp_path / "c.toml").write_text(render(config))
    result = CliRunner().invoke(command, [str(tmp_path / "c.toml"), "a"])
    assert "no tokenizer" in str(result.exception)
