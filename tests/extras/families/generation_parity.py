"""Engines on small models, compared with what the models' own code in PyTorch generates."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from generation_cases import CONTEXT, VOCAB, Case, generate, log_probs
from unoptimized import OPTIONS

import lowering
from graphtrain.cache import Cache
from graphtrain.compile.request_keys import request_keys
from graphtrain.config.resolve import ResolvedProgram, resolve
from graphtrain.config.schema import Batch, Data, Mesh, Program, Run, Serve, TorchModel
from graphtrain.graphs.build import build_graph
from graphtrain.run.serving import open_engine as opening
from graphtrain.run.serving.engine import CompiledEngine
from graphtrain.run.serving.engine_protocol import SamplingParameters, TokenChoice
from graphtrain.run.serving.open_engine import open_engine
from graphtrain.weights.hf_import import import_hugging_face
from graphtrain.weights.sources import ConvertedFolder

COUNT = 8
GREEDY = SamplingParameters(temperature=0.0, max_tokens=COUNT)
PROMPTS = [np.random.default_rng(0).integers(0, VOCAB, length).tolist() for length in (1, 17, 300)]


class ProgramsCompiledHere:
    """Programs as LoadedPrograms has them, compiled in this process and in little time."""

    def __init__(self, program: ResolvedProgram, cache: Cache, names: Sequence[str], _: str):
        self.keys = request_keys(program, names)
        self._loaded = {name: self._load(program, name) for name in names}

    def __getitem__(self, name: str) -> Any:
        return self._loaded[name]

    def inputs(self, graph: str, name: str) -> Any:
        return self._loaded[graph].inputs(name)

    def _load(self, program: ResolvedProgram, name: str) -> Any:
        backend = lowering.backend(program.target)
        graph = build_graph(program, name)
        lowered = backend.lower(graph, program.rules, program.mesh, program.target)
        if program.target.platform == "cpu":
            lowered = dataclasses.replace(lowered, options=lowered.options | OPTIONS)
        return backend.load(backend.compile(lowered), program.target)


def native_model(source: Path) -> tuple[Any, Path]:
    """Convert a folder; pad the vocabulary, so that tensor parallelism divides it."""
    ours = source.parent / "ours"
    import_hugging_face(source, ours, lambda done, count: None)
    model = ConvertedFolder(ours).model
    return dataclasses.replace(model, dtype="float32", vocab=264, vocab_padding=264 - VOCAB), ours


def engine_of(
    model: Any, weights: Path, target: str, mesh: dict[str, int], **serve: Any
) -> CompiledEngine:
    program = Program(
        target=target,
        mesh=Mesh(**mesh),
        model=model,
        batch=Batch(global_batch_size=8, seq_len=CONTEXT, microbatches=mesh.get("stage", 1)),
        serve=Serve(slots=4, prefill=(64,), **serve),
    )
    run = Run(directory=str(weights.parent / "run"), steps=1, data=Data(train="data"),
              init_from=str(weights))  # fmt: skip
    cache = Cache(weights.parent / "cache")
    with mock.patch.object(opening, "LoadedPrograms", ProgramsCompiledHere):
        return open_engine(resolve(program), run, cache, step=None, compile_hint="", vocab=VOCAB)


def begin(engine: CompiledEngine, slot: int, prompt: list[int], offset: int = 0) -> list:
    """Process a prompt from a position on; return a list with the first token."""
    choice = None
    for begin in range(offset, len(prompt), engine.chunk):
        chunk, is_last = prompt[begin : begin + engine.chunk], begin + engine.chunk >= len(prompt)
        choice = engine.prefill(slot, chunk, begin, GREEDY if is_last else None, prompt=prompt)
    return [choice]


def finish(engine: CompiledEngine, texts: dict[int, list[TokenChoice]]) -> None:
    """Generate until every sequence has ended; `texts` are tokens by slot."""
    while any(map(engine.is_active, texts)):
        for slot, added in enumerate(engine.decode()):
            texts[slot] += added


def assert_same(
    choices: list[TokenChoice], wanted: list[tuple[int, float]], tolerance: float
) -> None:
    assert [choice.token for choice in choices] == [token for token, _ in wanted]
    found = [choice.log_prob for choice in choices]
    np.testing.assert_allclose(found, [log_prob for _, log_prob in wanted], tolerance, tolerance)


def check_parity(
    case: Case,
    path: Path,
    *,
    is_native: bool,
    target: str = "cpu:1",
    mesh: dict[str, int] | None = None,
    tolerance: float = 1e-5,
) -> None:
    """Check greedy tokens, their log-probabilities, and those of a given text.

    Args:
        case: The model.
        path: An empty directory.
        is_native: Whether the model is converted to the native decoder, or traced as it is.
        target: Machine.
        mesh: Sizes of its axes.
        tolerance: Difference of log-probabilities, relative if they are above 1.
    """
    reference = case.save(path / "source")
    wanted = [generate(reference, prompt, COUNT) for prompt in PROMPTS]
    assert len({token for tokens in wanted for token, _ in tokens}) > 3  # it does not repeat itself
    folder = path / "source"
    imported = None if is_native else TorchModel(hf=str(folder), dtype="float32")
    model, weights = native_model(folder) if imported is None else (imported, folder)
    engine = engine_of(model, weights, target, mesh or {})
    for prompt, expected in zip(PROMPTS, wanted, strict=True):
        alone: dict[int, list] = {slot: [] for slot in range(engine.slots)}
        alone[1] = begin(engine, 1, prompt)
        finish(engine, alone)
        assert_same(alone[1], expected, tolerance)

    # In a full batch, which others join in the midst of a text; slot 1 has 256 tokens of slot 2.
    together = {slot: [] for slot in range(engine.slots)}
    for slot, prompt in ((2, PROMPTS[2]), (0, PROMPTS[0]), (3, PROMPTS[1])):
        together[slot] = begin(engine, slot, prompt)
        for index, added in enumerate(engine.decode() if slot == 2 else []):
            together[index] += added
    engine.copy_prefix(2, 1, 256)
    together[1] = begin(engine, 1, PROMPTS[2], 256)
    finish(engine, together)
    for slot, index in ((0, 0), (3, 1), (2, 2), (1, 2)):
        assert_same(together[slot], wanted[index], tolerance)
    # Of a prefix that ends far before what a slot holds, a rolling buffer has overwritten a part.
    assert engine.can_reuse(2, 100) != case.has_windows
    if case.has_windows:
        with pytest.raises(AssertionError, match="has overwritten"):
            engine.copy_prefix(2, 0, 100)

    scores = [choice.log_prob for choice in engine.score(PROMPTS[2])[1:] if choice is not None]
    rows = log_probs(reference, PROMPTS[2])[:-1].numpy()
    np.testing.assert_allclose(scores, rows[np.arange(299), PROMPTS[2][1:]], tolerance, tolerance)
