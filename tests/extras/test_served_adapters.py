"""LoRA adapters by name in one batch: each sequence is that of its adapter merged and alone."""

import dataclasses
import functools
from pathlib import Path

import jax
import numpy as np
import peft
import pytest
import torch
import transformers
from generation_parity import ProgramsCompiledHere
from random_models import GPT2, LLAMA, config_of

from graphtrain.cache import Cache
from graphtrain.config.resolve import resolve
from graphtrain.config.schema import Config, Mesh, Program
from graphtrain.errors import TrainingError
from graphtrain.models.attention.cache_layout import cache_layout
from graphtrain.run.serving import open_engine as opening
from graphtrain.run.serving.adapters import open_adapters, open_merged_adapter
from graphtrain.run.serving.engine import CompiledEngine
from graphtrain.run.serving.engine_protocol import SamplingParameters, SlotErrors, TokenChoice
from graphtrain.run.serving.open_engine import open_engine
from graphtrain.weights.hf_import import import_hugging_face

# Of peft and transformers to each other.
pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"
)

LLAMA_MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
# Model, mesh, and the modules of two adapters.
CASES = {
    "one device": (LLAMA, {}, ["q_proj", "v_proj"], LLAMA_MODULES),
    "mesh": (LLAMA, {"data": 2, "fsdp": 2, "tensor": 2}, ["o_proj", "k_proj"], LLAMA_MODULES),
    "packed": (GPT2, {"fsdp": 2, "tensor": 4}, ["c_attn"], ["c_attn", "c_fc", "mlp.c_proj"]),
}
NEW = 12  # tokens


@pytest.fixture(autouse=True)
def compiled_here(monkeypatch):
    """Engines compile their programs in this process, once for each test."""

    @functools.cache
    def compiled(settings: Program, names: tuple[str, ...]) -> ProgramsCompiledHere:
        return ProgramsCompiledHere(resolve(settings), Cache(Path()), names, "")

    monkeypatch.setattr(
        opening,
        "LoadedPrograms",
        lambda program, cache, names, remedy: compiled(program.settings, tuple(names)),
    )


def save_adapter(
    path: Path, name: str, modules: list[str], rank: int, scale: float = 0.2, **settings
) -> Path:
    """Save an adapter with random weights of the model in `source`."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path / "source")
    config = peft.LoraConfig(
        r=rank, lora_alpha=5, target_modules=modules, task_type="CAUSAL_LM", **settings
    )
    adapted = peft.get_peft_model(model, config)
    torch.manual_seed(rank)
    for parameter_name, parameter in adapted.named_parameters():
        if "lora_" in parameter_name:
            parameter.data = scale * torch.randn(parameter.shape)
    adapted.save_pretrained(path / name)
    return path / name


def with_rank(config: Config, rank: int, **settings) -> Config:
    """The configuration with room for adapters."""
    serve = dataclasses.replace(config.program.serve, total_adapter_rank=rank, **settings)
    return dataclasses.replace(config, program=dataclasses.replace(config.program, serve=serve))


def engine_of(config: Config, **folders: Path) -> CompiledEngine:
    program = resolve(config.program)
    adapters = open_adapters(program, config.run, None, folders, "graphtrain compile", pytest.fail)
    return open_engine(
        program, config.run, Cache(Path()), step=None, compile_hint="", vocab=257, adapters=adapters
    )


def generate(
    engine: CompiledEngine, sequences: list[tuple[str | None, list[int]]]
) -> list[list[TokenChoice]]:
    """Generate sequences in one batch, each with its adapter, greedily."""
    chosen: list[list[TokenChoice]] = []
    greedy = SamplingParameters(temperature=0.0, max_tokens=NEW)
    for slot, (adapter, prompt) in enumerate(sequences):
        choice = None
        for offset in range(0, len(prompt), engine.chunk):
            chunk = prompt[offset : offset + engine.chunk]
            sampling = greedy if offset + engine.chunk >= len(prompt) else None
            choice = engine.prefill(slot, chunk, offset, sampling, prompt=prompt, adapter=adapter)
        assert choice is not None
        chosen.append([choice])
    while any(engine.is_active(slot) for slot in range(len(sequences))):
        for choices, added in zip(chosen, engine.decode(), strict=False):
            choices += added
    return chosen


def log_probs(model: torch.nn.Module, prompt: list[int], new: list[int]) -> list[float]:
    """Log-probabilities of the tokens after a prompt, by transformers."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + new])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits, -1)[range(len(new)), new].tolist()


def assert_same(got: list[TokenChoice], want: list[TokenChoice], tolerance: float) -> None:
    assert [choice.token for choice in got] == [choice.token for choice in want]
    np.testing.assert_allclose(
        [choice.log_prob for choice in got],
        [choice.log_prob for choice in want],
        tolerance,
        tolerance,
    )


def config_for(path: Path, case: str) -> Config:
    source, mesh, *_ = CASES[case]
    config = config_of(path, source, **(mesh or {"data": 8}))
    serve = dataclasses.replace(config.program.serve, prefill=(16,))
    model = dataclasses.replace(config.program.model, vocab_padding=7)
    program = dataclasses.replace(config.program, serve=serve, model=model)
    if not mesh:
        program = dataclasses.replace(program, target="cpu:1", mesh=Mesh())
    return dataclasses.replace(config, program=program)


def fill_slots(engine: CompiledEngine, sequences: list[tuple[str | None, list[int]]]) -> None:
    """Process the beginning of each prompt."""
    greedy = SamplingParameters(temperature=0.0, max_tokens=NEW)
    for slot, (adapter, whole) in enumerate(sequences):
        prompt = whole[: engine.chunk]
        engine.prefill(slot, prompt, 0, greedy, prompt=prompt, adapter=adapter)


def write_nan(engine: CompiledEngine, slot: int) -> None:
    """Overwrite the KV cache of a slot."""
    axis = cache_layout(engine._program.target).key.index("b")

    def overwrite(array: jax.Array) -> jax.Array:
        return array.at[(slice(None),) * axis + (slot,)].set(np.nan)

    engine._model.state["kv_cache"] = jax.tree.map(overwrite, engine._model.state["kv_cache"])


def assert_overflows_stay_in_their_slot(
    engine: CompiledEngine,
    sequences: list[tuple[str | None, list[int]]],
    together: list[list[TokenChoice]],
) -> None:
    """Values that are not finite end their sequence, and neither others nor the next in its slot.

    Args:
        engine: Engine that has the adapter "overflowing".
        sequences: Sequences that are generated in one batch.
        together: What they are without a failure.
    """
    with pytest.raises(TrainingError, match="adapter 'overflowing' on the weights of"):
        generate(engine, [("overflowing", sequences[1][1])])
    for got, want in zip(generate(engine, sequences), together, strict=True):
        assert_same(got, want, 1e-6)
    fill_slots(engine, sequences)
    undisturbed = engine.decode()
    fill_slots(engine, sequences)
    write_nan(engine, slot=1)
    with pytest.raises(SlotErrors, match="not finite") as failed:
        engine.decode()
    assert list(failed.value.errors) == [1] and not engine.is_active(1)
    for slot, (want, got) in enumerate(zip(undisturbed, failed.value.choices, strict=True)):
        assert_same(got, [] if slot == 1 else want, 1e-6)
    for got, want in zip(generate(engine, sequences), together, strict=True):
        assert_same(got, want, 1e-6)


@pytest.mark.parametrize("case", CASES)
def test_each_sequence_of_a_batch_is_that_of_its_adapter(case, tmp_path):
    plain = config_for(tmp_path, case)
    first = save_adapter(tmp_path, "first", CASES[case][2], 3)
    second = save_adapter(tmp_path, "second", CASES[case][3], 5, use_rslora=True)
    adapters = {"first": first, "second": second}
    if case == "one device":
        adapters["overflowing"] = save_adapter(tmp_path, "third", CASES[case][2], 1, scale=1e30)
    served = engine_of(with_rank(plain, 9), **adapters)
    assert served.adapters == tuple(adapters)
    random = np.random.default_rng(0)
    prompts = [random.integers(0, 257, length).tolist() for length in (5, 40, 40, 17)]
    prompts[2] = prompts[1]  # the same prompt by two adapters
    names = [None, "first", "second", "first"]
    together = generate(served, list(zip(names, prompts, strict=True)))
    if case == "one device":
        sequences = list(zip(names, prompts, strict=True))
        assert_overflows_stay_in_their_slot(served, sequences, together)
    tokens = [[choice.token for choice in choices] for choices in together]
    assert tokens[1] != tokens[2]
    for name, prompt, choices in zip(names, prompts, together, strict=True):
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "source")
        if name is not None:
            model = peft.PeftModel.from_pretrained(model, tmp_path / name)
        new = [choice.token for choice in choices]
        expected = log_probs(model.eval(), prompt, new)
        np.testing.assert_allclose(
            [one.log_prob for one in choices], expected, atol=1e-5, rtol=1e-5
        )
        scored = served.score([*prompt, *new], adapter=name)[len(prompt) :]
        np.testing.assert_allclose([one.log_prob for one in scored], expected, atol=1e-5, rtol=1e-5)
    # The base beside adapters is the base of programs without any.
    (alone,) = generate(engine_of(plain), [(None, prompts[0])])
    assert_same(alone, together[0], 1e-6)
    # Merged while the weights are read, as `generate --adapter` does.
    program = resolve(plain.program)
    merged = open_merged_adapter(program, plain.run, None, "second", second, pytest.fail)
    engine = open_engine(
        program, plain.run, Cache(Path()), step=None, compile_hint="", vocab=257, merged=merged
    )
    (alone,) = generate(engine, [(None, prompts[2])])
    assert_same(alone, together[2], 1e-5)
    # An adapter is what it is merged.
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "source")
    merged = peft.PeftModel.from_pretrained(model, second).merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    import_hugging_face(tmp_path / "merged", tmp_path / "ours-merged", lambda done, count: None)
    run = dataclasses.replace(plain.run, init_from=str(tmp_path / "ours-merged"))
    served = engine_of(dataclasses.replace(plain, run=run))
    (alone,) = generate(served, [(None, prompts[2])])
    assert_same(alone, together[2], 1e-5)
