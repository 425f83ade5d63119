"""Beam search finds what that of transformers finds with the same weights, token for token."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from random_models import GPT2, LLAMA, config_of, save_model

from graphtrain.cache import Cache
from graphtrain.config.resolve import resolve
from graphtrain.config.schema import Batch, Config, Data, Mesh, Program, Run, Serve, TorchModel
from graphtrain.errors import GraphtrainError
from graphtrain.run.generate import open_generator
from graphtrain.run.serving.beam_search import Beam, BeamSettings, beam_search
from graphtrain.run.serving.engine import CompiledEngine

VOCAB, NEW = 257, 20
LENGTHS = (1, 17, 40)  # of prompts; in chunks of 8 and 32, of which the last one is padded
LLAMA_OF_8_HEADS = transformers.LlamaConfig(
    **LLAMA.to_dict() | {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 4}
)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Cache:
    return Cache(tmp_path_factory.mktemp("cache"))


def engine_of(config: Config, cache: Cache, beams: int) -> CompiledEngine:
    serve = dataclasses.replace(config.program.serve, beams=beams)
    program = resolve(dataclasses.replace(config.program, serve=serve))
    return open_generator(program, config.run, cache, lambda label, stage: None, None, VOCAB)


def theirs(
    model: transformers.PreTrainedModel,
    prompt: list[int],
    beams: int,
    eos: int,
    penalty: float,
) -> list[list[int]]:
    """The beams that transformers returns, best first, without what pads them."""
    settings = transformers.GenerationConfig(
        max_new_tokens=NEW, do_sample=False, num_beams=beams, num_return_sequences=beams,
        length_penalty=penalty, pad_token_id=VOCAB - 1, eos_token_id=eos,
    )  # fmt: skip
    tokens = torch.tensor([prompt])
    found = model.generate(tokens, settings, attention_mask=torch.ones_like(tokens))
    texts = [row[len(prompt) :].tolist() for row in found]
    return [row[: row.index(eos) + 1] if eos in row else row for row in texts]


def ours(engine: CompiledEngine, prompt: list[int], eos: int, penalty: float) -> list[list[int]]:
    settings = BeamSettings(beams=engine.beams, length_penalty=penalty)
    found = beam_search(engine, prompt, settings, NEW, lambda tokens: tokens[-1] == eos)
    return [list(beam.tokens) for beam in found]


def compare(engine: CompiledEngine, folder: Path, eos: int) -> None:
    """Compare the beams of prompts of several lengths; some end before others."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    random, lengths = np.random.default_rng(0), set[int]()
    for prompt in [random.integers(0, VOCAB - 1, length).tolist() for length in LENGTHS]:
        for penalty in (1.0, 0.0):
            want = theirs(model, prompt, engine.beams, eos, penalty)
            assert ours(engine, prompt, eos, penalty) == want
            lengths |= {len(row) for row in want}
    assert NEW in lengths and len(lengths) > 2


# Model, mesh, beams, and an end-of-sequence token: one that these models often choose. All meshes
# but the first shard the batch, so that all slots are computed.
CASES = {
    "8 heads": (LLAMA_OF_8_HEADS, {"tensor": 8}, 4, 78),
    "llama": (LLAMA, {"data": 2, "fsdp": 2, "tensor": 2}, 2, 205),
    "llama 4": (LLAMA, {"data": 2, "fsdp": 2, "tensor": 2}, 4, 28),
    "gpt2": (GPT2, {"stage": 2, "data": 4}, 2, 226),
    "gpt2 4": (GPT2, {"stage": 2, "data": 4}, 4, 77),
}


@pytest.mark.parametrize("name", CASES)
def test_the_beams_of_a_native_model(name, cache, tmp_path):
    source, mesh, beams, eos = CASES[name]
    config = config_of(tmp_path, source, **mesh)
    compare(engine_of(config, cache, beams), tmp_path / "source", eos)


def test_the_beams_of_an_imported_model(cache, tmp_path):
    save_model(tmp_path / "source", LLAMA)
    model = TorchModel(hf=str(tmp_path / "source"), dtype="float32")
    program = Program(
        target="cpu:8", mesh=Mesh(data=4, fsdp=2), model=model,
        batch=Batch(global_batch_size=8, seq_len=96), serve=Serve(slots=2, prefill=(8, 32)),
    )  # fmt: skip
    run = Run(directory=str(tmp_path / "run"), steps=1, data=Data(train="data"),
              init_from=str(tmp_path / "source"))  # fmt: skip
    engine = engine_of(Config(program=program, run=run), cache, 4)
    compare(engine, tmp_path / "source", 28)


def test_the_beams_of_a_model_with_windows_after_a_long_prompt(cache, tmp_path):
    """The rolling buffers of 256 positions come around in the prompt, or while beams grow."""
    settings = {"sliding_window": 16, "max_position_embeddings": 400}
    named = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    save_model(
        tmp_path / "source", transformers.MistralConfig(**LLAMA.to_dict() | settings | named)
    )
    program = Program(
        target="cpu:8", mesh=Mesh(data=4, fsdp=2),
        model=TorchModel(hf=str(tmp_path / "source"), dtype="float32"),
        batch=Batch(global_batch_size=8, seq_len=400), serve=Serve(slots=3, prefill=(8, 32)),
    )  # fmt: skip
    run = Run(directory=str(tmp_path / "run"), steps=1, data=Data(train="data"),
              init_from=str(tmp_path / "source"))  # fmt: skip
    engine = engine_of(Config(program=program, run=run), cache, 3)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "source")
    for length in (250, 300):
        prompt = np.random.default_rng(length).integers(0, VOCAB - 1, length).tolist()
        assert ours(engine, prompt, 28, 1.0) == theirs(model, prompt, 3, 28, 1.0)
        assert not engine.can_reuse(0, 100)


def test_what_does_not_fit_into_the_context_is_refused(cache, tmp_path):
    engine = engine_of(config_of(tmp_path, LLAMA, tensor=2, fsdp=4), cache, 2)
    settings = BeamSettings(beams=2, length_penalty=1.0)

    def search(prompt: list[int]) -> list[Beam]:
        return beam_search(engine, prompt, settings, 7, lambda tokens: False)

    assert len(search([1] * 90)[0].tokens) == 7
    with pytest.raises(GraphtrainError, match="prompt of 91 tokens and 7 new ones do not fit"):
        search([1] * 91)
    with pytest.raises(GraphtrainError, match="the prompt is empty"):
        search([])
