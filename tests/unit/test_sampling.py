"""The choice of the next token from the logits, inside a program."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from graphtrain.errors import GraphtrainError
from graphtrain.graphs.sampling import choose
from graphtrain.run.serving.engine_protocol import SamplingParameters
from graphtrain.run.serving.request_arrays import request_arrays
from lowering.machine.target import Target
from lowering.tracing.current_target import trace_for_target

SHARES = np.array([0.1, 0.4, 0.2, 0.3])
LOGITS = np.log(SHARES)
DRAWS = 4000


def sequences(vocab: int, count: int, **settings) -> dict:
    """Sequences whose tokens are at different positions, with the same sampling parameters."""
    prompt = settings.pop("prompt", [])
    request = request_arrays(SamplingParameters(**settings), prompt, vocab, vocab)
    rows = {name: jnp.asarray(np.stack([value] * count)) for name, value in request.items()}
    generated = jnp.zeros((count, vocab))
    return rows | {"generated": generated, "position": jnp.arange(count)}


def chooser() -> Callable[[jax.Array, dict], jax.Array]:
    """A function that returns the tokens: a new one, since JAX's traces do not know the target."""
    return jax.jit(lambda logits, rows: choose(logits, rows)["token"])


def shares(logits: np.ndarray = LOGITS, **settings) -> np.ndarray:
    many = jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (DRAWS, len(logits)))
    tokens = chooser()(many, sequences(len(logits), DRAWS, **settings))
    return np.bincount(tokens, minlength=len(logits)) / DRAWS


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, SHARES),
        ({"seed": 7}, SHARES),
        ({"top_k": 2}, [0, 4 / 7, 0, 3 / 7]),
        ({"top_k": 9}, SHARES),
        ({"top_p": 0.69}, [0, 4 / 7, 0, 3 / 7]),
        ({"top_p": 0.71}, [0, 4 / 9, 2 / 9, 3 / 9]),
        ({"top_p": 1e-6}, [0, 1, 0, 0]),
        ({"min_p": 0.6}, [0, 4 / 7, 0, 3 / 7]),
        ({"top_k": 3, "top_p": 0.7}, [0, 4 / 7, 0, 3 / 7]),  # 0.7 of what top_k leaves
        ({"temperature": 0.5}, SHARES**2 / (SHARES**2).sum()),
        ({"temperature": 0.0}, [0, 1, 0, 0]),
        ({"temperature": 1e-9}, [0, 1, 0, 0]),
        ({"temperature": 0.0, "logit_bias": {1: -100.0}}, [0, 0, 0, 1]),
    ],
)
def test_tokens_are_drawn_by_their_shares(settings, expected):
    np.testing.assert_allclose(shares(**settings), expected, atol=0.03)


WIDE = np.random.default_rng(0).normal(size=300) * 1.5  # more than one block of _draw


def distribution(temperature=1.0, top_k=300, top_p=1.0, min_p=0.0) -> np.ndarray:
    """Probabilities of the tokens of WIDE, by their definitions and a sort."""
    scaled = np.exp(WIDE / temperature)
    order = np.argsort(-scaled)[:top_k]
    cumulative = np.cumsum(scaled[order] / scaled[order].sum())
    order = order[: np.searchsorted(cumulative, top_p) + 1]
    order = order[scaled[order] >= min_p * scaled.max()]
    kept = np.zeros(len(WIDE))
    kept[order] = scaled[order] / scaled[order].sum()
    return kept


@pytest.mark.parametrize("target", ["cpu:1", "trn1:1"])  # two random generators
@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.6},
        {"top_k": 40},
        {"top_p": 0.8},
        {"min_p": 0.05},
        {"temperature": 1.3, "top_k": 100, "top_p": 0.9, "min_p": 0.02},
    ],
    ids=str,
)
def test_frequencies_pass_a_chi_square_test(settings, target):
    with trace_for_target(Target.parse(target)):
        counts = shares(WIDE, **settings) * DRAWS
    expected = distribution(**settings) * DRAWS
    is_kept = expected > 0
    assert counts[~is_kept].sum() == 0
    is_frequent = expected >= 5  # rarer ones are counted together, as the test requires
    groups = [
        np.append(array[is_frequent], array[is_kept & ~is_frequent].sum())
        for array in (counts, expected)
    ]
    observed, wanted = (group[groups[1] > 0] for group in groups)
    assert scipy.stats.chisquare(observed, wanted).pvalue > 1e-3


@pytest.mark.parametrize("target", ["cpu:1", "trn1:1"])
def test_a_token_does_not_depend_on_the_sequences_beside_it(target):
    settings: list[dict] = [
        {"seed": 1}, {"seed": 2, "top_k": 30}, {"temperature": 0.0}, {"seed": 1, "top_p": 0.7},
        {"seed": 3, "min_p": 0.1, "temperature": 1.7}, {"seed": 4, "repetition_penalty": 1.5},
    ]  # fmt: skip
    logits = jnp.asarray(np.random.default_rng(1).normal(size=(len(settings), 300)) * 2)
    rows = [sequences(300, 1, **one) | {"position": jnp.array([9])} for one in settings]
    stacked = jax.tree.map(lambda *arrays: np.concatenate(arrays), *rows)
    chosen = chooser()
    with trace_for_target(Target.parse(target)):
        together = chosen(logits, stacked).tolist()
        for index, row in enumerate(rows):
            assert chosen(logits[index][None], row).tolist() == [together[index]]


def test_penalties_are_those_of_their_papers():
    logits = jnp.array([[2.0, -1.0, 0.5, 1.9]])
    row = sequences(4, 1, temperature=0.0, repetition_penalty=2.0, prompt=[0])
    assert choose(logits, row)["token"] == 3  # 2 / 2 < 1.9
    row["generated"] = row["generated"].at[0, 3].set(2)
    assert choose(logits, row)["token"] == 0  # 1.9 / 2 < 2 / 2
    row = sequences(4, 1, temperature=0.0, presence_penalty=1.0, frequency_penalty=0.3, prompt=[0])
    row["generated"] = row["generated"].at[0, 0].set(1)
    assert choose(logits, row)["token"] == 3  # 2 - 1 - 0.3; the prompt does not count
    row["generated"] = row["generated"].at[0, 3].set(2)
    assert choose(logits, row)["token"] == 0  # 1.9 - 1 - 2 * 0.3


def test_log_probabilities_are_of_the_model_before_penalties():
    logits = jnp.array([[2.0, -1.0, 0.5, 1.9]])
    choice = choose(logits, sequences(4, 1, temperature=0.0, logit_bias={2: 50.0}))
    log_probs = jax.nn.log_softmax(logits)[0]
    assert choice["token"] == 2
    np.testing.assert_allclose(choice["log_prob"], log_probs[2:3], rtol=1e-6)
    assert choice["top"][0].tolist() == [0, 3, 2, 1]
    np.testing.assert_allclose(choice["top_log_probs"][0], np.sort(log_probs)[::-1], rtol=1e-6)


def test_requests_that_no_program_can_take_are_refused():
    with pytest.raises(GraphtrainError, match="9 stop tokens; at most 8"):
        request_arrays(SamplingParameters(stop_tokens=range(9)), [], 16, 16)
    with pytest.raises(GraphtrainError, match="token 12 is not in the vocabulary"):
        request_arrays(SamplingParameters(logit_bias={12: 1.0}), [], 16, 12)
    assert request_arrays(SamplingParameters(), [], 16, 12)["bias"][12:].max() < -1e9
