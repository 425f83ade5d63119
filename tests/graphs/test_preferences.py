"""DPO on one device and in stages, with an adapter and without: against PyTorch in float64."""

import functools

import jax
import numpy as np
import pytest
import torch
import transformers
from programs import LLAMA, batch, loaded, placed_inputs, program
from test_adapters import FOUR, Base, frozen_of, in_layout, new_state, same

from graphtrain.config.schema import Adapter, Batch, Loss, Mesh, PipelineSettings
from graphtrain.weights.families import family_of_config
from graphtrain.weights.families.family import to_decoder, to_hugging_face
from lowering.trees import flatten, unflatten
from sharding_rules.errors import ShardingError

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


PREFERENCES = {
    "one device": {},
    "gpipe": {
        "target": "cpu:4",
        "mesh": Mesh(data=2, stage=2),
        "pipeline": PipelineSettings(schedule="gpipe"),
    },
    "1f1b": {
        "target": "cpu:4",
        "mesh": Mesh(stage=2, context=2),
        "pipeline": PipelineSettings(schedule="1f1b"),
    },
}
ADAPTED = Adapter(rank=4, alpha=8.0, target_modules=("attention/*", "mlp/up"))


@pytest.fixture(scope="module")
def dpo_reference():
    """Weights of the policy; its loss, margins and gradients in float64, by adapter."""

    @functools.cache
    def compute(adapter):
        of = program(loss=PREFERENCE, adapter=adapter)
        base, trained = Base(LLAMA).arrays, flatten(new_state(of)["parameters"])
        if adapter is None:
            trained = {path: base[path] + array for path, array in trained.items()}
        policy = in_torch(base | merged(base, trained, adapter))
        loss, margins = dpo_in_torch(policy, in_torch(base), pairs(program()))
        loss.backward()
        return unflatten(trained), float(loss.detach()), margins, torch_gradients(policy, trained)

    return compute


def merged(base, trained, adapter):
    """The weights with which a model computes, with or without LoRA factors, in float64."""
    if adapter is None:
        return trained
    paths = {path.removesuffix("/lora_a") for path in trained if path.endswith("/lora_a")}
    return {
        path: base[path].astype(np.float64)
        + adapter.scale
        * np.stack(
            [
                np.tensordot(first.astype(np.float64), second, 1)
                for first, second in zip(
                    trained[f"{path}/lora_a"], trained[f"{path}/lora_b"], strict=True
                )
            ]
        )
        for path in paths
    }


def torch_gradients(policy, trained):
    """Gradients of PyTorch in the decoder's arrays; of LoRA factors by the chain rule."""
    theirs = {name: each.grad.numpy() for name, each in policy.named_parameters()}
    found = {path: np.zeros(array.shape) for path, array in trained.items()}
    for piece in family_of_config({"model_type": "llama"}).weights(LLAMA):
        decoded = to_decoder(piece, [theirs[name] for name in piece.names], LLAMA)
        for path, array in zip(piece.row.paths, decoded, strict=True):
            row = slice(None) if piece.layer is None else piece.layer
            if path in found:
                found[path][row] = array
            elif f"{path}/lora_a" in found:
                first, second = trained[f"{path}/lora_a"][row], trained[f"{path}/lora_b"][row]
                outer, inner = second.ndim - 1, first.ndim - 1
                found[f"{path}/lora_a"][row] = ADAPTED.scale * np.tensordot(
                    array, second, (range(-outer, 0), range(1, outer + 1))
                )
                found[f"{path}/lora_b"][row] = ADAPTED.scale * np.tensordot(
                    first, array, (range(inner), range(inner))
                )
    return unflatten(found)


def of_preferences(of, graph, state, *more):
    """Results of a graph for the pairs, on the host."""
    executable = loaded(of, graph)
    given = {name: array.reshape(2, 4, 16) for name, array in pairs(program()).items()}
    inputs = placed_inputs(executable, "state", state), frozen_of(of, graph)
    return jax.device_get(executable(*inputs, placed_inputs(executable, "batch", given), *more))


def test_a_step_of_preferences_reports_the_norm_of_pytorch(dpo_reference):
    of = program(loss=PREFERENCE, batch=Batch(global_batch_size=8, seq_len=16, microbatches=2))
    trained, loss, _, wanted = dpo_reference(None)
    state = new_state(of) | {"parameters": trained}
    metrics = of_preferences(of, "train", state, np.float32(0))["metrics"]
    norm = np.sqrt(sum((array**2).sum() for array in flatten(wanted).values()))
    assert float(metrics["loss"]) == pytest.approx(loss, rel=1e-5)
    assert float(metrics["grad_norm"]) == pytest.approx(norm, rel=1e-5)


@pytest.mark.parametrize(
    ("case", "adapter"),
    [
        ("one device", None),
        ("one device", ADAPTED),
        ("gpipe", None),
        ("1f1b", ADAPTED),
    ],
)
def test_preferences_equal_pytorch(case, adapter, dpo_reference):
    parts = Batch(global_batch_size=8, seq_len=16, microbatches=2)
    of = program(loss=PREFERENCE, batch=parts, adapter=adapter, **PREFERENCES[case])
    trained, loss, margins, wanted = dpo_reference(adapter)
    state = new_state(of) | {"parameters": in_layout(of, trained)}
    got = of_preferences(of, "gradients", state)
    assert float(got["loss"]) == pytest.approx(loss, rel=1e-5)
    assert float(got["margin"]) == pytest.approx(np.mean(margins), rel=1e-4)
    assert float(got["accuracy"]) == pytest.approx(np.mean(margins > 0))
    same(got["gradients"], in_layout(of, wanted), 1e-5)


def test_an_evaluation_in_stages_has_the_loss_of_pytorch(dpo_reference):
    of = program(
        target="cpu:2",
        mesh=Mesh(stage=2),
        loss=PREFERENCE,
        batch=Batch(global_batch_size=8, seq_len=16, microbatches=2),
        adapter=ADAPTED,
        pipeline=PipelineSettings(schedule="1f1b"),
    )
    trained, loss, _, _ = dpo_reference(ADAPTED)
    evaluate = loaded(of, "evaluate")
    total = 0.0
    for half in (slice(4), slice(4, 8)):
        rows = {name: array[0, half] for name, array in pairs(program()).items()}
        metrics = evaluate(
            placed_inputs(evaluate, "parameters", in_layout(of, trained)),
            frozen_of(of, "evaluate"),
            placed_inputs(evaluate, "batch", rows),
        )["metrics"]
        total += float(metrics["loss_sum"])
    assert total == pytest.approx(3 * loss, rel=1e-5)


def test_a_pair_is_not_divided_among_devices():
    of = program(
        target="cpu:4",
        mesh=Mesh(data=2, stage=2),
        loss=PREFERENCE,
        batch=Batch(global_batch_size=4, seq_len=16, microbatches=2),
    )
    with pytest.raises(ShardingError, match=r"mesh.data splits a microbatch into 1 rows per"):
        loaded(of, "train")


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
