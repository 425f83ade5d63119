"""Adapters, frozen weights in few bits, and DPO: against one device, and against PyTorch."""

import dataclasses

import jax
import numpy as np
import pytest
import torch
import transformers
from programs import LLAMA, alone, batch, loaded, placed_inputs, program

from graphtrain.config.resolve import resolve
from graphtrain.config.schema import Adapter, Batch, Loss, Mesh, MixtureOfExperts
from graphtrain.models.decoder import parameter_specs
from graphtrain.weights.families import family_of_config
from graphtrain.weights.families.family import to_decoder
from graphtrain.weights.frozen import load_frozen_parameters
from lowering.trees import flatten, unflatten
from lowering.xla import backend as xla
from sharding_rules.errors import ShardingError

FOUR = {"target": "cpu:4", "mesh": Mesh(fsdp=2, tensor=2)}
EXPERTS = dataclasses.replace(LLAMA, moe=MixtureOfExperts(experts=4, shared_expert_mlp=48))


class Base:
    """Random weights, as a source of them."""

    def __init__(self, model):
        self.model = model
        random = np.random.default_rng(0)
        specs = flatten(parameter_specs(model))
        self.arrays = {
            path: random.normal(0, 0.2, spec.shape).astype(np.float32)
            for path, spec in specs.items()
        }

    def part(self, path, layer, index):
        array = self.arrays[path]
        return (array if layer is None else array[layer])[index]


def frozen_of(of, graph):
    """The weights that a program keeps, read as a run reads them."""
    described = loaded(of, graph).inputs("frozen")
    return load_frozen_parameters(Base(of.model), resolve(of), described, xla.from_shards)


def new_state(of):
    """The same for every mesh; whatever begins as zeros is drawn instead."""
    state = jax.device_get(loaded(alone(of), "init")(np.uint32(0))["state"])
    random = np.random.default_rng(1)
    drawn = {
        path: array if array.any() else random.normal(0, 0.1, array.shape).astype(np.float32)
        for path, array in flatten(state["parameters"]).items()
    }
    return state | {"parameters": unflatten(drawn)}


def same(got, want, tolerance):
    for path, array in flatten(want).items():
        largest = np.abs(array).max()
        assert largest > 0, path
        np.testing.assert_allclose(
            flatten(got)[path], array, rtol=0, atol=tolerance * largest, err_msg=path
        )


def take_steps(of):
    train = loaded(of, "train")
    state, frozen = placed_inputs(train, "state", new_state(of)), frozen_of(of, "train")
    before = jax.device_get(frozen)
    for seed in range(3):
        inputs = placed_inputs(train, "batch", batch(of, seed))
        state = train(state, frozen, inputs, np.float32(1e-2))["state"]
    for path, array in flatten(jax.device_get(frozen)).items():
        np.testing.assert_array_equal(array, flatten(before)[path], err_msg=path)
    return train, jax.device_get(state["parameters"])


def test_steps_are_those_of_one_device_with_a_base_in_four_bits():
    adapter = Adapter(rank=4, alpha=8.0, modules_to_save=("head",), dropout=0.2, base_dtype="nf4")
    of = program(
        adapter=adapter, batch=Batch(global_batch_size=8, seq_len=16, microbatches=2), **FOUR
    )
    _, want = take_steps(alone(of))
    train, got = take_steps(of)
    same(got, want, 1e-5)
    codes = train.inputs("frozen")["layers"]["mlp"]["up"]["codes"]
    assert codes.dtype == np.uint8 and codes.shape == (2, 32, 24)
    assert codes.sharding.shard_shape(codes.shape) == (2, 16, 12)
    moments = flatten(train.inputs("state")["optimizer"]["adam"]["mu"])
    assert set(moments) == set(flatten(want))


@pytest.mark.parametrize(
    ("base", "settings"),
    [
        ("int8", {"model": EXPERTS, "target": "cpu:4", "mesh": Mesh(expert=2, tensor=2)}),
        (
            "bfloat16",
            {
                "target": "cpu:4",
                "mesh": Mesh(data=2, tensor=2),
                "batch": Batch(
                    global_batch_size=8, seq_len=16, microbatches=2, gradient_reduction="per_step"
                ),
            },
        ),
    ],
)
def test_gradients_are_those_of_one_device(base, settings):
    of = program(adapter=Adapter(rank=4, alpha=8.0, base_dtype=base), **settings)
    found = []
    for one in (alone(of), of):
        gradients = loaded(one, "gradients")
        state = placed_inputs(gradients, "state", new_state(one))
        inputs = placed_inputs(gradients, "batch", batch(one))
        found.append(jax.device_get(gradients(state, frozen_of(one, "gradients"), inputs)))
    same(found[1], found[0], 1e-5)


def test_a_pattern_that_names_nothing_is_refused():
    for adapter, words in (
        (
            Adapter(rank=4, alpha=8.0, target_modules=("router",)),
            r"target_modules: 'router' matches no eligible",
        ),
        (
            Adapter(rank=4, alpha=8.0, modules_to_save=("haed",)),
            r"modules_to_save: 'haed' matches no eligible.*head",
        ),
    ):
        with pytest.raises(ShardingError, match=words):
            loaded(program(model=EXPERTS, adapter=adapter), "init")


PREFERENCE = Loss(kind="dpo", beta=0.3, label_smoothing=0.1)


def pairs(of):
    """Answers of random length; the last pair is padding."""
    made = batch(of)
    begins = np.random.default_rng(2).integers(4, 14, (1, 8, 1))
    made["weights"] = (np.arange(16) >= begins).astype(np.float32)
    made["weights"][:, -2:] = 0
    return made


def in_torch(arrays):
    """Hugging Face's Llama with the decoder's arrays, in float64."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    widths = {"num_key_value_heads": 2, "intermediate_size": 48, "vocab_size": 64}
    config = transformers.LlamaConfig(**sizes, **widths, rms_norm_eps=LLAMA.norm_epsilon)
    reference = transformers.LlamaForCausalLM(config).double()
    from graphtrain.weights.families.family import to_hugging_face

    tensors = {}
    for piece in family_of_config({"model_type": "llama"}).weights(LLAMA):
        found = [arrays[path] for path in piece.row.paths]
        own = found if piece.layer is None else [array[piece.layer] for array in found]
        tensors |= {
            name: torch.tensor(np.ascontiguousarray(tensor))
            for name, tensor in to_hugging_face(piece, own, LLAMA)
        }
    reference.load_state_dict(tensors, strict=False)
    return reference


def dpo_in_torch(policy, reference, inputs):
    """The loss as its authors write it, row by row."""

    def log_p(model):
        rows = []
        for row in range(8):
            tokens = torch.tensor(inputs["tokens"][0, row : row + 1]).long()
            p = torch.softmax(model(tokens).logits[0], -1)
            chosen = p[torch.arange(16), torch.tensor(inputs["targets"][0, row]).long()]
            rows.append((torch.log(chosen) * torch.tensor(inputs["weights"][0, row])).sum())
        return rows

    after = log_p(policy)
    with torch.no_grad():
        before = log_p(reference)
    total, margins = 0.0, []
    for better in (0, 2, 4):  # the last pair is padding
        better_gain = after[better] - before[better]
        margin = 0.3 * (better_gain - (after[better + 1] - before[better + 1]))
        right, wrong = torch.sigmoid(margin), torch.sigmoid(-margin)
        total = total - 0.9 * torch.log(right) - 0.1 * torch.log(wrong)
        margins.append(float(margin.detach()))
    return total / 3, np.array(margins)


def test_preferences_equal_pytorch():
    of = program(loss=PREFERENCE, batch=Batch(global_batch_size=8, seq_len=16, microbatches=2))
    inputs = pairs(program())
    state = new_state(of)
    base, trained = Base(LLAMA).arrays, flatten(state["parameters"])
    trained = {path: base[path] + array for path, array in trained.items()}
    policy = in_torch(trained)
    loss, margins = dpo_in_torch(policy, in_torch(base), inputs)
    loss.backward()

    train = loaded(of, "train")
    stored = {name: array.reshape(2, 4, 16) for name, array in inputs.items()}
    given = placed_inputs(train, "state", state | {"parameters": unflatten(trained)})
    placed = placed_inputs(train, "batch", stored)
    metrics = train(given, frozen_of(of, "train"), placed, np.float32(0))["metrics"]
    assert float(metrics["loss"]) == pytest.approx(float(loss.detach()), rel=1e-5)
    assert float(metrics["margin"]) == pytest.approx(np.mean(margins), rel=1e-4)
    assert float(metrics["accuracy"]) == pytest.approx(np.mean(margins > 0))
    norm = torch.sqrt(sum((each.grad**2).sum() for each in policy.parameters()))
    assert float(metrics["grad_norm"]) == pytest.approx(float(norm), rel=1e-5)

    gradients = loaded(of, "gradients")
    given = placed_inputs(gradients, "state", state | {"parameters": unflatten(trained)})
    placed = placed_inputs(gradients, "batch", stored)
    got = flatten(gradients(given, frozen_of(of, "gradients"), placed)["gradients"])
    theirs = {name: each.grad.numpy() for name, each in policy.named_parameters()}
    for piece in family_of_config({"model_type": "llama"}).weights(LLAMA):
        want = to_decoder(piece, [theirs[name] for name in piece.names], LLAMA)
        for path, array in zip(piece.row.paths, want, strict=True):
            mine = got[path] if piece.layer is None else got[path][piece.layer]
            np.testing.assert_allclose(mine, array, rtol=0, atol=1e-5 * np.abs(array).max())


def test_the_reference_of_an_adapter_is_its_base():
    """With a product of zero the policy is the reference: no margin, and the loss of a coin."""
    adapter = Adapter(rank=4, alpha=8.0, modules_to_save=("final_norm/*",), base_dtype="int8")
    of = program(loss=Loss(kind="dpo"), adapter=adapter, **FOUR)
    evaluate, base = loaded(of, "evaluate"), Base(LLAMA).arrays
    described = flatten(evaluate.inputs("parameters"))
    begun = {path: base.get(path, np.zeros(one.shape)) for path, one in described.items()}
    inputs = {name: array[0] for name, array in pairs(of).items()}
    metrics = evaluate(
        placed_inputs(evaluate, "parameters", unflatten(begun)),
        frozen_of(of, "evaluate"),
        placed_inputs(evaluate, "batch", inputs),
    )["metrics"]
    assert float(metrics["targets"]) == 3
    assert float(metrics["loss_sum"]) == pytest.approx(3 * np.log(2), rel=1e-6)
