"""Adapters and DPO of imported models, on meshes and in stages, beside peft in float64."""

import dataclasses
import functools

import jax
import numpy as np
import peft
import pytest
import torch
from peft.tuners.lora.layer import LoraLayer, ParamWrapper
from programs import batch, loaded, placed_inputs, program
from test_torch_models import weights
from torch_families import imported

from graphtrain.config.resolve import resolve
from graphtrain.config.schema import Adapter, Batch, Loss, Mesh, PipelineSettings
from graphtrain.errors import ImportedModelError
from graphtrain.graphs.open_model import open_language_model
from graphtrain.torch_frontend.open_module import open_model
from graphtrain.torch_frontend.parity import module_with_weights, stack_weights
from graphtrain.weights.frozen import load_frozen_parameters
from graphtrain.weights.hf_import import import_hugging_face
from graphtrain.weights.sources import ConvertedFolder
from lowering.trees import flatten, unflatten
from lowering.xla import backend as xla
from sharding_rules.errors import ShardingError

# Of peft and transformers to each other.
pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"
)

TENSOR = {"target": "cpu:4", "mesh": Mesh(data=2, tensor=2)}
GPIPE = {
    "target": "cpu:4",
    "mesh": Mesh(data=2, stage=2),
    "pipeline": PipelineSettings(schedule="gpipe"),
}
ONE_ONE = {
    "target": "cpu:4",
    "mesh": Mesh(stage=2, fsdp=2),
    "pipeline": PipelineSettings(schedule="1f1b"),
}
TARGETS = {
    "llama": {"target_modules": ["q_proj", "o_proj", "down_proj"]},
    "gpt2": {"target_modules": ["c_attn", "c_fc"]},
    "mixtral": {
        "target_modules": ["v_proj"],
        "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
    },
}
RANK, ALPHA = 3, 6.0
PARTS = Batch(global_batch_size=8, seq_len=12, microbatches=2)
PREFERENCE = Loss(kind="dpo", beta=0.3, label_smoothing=0.1)


def adapter_of(kind, **settings):
    targets = [name.replace(".", "/") for names in TARGETS[kind].values() for name in names]
    return Adapter(rank=RANK, alpha=ALPHA, target_modules=tuple(targets), **settings)


def of_kind(folder, kind, **settings):
    settings = {"adapter": adapter_of(kind), "batch": PARTS} | settings
    return program(model=imported(folder, kind), **settings)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def tuned(folder):
    """A model of a kind with an adapter of peft, in float64; once per kind."""

    @functools.cache
    def build(kind):
        return adapted(module_with_weights(imported(folder, kind)), **TARGETS[kind])

    return build


def adapted(base, **targets):
    """A module with an adapter of peft in float64, and the weights before it."""
    torch.manual_seed(0)
    arrays = weights(base)
    config = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, **targets)
    model = peft.get_peft_model(base, config)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = 0.1 * torch.randn(parameter.shape)
    return model.double().eval(), arrays


def peft_factors(model, value):
    """Both factors by the name of the module's parameter, from `value` of each of peft's arrays."""
    found = {}
    for name, module in model.named_modules():
        if not isinstance(module, LoraLayer):
            continue
        name = name.removeprefix("base_model.model.").replace(".base_layer", "")
        first, second = (
            value(getattr(module, each)["default"].weight) for each in ("lora_A", "lora_B")
        )
        if isinstance(module, ParamWrapper):
            experts = module.num_experts
            first = first.reshape(experts, -1, first.shape[-1])
            second = second.reshape(len(second), -1, experts).transpose(2, 0, 1)
        parameter = module.parameter_name if isinstance(module, ParamWrapper) else "weight"
        found[f"{name}.{parameter}"] = first, second
    return found


def in_stages(of, tree):
    model, stages = open_language_model(of.model), resolve(of).stages
    return tree if stages is None else jax.device_get(model.to_pipeline_layout(tree, stages))


def stacked(of, factors):
    """Factors as a program stores them."""
    trained = {}
    for path, names in open_model(of.model).parameter_names_by_path().items():
        if names[0] in factors:
            for index, name in enumerate(("lora_a", "lora_b")):
                trained[f"{path}/{name}"] = np.stack([factors[each][index] for each in names])
    return in_stages(of, unflatten(trained))


def run(of, trained, frozen, inputs):
    step = loaded(of, "gradients")
    state = jax.tree.map(
        lambda leaf: np.zeros(leaf.shape, leaf.dtype), unflatten(flatten(step.inputs("state")))
    )
    given = (
        placed_inputs(step, "state", state | {"parameters": trained}),
        placed_inputs(step, "frozen", in_stages(of, frozen)),
        placed_inputs(step, "batch", inputs),
    )
    return jax.device_get(step(*given))


def values(parameter):
    return parameter.detach().numpy().astype(np.float32)


def gradient(parameter):
    return parameter.grad.numpy()


def assert_same(got, want):
    got, want = flatten(got), flatten(want)
    assert got.keys() == want.keys()
    for path, array in want.items():
        largest = np.abs(array).max()
        assert largest > 0, path
        np.testing.assert_allclose(got[path], array, rtol=0, atol=1e-5 * largest, err_msg=path)


def log_probs(model, inputs):
    flat = {name: torch.tensor(x.reshape(-1, x.shape[-1])) for name, x in inputs.items()}
    logits = model(input_ids=flat["tokens"].long(), use_cache=False).logits
    scores = torch.log_softmax(logits, -1).gather(-1, flat["targets"].long()[..., None])[..., 0]
    return scores * flat["weights"]


@pytest.mark.parametrize(
    ("kind", "mesh"),
    [("llama", TENSOR), ("gpt2", GPIPE), ("llama", ONE_ONE), ("mixtral", ONE_ONE)],
)
def test_an_adapter_has_the_loss_and_gradients_of_peft(folder, tuned, kind, mesh):
    assert_equals_peft(of_kind(folder, kind, **mesh), *tuned(kind))


def assert_equals_peft(of, model, base):
    inputs = batch(of)
    model.zero_grad()
    loss = -log_probs(model, inputs).sum() / inputs["weights"].sum()
    loss.backward()
    trained = stacked(of, peft_factors(model, values))
    frozen = unflatten(stack_weights(open_model(of.model), base))
    got = run(of, trained, frozen, inputs)
    assert float(got["loss"]) == pytest.approx(loss.item(), rel=1e-5)
    assert_same(got["gradients"], stacked(of, peft_factors(model, gradient)))


@pytest.mark.parametrize(("kind", "mesh"), [("llama", ONE_ONE), ("mixtral", TENSOR)])
def test_preferences_of_an_adapter_equal_pytorch(folder, tuned, kind, mesh):
    of, (model, base) = of_kind(folder, kind, loss=PREFERENCE, **mesh), tuned(kind)
    inputs = batch(of)
    loss, margins = dpo(model, model.disable_adapter, inputs)
    trained = stacked(of, peft_factors(model, values))
    frozen = unflatten(stack_weights(open_model(of.model), base))
    got = run(of, trained, frozen, inputs)
    assert float(got["loss"]) == pytest.approx(loss, rel=1e-5)
    assert float(got["margin"]) == pytest.approx(np.mean(margins), rel=1e-4)
    assert_same(got["gradients"], stacked(of, peft_factors(model, gradient)))


def dpo(model, as_reference, inputs):
    """The loss of pairs and their margins; its gradients are left in the model.

    A pair of which a row has no answer is padding.
    """
    model.zero_grad()
    answers = inputs["weights"].any(-1).reshape(-1, 2).all(-1)
    assert not answers.all()
    with torch.no_grad(), as_reference():
        before = log_probs(model, inputs).sum(-1)
    better, worse = (log_probs(model, inputs).sum(-1) - before).reshape(-1, 2).T
    margins = 0.3 * (better - worse)[torch.tensor(answers)]
    right, wrong = torch.sigmoid(margins), torch.sigmoid(-margins)
    loss = -(0.9 * torch.log(right) + 0.1 * torch.log(wrong)).mean()
    loss.backward()
    return loss.item(), margins.detach().numpy()


def test_dropout_of_experts_and_unknown_targets_are_refused(folder):
    cases = {
        r"dropout = 0.1 applies to the input of a linear layer, and .*experts": adapter_of(
            "mixtral", dropout=0.1
        ),
        r"target_modules: 'gate_up' matches no eligible array; choose from model/layers": Adapter(
            rank=2, alpha=2.0, target_modules=("gate_up",)
        ),
    }
    for words, adapter in cases.items():
        with pytest.raises((ImportedModelError, ShardingError), match=words):
            loaded(of_kind(folder, "mixtral", adapter=adapter), "init")


def in_decoder(factors):
    """Factors of peft for a Mixtral, as the native decoder stores them."""
    found = {}
    for name, (first, second) in sorted(factors.items()):
        first, second = np.swapaxes(first, -1, -2), np.swapaxes(second, -1, -2)
        if name.endswith("v_proj.weight"):
            pairs = {"attention/value": (first, second.reshape(len(second), -1, 8))}
        elif name.endswith("gate_up_proj"):
            gate, up = np.split(second, 2, -1)
            pairs = {"mlp/gate": (first, gate), "mlp/up": (first, up)}
        else:
            pairs = {"mlp/down": (first, second)}
        for path, pair in pairs.items():
            for letter, array in zip("ab", pair, strict=True):
                found.setdefault(f"layers/{path}/lora_{letter}", []).append(array)
    return {path: np.stack(arrays) for path, arrays in found.items()}


@pytest.fixture(scope="module")
def native_mixtral(folder, tuned):
    """The mixture of `tuned` for the native decoder: its settings, and a source of its weights."""
    _, base = tuned("mixtral")
    source = module_with_weights(imported(folder, "mixtral"))
    source.load_state_dict(
        {name: torch.tensor(array) for name, array in base.items()}, strict=False
    )
    source.save_pretrained(folder / "source")
    import_hugging_face(folder / "source", folder / "ours", lambda done, count: None)
    return ConvertedFolder(folder / "ours")


@pytest.mark.parametrize(
    ("capacity", "mesh"), [(None, {"target": "cpu:4", "mesh": Mesh(expert=2, tensor=2)}), (8.0, {})]
)
def test_experts_of_the_native_decoder_have_the_gradients_of_peft(
    native_mixtral, tuned, capacity, mesh
):
    mixture = dataclasses.replace(
        native_mixtral.model.moe, balance_loss=0.0, router_z_loss=0.0, capacity_factor=capacity
    )
    of = program(
        model=dataclasses.replace(native_mixtral.model, moe=mixture, dtype="float32", remat="none"),
        adapter=Adapter(
            rank=RANK,
            alpha=ALPHA,
            target_modules=("attention/value", "mlp/gate", "mlp/up", "mlp/down"),
        ),
        batch=PARTS,
        **mesh,
    )
    model, _ = tuned("mixtral")
    inputs = batch(of)
    model.zero_grad()
    loss = -log_probs(model, inputs).sum() / inputs["weights"].sum()
    loss.backward()
    described = loaded(of, "gradients").inputs("frozen")
    frozen = load_frozen_parameters(native_mixtral, resolve(of), described, xla.from_shards)
    trained = unflatten(in_decoder(peft_factors(model, values)))
    got = run(of, trained, jax.device_get(frozen), inputs)
    assert float(got["loss"]) == pytest.approx(loss.item(), rel=1e-5)
    want = in_decoder(peft_factors(model, gradient))
    found = flatten(got["gradients"])
    # In peft, gate and up of an expert share their first factor.
    found["layers/mlp/gate/lora_a"] = found["layers/mlp/gate/lora_a"] + found.pop(
        "layers/mlp/up/lora_a"
    )
    del want["layers/mlp/up/lora_a"]
    assert_same(unflatten(found), unflatten(want))
