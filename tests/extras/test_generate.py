"""What generate writes is what transformers writes with the same weights, token for token."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
import transformers
from click.testing import CliRunner

from graphtrain.cache import Cache
from graphtrain.cli.generate import command
from graphtrain.config import render
from graphtrain.config.resolve import resolve
from graphtrain.config.schema import Adapter, Batch, Config, Data, Mesh, Program, Run
from graphtrain.data.prepare.text import prepare
from graphtrain.data.tokenizers.huggingface import train_bpe
from graphtrain.errors import GraphtrainError
from graphtrain.run.generate import Generator, Sampling, generation_program, sample_token
from graphtrain.weights.convert import import_hugging_face
from graphtrain.weights.sources import ConvertedFolder

LLAMA = transformers.LlamaConfig(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=257,
    initializer_range=0.3,
)
GPT2 = transformers.GPT2Config(
    n_embd=32, n_layer=2, n_head=4, n_positions=96, vocab_size=257, initializer_range=0.3
)


def config_of(path: Path, source: transformers.PretrainedConfig, **mesh) -> Config:
    """A run on 8 devices that would start from a model with random weights."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(source)
    model.save_pretrained(path / "source")
    import_hugging_face(path / "source", path / "ours", lambda done, count: None)
    settings = dataclasses.replace(ConvertedFolder(path / "ours").model, dtype="float32", vocab=264)
    program = Program(
        target="cpu:8",
        mesh=Mesh(**mesh),
        model=settings,
        batch=Batch(global_batch_size=4, seq_len=96),
    )
    run = Run(
        directory=str(path / "run"), steps=1, data=Data(train="data"), init_from=str(path / "ours")
    )
    return Config(program=program, run=run)


# A prompt of more than one part of 64, and one of less.
CASES = {
    "llama": (LLAMA, {"data": 2, "fsdp": 2, "tensor": 2}, 70),
    "gpt2": (GPT2, {"fsdp": 2, "tensor": 4}, 9),
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Cache:
    return Cache(tmp_path_factory.mktemp("cache"))


@pytest.mark.parametrize("name", CASES)
def test_the_best_tokens_are_those_of_transformers(name, cache, tmp_path):
    source, mesh, length = CASES[name]
    config = config_of(tmp_path, source, **mesh)
    prompt = np.random.default_rng(0).integers(0, 257, length).tolist()
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "source")
    settings = transformers.GenerationConfig(
        max_new_tokens=24, do_sample=False, pad_token_id=0, eos_token_id=None
    )
    tokens = torch.tensor([prompt])
    made = model.generate(tokens, settings, attention_mask=torch.ones_like(tokens))
    want = made[0, length:].tolist()
    generator = Generator(
        resolve(config.program), config.run, cache, lambda label, stage: None, None
    )
    greedy = Sampling(temperature=0.0)
    assert list(generator.tokens(prompt, 24, greedy, 257)) == want
    assert len(set(want)) > 3  # it does not repeat itself
    # Beyond the context of 96 tokens it goes on from the later half; a second prompt does not see
    # the first.
    text = [*prompt, *generator.tokens(prompt, 96 - length + 9, greedy, 257)]
    assert text[97:] == list(generator.tokens(text[97 - 48 : 97], 8, greedy, 257))
    long = np.random.default_rng(1).integers(0, 257, 200).tolist()
    assert list(generator.tokens(long, 1, greedy, 257)) == list(
        generator.tokens(long[-95:], 1, greedy, 257)
    )
    drawn = Sampling(temperature=1.0, top_k=50, seed=3)
    first, second = (list(generator.tokens(prompt, 9, drawn, 257)) for _ in range(2))
    assert first == second != want[:9]
    with pytest.raises(GraphtrainError, match="the prompt is empty"):
        next(generator.tokens([], 1, greedy, 257))


def test_tokens_are_drawn_by_their_shares():
    scores = np.log(np.array([0.1, 0.4, 0.2, 0.3]))
    random = np.random.default_rng(0)

    def shares(**settings) -> np.ndarray:
        sampling = Sampling(**{"temperature": 1.0} | settings)
        drawn = [sample_token(scores, sampling, random) for _ in range(4000)]
        return np.bincount(drawn, minlength=4) / 4000

    np.testing.assert_allclose(shares(), [0.1, 0.4, 0.2, 0.3], atol=0.03)
    np.testing.assert_allclose(shares(top_k=2), [0, 4 / 7, 0, 3 / 7], atol=0.03)
    np.testing.assert_allclose(shares(top_p=0.69), [0, 4 / 7, 0, 3 / 7], atol=0.03)
    np.testing.assert_allclose(shares(top_p=0.71), [0, 4 / 9, 2 / 9, 3 / 9], atol=0.03)
    cold = np.array([0.1, 0.4, 0.2, 0.3]) ** 2
    np.testing.assert_allclose(shares(temperature=0.5), cold / cold.sum(), atol=0.03)
    assert shares(temperature=0.0).tolist() == [0, 1, 0, 0]
    assert shares(top_k=9).tolist() != [0, 1, 0, 0]


@pytest.mark.parametrize("wrong", [{"temperature": np.nan}, {"top_p": np.nan}])
def test_what_is_no_number_is_refused(wrong):
    with pytest.raises(GraphtrainError, match=r"temperature = .* and top-p = "):
        Sampling(**wrong)


def test_a_prompt_of_other_bytes_than_text_is_refused():
    result = CliRunner().invoke(command, ["c.toml", "\udcff"])
    assert result.exit_code == 2 and "the prompt is not UTF-8 text" in result.output


def test_an_adapter_that_it_would_leave_out_is_refused_before_compiling(cache, tmp_path):
    config = config_of(tmp_path, LLAMA, data=8)
    adapted = dataclasses.replace(config.program, adapter=Adapter(rank=2, alpha=2.0))
    run = dataclasses.replace(config.run, init_adapter_from="adapter")
    with pytest.raises(GraphtrainError, match=r"does not read run\.init_adapter_from"):
        Generator(resolve(adapted), run, cache, lambda label, stage: None, None)


def test_a_pipeline_is_refused_and_the_batch_is_one_for_each_copy(tmp_path):
    config = config_of(tmp_path, LLAMA, data=2, fsdp=2, tensor=2)
    assert generation_program(resolve(config.program)).batch == Batch(
        global_batch_size=4, seq_len=96
    )
    batch = Batch(global_batch_size=16, seq_len=96, microbatches=2)
    staged = dataclasses.replace(config.program, mesh=Mesh(stage=2, data=4), batch=batch)
    with pytest.raises(
        GraphtrainError, match=r"does not support pipeline.*program\.mesh\.stage = 2"
    ):
        generation_program(resolve(staged))


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


def test_without_a_tokenizer_it_says_where_one_could_be(tmp_path):
    config = config_of(tmp_path, LLAMA, data=8)
    (tmp_path / "c.toml").write_text(render(config))
    result = CliRunner().invoke(command, [str(tmp_path / "c.toml"), "a"])
    assert "no tokenizer" in str(result.exception)
