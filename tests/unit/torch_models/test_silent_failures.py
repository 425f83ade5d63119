"""What traces of PyTorch are known to lose without a word: done right here, or refused."""

from pathlib import Path

import jax
import numpy as np
import pytest
import torch

from graphtrain.config.schema import Imported
from graphtrain.torch_models.apart import check_apart
from graphtrain.torch_models.attention import attend
from graphtrain.torch_models.blocks import Stack
from graphtrain.torch_models.errors import ImportedModelError
from graphtrain.torch_models.model import open_model
from graphtrain.torch_models.parity import check_parity
from graphtrain.torch_models.versions import check_versions
from lowering.trees import flatten

MODULES = Path(__file__).with_name("modules.py")


def model(name: str, **overrides) -> Imported:
    return Imported(torch=f"{MODULES}:{name}", vocab=16, dtype="float32", overrides=overrides)


@pytest.mark.parametrize(
    "name", ["NoGrad", "Detached", "OwnGradient", "Arange", "InPlace", "LeftPadded", "Attending"]
)
def test_done_right_it_has_the_gradients_of_pytorch(name):
    found = check_parity(model(name), (2, 6))
    assert found.loss <= 1e-5 and found.gradient <= 1e-4 and found.compared == {}


def test_positions_that_meet_elsewhere_than_in_attention_do_not_pass_for_apart():
    assert check_apart(model("Attending")) <= 1e-4
    with pytest.raises(ImportedModelError, match="see each other elsewhere than in attention"):
        check_apart(model("Attending", neighbours=True))


def test_a_write_through_a_view_is_a_mismatch_with_its_cause():
    with pytest.raises(ImportedModelError) as caught:
        check_parity(model("ThroughAView"), (2, 6))
    assert "is not what PyTorch computes: loss" in str(caught.value)
    assert "gradients differ most of" in str(caught.value)
    assert "mul_ at" in str(caught.value) and "modules.py" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Autocast", "enters torch.autocast, which would be ignored"),
        ("Checkpointed", "set program.model.remat"),
        ("RunningStatistics", "changes its buffer norm."),
        ("PlainTensor", "neither a parameter nor a buffer; register it"),
        ("ByValue", r"depends on the values of a tensor.*modules\.py"),
        ("RandomBuffer", "buffer features has no value"),
    ],
)
def test_what_cannot_be_done_is_refused_with_the_reason(name, words):
    with pytest.raises(ImportedModelError, match=words):
        open_model(model(name))


def test_dropout_is_that_of_the_key_and_none_without_one():
    opened = open_model(model("Dropped"))
    parameters = opened.initialise(jax.random.key(0))
    tokens = np.arange(8, dtype=np.int32)[None]

    def out(key):
        return np.asarray(opened.forward(parameters, tokens, key)[0])

    first, again, other = (out(jax.random.key(seed)) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other) and not np.array_equal(first, out(None))
    kept = np.mean(np.any(first != 0, -1))
    assert kept == 1  # the head sees what is left of each position


def test_queries_that_see_nothing_get_zeros_and_no_gradient():
    random = np.random.default_rng(0)
    query, key, value = random.normal(size=(3, 1, 2, 4, 8)).astype(np.float32)
    seen = np.array([[0, 0, 0, 0], [1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0]], bool)
    for mask in (seen, np.where(seen, 0, -np.inf).astype(np.float32)):
        out, back = jax.vjp(lambda *x, m=mask: attend(*x, m), query, key, value)
        assert not np.any(out[:, :, 0])
        assert all(np.isfinite(gradient).all() for gradient in back(np.ones_like(out)))


def test_attention_is_pytorchs_with_groups_masks_and_scales():
    random = np.random.default_rng(1)
    query = random.normal(size=(2, 4, 5, 8)).astype(np.float32)
    key, value = random.normal(size=(2, 2, 2, 5, 8)).astype(np.float32)
    bias = random.normal(size=(2, 4, 5, 5)).astype(np.float32)
    for mask, causal, scale in ((None, True, None), (bias, False, 0.3), (None, False, None)):
        want = torch.nn.functional.scaled_dot_product_attention(
            *map(torch.tensor, (query, key, value)),
            None if mask is None else torch.tensor(mask),
            is_causal=causal,
            scale=scale,
            enable_gqa=True,
        )
        got = attend(query, key, value, mask, causal=causal, scale=scale)
        np.testing.assert_allclose(got, want.numpy(), atol=1e-5)


def test_blocks_that_are_alike_are_one_scan():
    opened = open_model(model("Blocks"))
    assert [type(one) for one in opened.lists] == [Stack]
    specs = opened.specs()
    assert specs["blocks/up/weight"].shape == (4, 8, 8)
    assert specs["blocks/up/weight"].axes == ("layers", "heads", "embed")
    assert check_parity(opened.settings, (2, 6)).gradient <= 1e-4


@pytest.mark.parametrize(
    ("use", "reason"),
    [
        ("numbered", "block 1 computes something else than block 0"),
        ("between", "something other than the next block looks at what a block returns"),
    ],
)
def test_blocks_that_are_not_are_traced_one_by_one_and_say_why(use, reason):
    opened = open_model(model("Blocks", use=use))
    (found,) = opened.lists
    assert found.reason == reason
    assert check_parity(opened.settings, (2, 6)).gradient <= 1e-4


def test_parameters_begin_as_the_constructor_would_have_them():
    opened = open_model(model("Blocks", count=64))
    begun = flatten(jax.device_get(jax.jit(opened.initialise)(jax.random.key(0))))
    bound = 8**-0.5  # of torch.nn.Linear: uniform up to the root of 1 / inputs
    weights = begun["blocks/up/weight"]
    assert weights.max() <= bound and weights.std() == pytest.approx(bound / 3**0.5, rel=0.05)
    assert not np.array_equal(weights[0], weights[1])
    assert begun["tokens/weight"].std() == pytest.approx(1, rel=0.2)


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ({"torch": "2.13.0", "torchax": None}, "torchax not installed"),
        ({"torch": "2.13.0+cpu", "torchax": "0.0.13"}, "torchax 0.0.13 does not import with torch"),
        ({"torch": "2.9.0", "torchax": "0.0.14.dev1"}, "torch 2.9.0 is untested"),
        ({"transformers": "4.57.0"}, "transformers 4.57.0 cannot be traced"),
    ],
)
def test_versions_that_do_not_go_together_are_named(found, words):
    known = {"torch": "2.13.0", "torchax": "0.0.14.dev20261026", "transformers": "5.23.0"}
    check_versions(known, hf=True)
    with pytest.raises(ImportedModelError, match=words):
        check_versions(known | found, hf=True)
