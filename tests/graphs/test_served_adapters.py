"""LoRA adapters in one batch of a served program, against the same weights merged and alone."""

import dataclasses

import jax
import numpy as np
import pytest
from programs import CUBE, LLAMA, loaded, placed_inputs, program, state_of

from graphtrain.config.resolve import resolve
from graphtrain.config.schema import MixtureOfExperts, Program, Serve
from graphtrain.graphs.names import ADAPTER_RANKS, graphs_for
from graphtrain.models.lora.trainable import ADAPTERS, served_adapter_arrays
from graphtrain.models.shapes import parameter_arrays
from graphtrain.run.serving.engine_protocol import SamplingParameters
from graphtrain.run.serving.request_arrays import request_arrays
from graphtrain.weights.named_adapters import NamedAdapter, joined_factors, rank_intervals
from lowering.trees import Tree, flatten, unflatten

SERVE = Serve(slots=4, context_length=48, prefill=(8,), tokens_per_call=3)
SHARED = dataclasses.replace(
    LLAMA, moe=MixtureOfExperts(experts=4, experts_per_token=2, shared_expert_mlp=16)
)
# Adapters and lengths of the prompts in the slots.
SLOTS = [(None, 5), ("first", 13), ("second", 13), ("first", 8)]


def adapters_of(of: Program, *ranks: int) -> list[NamedAdapter]:
    """Adapters with random factors of all matrices that a program adapts, the first of fewer."""
    random, arrays = np.random.default_rng(0), served_adapter_arrays(of)
    paths = sorted({path.rpartition("/")[0] for path in arrays})
    adapters = []
    for name, rank in zip(("first", "second"), ranks, strict=True):
        factors = {}
        for path in paths if name == "second" else paths[:3]:
            shapes = (arrays[f"{path}/lora_{letter}"].shape[1:] for letter in "ab")
            first, second = shapes
            for layer in range(of.model.layers):
                factors[path, layer] = (
                    0.2 * random.standard_normal((*first[:-1], rank), np.float32),
                    0.2 * random.standard_normal((rank, *second[1:]), np.float32),
                )
        adapters.append(NamedAdapter(name, factors))
    return adapters


def merged(parameters: Tree, adapter: NamedAdapter) -> Tree:
    arrays = {path: np.array(array) for path, array in flatten(parameters).items()}
    for (path, layer), (first, second) in adapter.factors.items():
        arrays[path][layer] += np.tensordot(first, second, 1)
    return unflatten(arrays)


def generate(
    of: Program, parameters: Tree, adapters: list[NamedAdapter], slots: list[tuple[str | None, int]]
) -> tuple[np.ndarray, np.ndarray]:
    """Prompts and two calls of decode; return the tokens and log-probabilities by slot.

    The last prompt is also scored, and its log-probabilities follow.
    """
    served = graphs_for(resolve(of), "serve")[0].settings

    def graph(name: str):
        return loaded.__wrapped__(served, name)

    def ranks_of(graph, name: str | None) -> dict:
        interval = np.array(rank_intervals(adapters).get(name, (0, 0)), np.int32)
        return {ADAPTER_RANKS: interval} if served.serve.total_adapter_rank else {}

    load, prefill, decode, score = map(graph, ("serve_init", "prefill_8", "decode", "score_8"))
    inputs = {"parameters": parameters}
    if served.serve.total_adapter_rank:
        inputs[ADAPTERS] = unflatten(joined_factors(adapters, served))
    made = load(*(placed_inputs(load, name, tree) for name, tree in inputs.items()))
    weights, state = made["weights"], made["state"]
    sampling = SamplingParameters(temperature=0.0, max_tokens=7)
    random = np.random.default_rng(0)
    for slot, (name, length) in enumerate(slots):
        request = request_arrays(sampling, (), 64, 64) | ranks_of(prefill, name)
        request = placed_inputs(prefill, "request", request)
        prompt = random.integers(0, 64, 16, np.int32)
        for offset in range(0, length, 8):
            count, is_last = min(8, length - offset), np.int32(offset + 8 >= length)
            tokens = placed_inputs(prefill, "tokens", prompt[None, offset : offset + 8])
            scalars = np.int32(count), np.int32(slot), np.int32(offset), is_last
            outputs = prefill(weights, state, tokens, *scalars, request)
            state = outputs["state"]
    every = placed_inputs(decode, "enabled", np.ones(4, np.int32))
    chosen, log_probs = [], []
    for _ in range(2):
        outputs = decode(weights, state, every)
        state = outputs["state"]
        chosen.append(np.asarray(outputs["choices"]["token"]))
        log_probs.append(np.asarray(outputs["choices"]["top_log_probs"]))
    zeros = jax.tree.map(lambda like: np.zeros(like.shape, like.dtype), score.inputs("kv_cache"))
    scores = score(
        weights,
        placed_inputs(score, "kv_cache", zeros),
        placed_inputs(score, "tokens", prompt[None, :8]),
        placed_inputs(score, "targets", prompt[1:9]),
        np.int32(0),
        *(
            placed_inputs(score, ADAPTER_RANKS, ranks)
            for ranks in ranks_of(score, slots[-1][0]).values()
        ),
    )
    given = np.asarray(scores["choices"]["log_prob"])
    rows = np.concatenate(log_probs).transpose(1, 0, 2).reshape(len(slots), -1)
    return np.concatenate(chosen), [*rows, given]


@pytest.mark.parametrize("where", ["alone", "mesh", "shared expert"])
def test_a_sequence_is_what_its_adapter_merged_and_alone_gives(where):
    of = program(
        model=SHARED if where == "shared expert" else LLAMA,
        serve=SERVE,
        **CUBE if where == "mesh" else {},
    )
    adapted = dataclasses.replace(of, serve=dataclasses.replace(SERVE, total_adapter_rank=8))
    parameters, adapters = state_of(of)["parameters"], adapters_of(adapted, 3, 4)
    tokens, together = generate(adapted, parameters, adapters, SLOTS)
    for name in (None, "first", "second"):
        weights = parameters
        if name is not None:
            weights = merged(parameters, next(one for one in adapters if one.name == name))
        expected, alone = generate(of, weights, [], SLOTS)
        tolerance = 1e-6 if name is None else 1e-5
        for slot in (slot for slot, (other, _) in enumerate(SLOTS) if other == name):
            assert tokens[:, slot].tolist() == expected[:, slot].tolist()
            np.testing.assert_allclose(together[slot], alone[slot], tolerance, tolerance)
        if name == SLOTS[-1][0]:
            np.testing.assert_allclose(together[-1], alone[-1], tolerance, tolerance)
    assert np.abs(together[1] - alone[1]).max() > 0.01  # the adapters differ


def test_adapters_lie_beside_a_base_in_int8():
    serve = dataclasses.replace(SERVE, weights_dtype="int8")
    of = program(serve=serve)
    adapted = dataclasses.replace(of, serve=dataclasses.replace(serve, total_adapter_rank=7))
    parameters, adapters = state_of(of)["parameters"], adapters_of(adapted, 3, 4)
    _, together = generate(adapted, parameters, adapters, SLOTS)
    _, base = generate(of, parameters, [], SLOTS)
    _, merged_first = generate(of, merged(parameters, adapters[0]), [], SLOTS)
    np.testing.assert_allclose(together[0], base[0], 1e-6, 1e-6)
    error = np.abs(together[-1] - merged_first[-1]).max()
    assert error < 0.2 * np.abs(base[-1] - merged_first[-1]).max()


def test_factors_are_split_as_the_weights_that_they_adapt():
    of = program(serve=dataclasses.replace(SERVE, total_adapter_rank=8), **CUBE)
    specs, parameters = served_adapter_arrays(of), parameter_arrays(of.model)
    assert specs["layers/attention/output/lora_a"].axes == ("layers", "heads", "head_dim", "rank")
    assert specs["layers/mlp/up/lora_b"].axes == ("layers", "rank", "mlp")
    assert {path.rpartition("/")[0] for path in specs} < parameters.keys()
