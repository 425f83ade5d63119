"""What traces of PyTorch are known to lose without a word: done right here, or refused."""

import json
import re
from pathlib import Path

import jax
import numpy as np
import pytest
import torch

from graphtrain.config.schema import TorchModel
from graphtrain.errors import ImportedModelError
from graphtrain.torch_frontend.attention import dense_attention
from graphtrain.torch_frontend.blocks import Stack
from graphtrain.torch_frontend.bridge import Tensor, TraceEnvironment
from graphtrain.torch_frontend.document_isolation import check_documents_isolated
from graphtrain.torch_frontend.hf_attention import CausalMask, _torch_attention
from graphtrain.torch_frontend.open_module import open_model
from graphtrain.torch_frontend.parity import (
    GRADIENT_TOLERANCE,
    _gradient_differences,
    check_parity,
    run_check_once,
)
from graphtrain.torch_frontend.source import key_ingredients
from graphtrain.torch_frontend.strict import StrictEnvironment
from graphtrain.torch_frontend.versions import check_versions
from lowering.machine.extras import MissingExtra
from lowering.trees import flatten

MODULES = Path(__file__).with_name("modules.py")


def model(name: str, front_end: str = "auto", remat: str = "dots", **overrides) -> TorchModel:
    return TorchModel(
        torch=f"{MODULES}:{name}",
        vocab=16,
        dtype="float32",
        overrides=overrides,
        front_end=front_end,
        remat=remat,
    )


@pytest.mark.parametrize(
    "name",
    [
        *("NoGrad", "Detached", "OwnGradient", "Arange", "InPlace", "LeftPadded", "Attending"),
        "Entropy",
    ],
)
def test_done_right_it_has_the_gradients_of_pytorch(name):
    found = check_parity(model(name), (2, 6))
    assert found.loss <= 1e-5 and found.gradient <= 1e-4 and found.compared == {}
    assert found.strict == ""


def test_a_gradient_that_is_no_number_is_not_close():
    refusal = r"largest relative differences of gradients: inner\.weight \(inf\)"
    with pytest.raises(ImportedModelError, match=refusal):
        check_parity(model("NormOfZeros", "trace"), (2, 6))


@pytest.mark.parametrize(
    ("eager", "traced", "is_close"),
    [
        (1e-9, 2e-7, True),  # zero but for rounding, by softmax
        (1e-9, 2e-3, False),
        (2e-3, 2e-3 + 1e-6, False),  # small, but not zero: compared with itself
        (2e-3, 0.0, False),
    ],
)
def test_a_gradient_of_rounding_alone_is_compared_with_its_module(eager, traced, is_close):
    others = {"head.weight": np.ones(2), "k_proj.weight": np.array([0.5, 0.1])}
    got = _gradient_differences(
        others | {"k_proj.bias": np.array([traced])}, others | {"k_proj.bias": np.array([eager])}
    )
    assert (got["k_proj.bias"] <= GRADIENT_TOLERANCE) is is_close
    assert got["k_proj.weight"] == 0


def test_a_model_with_a_state_in_place_of_attention_is_refused_as_that():
    with pytest.raises(ImportedModelError, match="Stateful carries a state from token to token"):
        check_documents_isolated(model("Stateful"))


def test_positions_that_meet_elsewhere_than_in_attention_do_not_pass_for_apart():
    assert check_documents_isolated(model("Attending")) <= 1e-4
    with pytest.raises(ImportedModelError, match="mixes positions outside of attention"):
        check_documents_isolated(model("Attending", neighbours=True))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("ThroughAView", r"mul_ at .*modules\.py:\d+ writes through a view"),
        ("Autocast", r"torch\.autocast at .*modules\.py:\d+ is ignored by a trace"),
        ("Checkpointed", r"torch\.utils\.checkpoint at .*modules\.py:\d+ is ignored by a trace"),
        ("OutOfSight", "the traced OutOfSight does not match eager PyTorch: loss"),
    ],
)
def test_what_a_trace_would_lose_is_taken_by_the_strict_front_end_which_says_why(name, reason):
    found = check_parity(model(name), (2, 6))
    assert re.search(reason, found.strict)
    assert found.loss <= 1e-5 and found.gradient <= 1e-4  # of autocast too, which rounds to 4e-3


@pytest.mark.parametrize(
    ("name", "remat"),
    [
        *(("NoGrad", "none"), ("Detached", "full"), ("OwnGradient", "dots"), ("InPlace", "full")),
        *(("LeftPadded", "full"), ("PlainTensor", "none"), ("Blocks", "full"), ("Unused", "none")),
    ],
)
def test_the_strict_front_end_has_the_gradients_of_pytorch(name, remat):
    found = check_parity(model(name, "strict", remat), (2, 6))
    assert found.loss <= 1e-5 and found.gradient <= 1e-4


def test_traced_all_the_same_a_write_through_a_view_is_a_mismatch_with_its_cause():
    with pytest.raises(ImportedModelError) as caught:
        check_parity(model("ThroughAView", "trace"), (2, 6))
    assert "does not match eager PyTorch: loss" in str(caught.value)
    assert "largest relative differences of gradients: " in str(caught.value)
    assert "mul_ at" in str(caught.value) and "modules.py" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("RunningStatistics", "changes its buffer norm."),
        ("PlainTensor", "neither a parameter nor a buffer; register it"),
        ("ByValue", r"depends on the values of a tensor.*modules\.py"),
        ("RandomBuffer", "buffer features has no value"),
        ("ClampedWeight", r"clamp_ at .*modules\.py:\d+ writes into its parameter inner\.weight"),
    ],
)
def test_what_cannot_be_done_is_refused_with_the_reason(name, words):
    with pytest.raises(ImportedModelError, match=words):
        open_model(model(name))


@pytest.mark.parametrize(
    ("name", "front_end", "words"),
    [
        (
            "Autocast",
            "trace",
            'program.precision.compute, or set program.model.front_end = "strict"',
        ),
        ("Checkpointed", "trace", "set program.model.remat"),
        ("RunningStatistics", "strict", "changes its buffer norm."),
        ("ByValue", "strict", r"depends on the values of a tensor.*modules\.py"),
        (
            "Broken",
            "strict",
            r"cannot be traced: at .*modules\.py:\d+ PyTorch reports: a and b must",
        ),
    ],
)
def test_a_front_end_that_is_asked_for_refuses_what_it_cannot_do(name, front_end, words):
    with pytest.raises(ImportedModelError, match=words):
        open_model(model(name, front_end))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            ("Raising", "auto"),
            r"Raising, run by PyTorch on token ids up to 15, .* KeyError at .*py:\d+: 'depth'",
        ),
        (
            ("Short", "auto"),
            r"Short, run by PyTorch on token ids up to 15, .* IndexError at .*modules\.py:\d+",
        ),
        (("NoSuch", "auto"), r"modules\.py has no function NoSuch"),
    ],
)
def test_what_pytorch_itself_refuses_is_told_with_its_line(given, words):
    with pytest.raises(ImportedModelError, match=words):
        check_parity(model(*given), (2, 6))


@pytest.mark.parametrize(
    ("front_end", "overrides", "words"),
    [
        (
            "auto",
            {"early": True},
            r"Raising \(overrides.*\) raises KeyError at .*py:\d+: 'width'",
        ),
        ("auto", {"late": True}, r"raises TypeError: .*unexpected keyword argument 'late'"),
        (
            "trace",
            {},
            r"Raising cannot be traced: it raises KeyError at .*py:\d+: 'depth'",
        ),
        (
            "strict",
            {},
            r"Raising cannot be traced: it raises KeyError at .*py:\d+: 'depth'",
        ),
    ],
)
def test_what_an_authors_code_raises_is_told_with_its_line(front_end, overrides, words):
    with pytest.raises(ImportedModelError, match=words):
        open_model(model("Raising", front_end, **overrides))


def test_a_factory_that_exits_is_told(tmp_path):
    (tmp_path / "leaves.py").write_text("def model():\n    raise SystemExit(3)\n")
    with pytest.raises(ImportedModelError, match=r"raises SystemExit at .*leaves\.py:2: 3"):
        open_model(TorchModel(torch=f"{tmp_path / 'leaves.py'}:model", vocab=16))


def test_a_file_that_cannot_be_imported_is_told_with_its_line(tmp_path):
    (tmp_path / "half.py").write_text("import torch\nimport no_such_part\n")
    for _ in range(2):  # half of it is not kept
        with pytest.raises(ImportedModelError, match=r"at .*half\.py:2: No module named"):
            open_model(TorchModel(torch=f"{tmp_path}/half.py:build", vocab=16))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "no-such"}, "has no model_type 'no-such'"),
        ({"model_type": "musicgen"}, r"AttributeError at \S+modeling_musicgen.py:\d+: "),
        ({"model_type": "t5"}, "no causal language model of model_type 't5'"),
        ({"model_type": "llama", "hidden_size": 30, "num_attention_heads": 4}, "not a multiple"),
        ({"model_type": "llama", "intermediate_size": "big"}, "expected int, got str"),
        ({"model_type": "llama", "hidden_size": "big"}, "hidden_size: .* a valid integer"),
    ],
)
def test_a_config_that_transformers_refuses_is_told_in_a_line(tmp_path, config, words):
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ImportedModelError, match=words) as caught:
        open_model(TorchModel(hf=str(tmp_path), vocab=16))
    assert "\n" not in str(caught.value)


def test_a_misspelt_override_is_told(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    misspelt = TorchModel(hf=str(tmp_path), vocab=16, overrides={"num_hiden_layers": 2})
    with pytest.raises(ImportedModelError, match="no such setting; did you mean num_hidden_lay"):
        open_model(misspelt)


def test_a_record_that_is_damaged_or_of_another_version_is_made_anew(tmp_path):
    def found(number: int) -> dict:
        return run_check_once(
            model("Blocks"), tmp_path, "", lambda: {"a": number, "b": 0}, {"a", "b"}
        )

    assert found(1) == found(2) == {"a": 1, "b": 0}
    (record,) = tmp_path.glob("parity/*.json")
    for number, damage in enumerate(('{"a": 1', '{"a": 1}', '{"a": 1, "b": 0, "c": 0}', "[1]"), 3):
        record.write_text(damage)
        assert found(number) == {"a": number, "b": 0}


def test_the_key_knows_files_of_one_name_apart(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "parts").mkdir()
    (tmp_path / "own").mkdir()
    for name in ("own/__init__.py", "parts/__init__.py"):
        (tmp_path / name).write_text("")
    (tmp_path / "built.py").write_text("import own\nimport parts\n")
    built, digests = TorchModel(torch="built.py:build", vocab=16), []
    for name in ("own/__init__.py", "parts/__init__.py"):
        digests.append(key_ingredients(built)["torch"])
        (tmp_path / name).write_text("WIDTH = 8\n")
    digests.append(key_ingredients(built)["torch"])
    assert digests[0] != digests[1] != digests[2] != digests[0]


def test_after_a_comparison_a_model_drops_as_before():
    check_parity(model("DroppedByModule"), (2, 6))
    opened = open_model(model("DroppedByModule"))
    assert opened.meta.module.drop.p == 0.5


@pytest.mark.parametrize(("front_end", "remat"), [("trace", "dots"), ("strict", "full")])
def test_dropout_is_that_of_the_key_and_none_without_one(front_end, remat):
    opened = open_model(model("Dropped", front_end, remat))
    parameters = opened.initialize(jax.random.key(0))
    tokens = np.arange(8, dtype=np.int32)[None]

    def out(key):
        return np.asarray(opened.forward(parameters, tokens, key)[0])

    first, again, other = (out(jax.random.key(seed)) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other) and not np.array_equal(first, out(None))
    # Nothing of what was dropped has a gradient: both passes have dropped the same.
    bias, last = parameters["inner"]["bias"], tokens[:, -1:]

    def inner(bias):
        return opened.forward(
            parameters | {"inner": parameters["inner"] | {"bias": bias}}, last, jax.random.key(1)
        )[0]

    gradients = jax.jacobian(inner)(bias)
    dropped = np.asarray(inner(bias + 1)) == np.asarray(inner(bias))
    assert not np.any(np.asarray(gradients)[dropped])


def test_queries_that_see_nothing_get_zeros_and_no_gradient():
    random = np.random.default_rng(0)
    query, key, value = random.normal(size=(3, 1, 2, 4, 8)).astype(np.float32)
    seen = np.array([[0, 0, 0, 0], [1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0]], bool)
    for mask in (seen, np.where(seen, 0, -np.inf).astype(np.float32)):
        out, back = jax.vjp(lambda *x, m=mask: dense_attention(*x, m), query, key, value)
        assert not np.any(out[:, :, 0])
        assert all(np.isfinite(gradient).all() for gradient in back(np.ones_like(out)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_strict_attention_of_transformers_is_the_traced_one(dtype):
    random = np.random.default_rng(2)
    query = random.normal(size=(2, 4, 6, 8)).astype(np.float32)
    key, value = random.normal(size=(2, 2, 2, 6, 8)).astype(np.float32)
    seen = np.tri(6, 6, -1, bool)  # the first sees nothing, as after left padding
    near = np.tri(6, 6, 0, bool) & ~np.tri(6, 6, -2, bool)
    for given, mask in (
        (torch.tensor(seen), seen),
        (torch.tensor(np.where(seen, 0, -np.inf).astype(np.float32)).to(dtype), seen),
        (CausalMask(2), near),
        (None, np.tri(6, 6, 0, bool)),
    ):
        arrays = [torch.tensor(x).to(dtype).requires_grad_() for x in (query, key, value)]
        got = _torch_attention(*arrays, given, causal=True, dropout=0.0, scale=0.3, cap=2.0)
        got.sum().backward()
        assert all(bool(torch.isfinite(x.grad).all()) for x in arrays)
        want = dense_attention(query, key, value, mask, scale=0.3, softcap=2.0)
        close = 1e-5 if dtype == torch.float32 else 3e-2
        np.testing.assert_allclose(got.detach().float().numpy(), want, atol=close)


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
        got = dense_attention(query, key, value, mask, causal=causal, scale=scale)
        np.testing.assert_allclose(got, want.numpy(), atol=1e-5)


@pytest.mark.parametrize("environment", [TraceEnvironment(), StrictEnvironment("bfloat16", 16)])
def test_a_number_without_dimensions_does_not_make_wider_ones_of_all(environment):
    """As embed_scale of Gemma, which had all its blocks in float32."""
    x, wide = jax.numpy.ones((2, 3), "bfloat16"), jax.numpy.float32(1.5)
    x, wide = Tensor(x, environment), Tensor(wide, environment)
    with environment:
        for got in (x * wide, wide - x, x / wide, torch.where(x > wide, x, wide)):
            assert got.dtype == torch.bfloat16
        assert (x[:1] * wide).dtype == (x * wide[...]).dtype == torch.bfloat16
        assert torch.ops.aten.mul.Tensor(wide, x).dtype == torch.bfloat16
        assert (x * x.float()).dtype == (x.int() * wide).dtype == torch.float32


def test_blocks_that_are_alike_are_one_scan():
    opened = open_model(model("Blocks"))
    assert [type(one) for one in opened.block_lists] == [Stack]
    specs = opened.specs()
    assert specs["blocks/up/weight"].shape == (4, 8, 8)
    assert specs["blocks/up/weight"].axes == ("layers", "heads", "embed")
    assert check_parity(opened.settings, (2, 6)).gradient <= 1e-4


@pytest.mark.parametrize(
    ("use", "reason"),
    [
        ("numbered", "block 1 computes something else than block 0"),
        ("between", "code other than the next block reads the output of a block"),
    ],
)
def test_blocks_that_are_not_are_traced_one_by_one_and_say_why(use, reason):
    opened = open_model(model("Blocks", use=use))
    (found,) = opened.block_lists
    assert found.reason == reason
    assert check_parity(opened.settings, (2, 6)).gradient <= 1e-4


def test_blocks_that_the_logits_do_not_depend_on_are_no_stack():
    opened = open_model(model("Blocks", use="beside a tower"))
    assert [blocks.name for blocks in opened.block_lists] == ["blocks"]
    specs = opened.specs()
    assert specs["tower/3/up/weight"].role == "constant"
    assert specs["blocks/up/weight"].role == "parameter"
    assert check_parity(opened.settings, (2, 6)).gradient <= 1e-4


def test_parameters_begin_as_the_constructor_would_have_them():
    opened = open_model(model("Blocks", count=64))
    begun = flatten(jax.device_get(jax.jit(opened.initialize)(jax.random.key(0))))
    bound = 8**-0.5  # of torch.nn.Linear: uniform up to the root of 1 / inputs
    weights = begun["blocks/up/weight"]
    assert weights.max() <= bound and weights.std() == pytest.approx(bound / 3**0.5, rel=0.05)
    assert not np.array_equal(weights[0], weights[1])
    assert begun["tokens/weight"].std() == pytest.approx(1, rel=0.2)


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ({"torchax": None}, r"model.hf needs torchax.*run: pip install 'graphtrain\[hf\]'"),
        ({"torch": "2.13.0+cpu", "torchax": "0.0.13"}, "torchax 0.0.13 does not import with torch"),
        ({"torch": "2.9.0", "torchax": "0.0.14.dev1"}, "torch 2.9.0 is untested"),
        ({"transformers": "5.23.0"}, "transformers 5.23.0 is not supported"),
    ],
)
def test_versions_that_do_not_go_together_are_named(found, words):
    known = {"torch": "2.13.0", "torchax": "0.0.14.dev20261026", "transformers": "5.24.0"}
    check_versions(known, hf=True)
    with pytest.raises((ImportedModelError, MissingExtra), match=words):
        check_versions(known | found, hf=True)
