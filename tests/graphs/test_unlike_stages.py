"""Models of transformers whose blocks are not all alike give eager PyTorch's numbers in stages."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from programs import (
    assert_same,
    batch,
    described,
    gradients_graph,
    loaded,
    lower,
    placed_inputs,
    program,
    stored,
)
from test_parallel import assert_close
from test_torch_adapters import ALPHA, RANK, adapted, assert_equals_peft
from torch_families import imported

import lowering
from graphtrain.checkpoints.checkpoint import Checkpoints, restore_parameters
from graphtrain.checkpoints.layer_order import layer_order_of
from graphtrain.checkpoints.steps import Retention
from graphtrain.config.resolve import resolve
from graphtrain.config.schema import Adapter, Batch, Dump, Mesh, PipelineSettings, TorchModel
from graphtrain.errors import PlanError
from graphtrain.graphs.build import build_graph
from graphtrain.planning.search import search
from graphtrain.torch_frontend.describe import describe
from graphtrain.torch_frontend.open_module import open_model
from graphtrain.torch_frontend.parity import module_with_weights, stack_weights
from graphtrain.weights.imported_export import export
from graphtrain.weights.imported_folder import HuggingFaceWeights
from lowering.machine.target import Target
from lowering.trees import flatten, unflatten
from sharding_rules.errors import ShardingError

BATCH = Batch(global_batch_size=8, seq_len=8, microbatches=4)
KINDS = ["sliding_attention", "full_attention"]
ONE_BEHIND = {"num_hidden_layers": 5, "layer_types": [*2 * KINDS, KINDS[0]]}
NINE = {"num_hidden_layers": 9, "layer_types": [*4 * KINDS, KINDS[0]]}
ONE_ONE = PipelineSettings(schedule="1f1b")
CASES = {
    "periods": ("gemma2", ONE_ONE, Mesh(data=2, stage=2), {}),
    "dense layers in front, virtual stages": (
        "deepseek_v3",
        PipelineSettings(virtual_stages=2),
        Mesh(fsdp=2, stage=2),
        {},
    ),
    "dense layers in front, 1f1b": ("deepseek_v3", ONE_ONE, Mesh(data=2, stage=2), {}),
    "a block behind": (
        "gemma3_text",
        PipelineSettings(schedule="gpipe", layers_per_stage=(2, 2)),
        Mesh(stage=2),
        ONE_BEHIND,
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


def in_stages(folder, kind, pipeline, mesh, overrides):
    model = imported(folder, kind, overrides=overrides)
    sizes = vars(mesh).values()
    target = f"cpu:{np.prod([*sizes])}"
    return program(target=target, mesh=mesh, pipeline=pipeline, batch=BATCH, model=model)


def eager(of, module, inputs):
    """Loss and gradients of PyTorch, as the program stores them for its stages."""
    tokens, targets, weights = (
        torch.from_numpy(np.asarray(inputs[name]).reshape(-1, of.batch.seq_len)).long()
        for name in ("tokens", "targets", "weights")
    )
    logits = module(input_ids=tokens, use_cache=False).logits
    losses = torch.nn.functional.cross_entropy(logits.mT, targets, reduction="none")
    loss = (losses * weights).sum() / weights.sum()
    loss.backward()
    gradients = {
        name: torch.zeros_like(one) if one.grad is None else one.grad
        for name, one in module.named_parameters()
    }
    arrays = {name: one.detach().numpy() for name, one in gradients.items()}
    tree = unflatten(stack_weights(open_model(of.model), arrays))
    return {"loss": loss.item()} | flatten({"gradients": stored(of, tree)})


def state_with(of, module):
    weights = {name: one.detach().numpy() for name, one in module.named_parameters()}
    zeros = jax.tree.map(
        lambda spec: np.zeros(spec.shape, jnp.dtype(spec.dtype)),
        gradients_graph(of).inputs["state"],
    )
    tree = unflatten(stack_weights(open_model(of.model), weights))
    return {**zeros, "parameters": stored(of, tree)}


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_equal_those_of_eager_pytorch(case, folder):
    of = in_stages(folder, *CASES[case])
    module, inputs = module_with_weights(of.model), batch(of)
    executable = loaded(of, "gradients")
    state = placed_inputs(executable, "state", state_with(of, module))
    placed = placed_inputs(executable, "batch", inputs)
    assert_close(flatten(jax.device_get(executable(state, placed))), eager(of, module, inputs))


# Of peft and transformers to each other.
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_an_adapter_in_stages_of_periods_has_the_gradients_of_peft(folder):
    of = in_stages(folder, *CASES["periods"])
    names = ("q_proj", "down_proj")
    adapter = Adapter(rank=RANK, alpha=ALPHA, target_modules=names)
    of = dataclasses.replace(of, adapter=adapter)
    tuned = adapted(module_with_weights(of.model), target_modules=[*names])
    assert_equals_peft(of, *tuned)


@pytest.mark.parametrize(
    ("kind", "layers", "rounds", "overrides"),
    [("gemma3_text", (6, 2), 4 * (2,), NINE), ("deepseek_v3", (3, 1), 4 * (1,), {})],
)
def test_a_checkpoint_goes_into_other_stages_and_to_a_folder_and_back(
    kind, layers, rounds, overrides, folder, tmp_path
):
    settings = PipelineSettings(layers_per_stage=layers)
    uneven = in_stages(folder, kind, settings, Mesh(stage=2), overrides)
    virtual = PipelineSettings(virtual_stages=2, layers_per_stage=rounds)
    in_rounds = dataclasses.replace(uneven, pipeline=virtual)
    sharded = dataclasses.replace(uneven, mesh=Mesh(fsdp=2), pipeline=PipelineSettings())
    module = module_with_weights(uneven.model)
    weights = {name: one.detach().numpy() for name, one in module.named_parameters()}
    whole = unflatten(stack_weights(open_model(uneven.model), weights))
    kept = {of: jax.tree.map(jnp.asarray, stored(of, whole)) for of in (uneven, in_rounds, sharded)}
    for saved in kept:
        saving = Checkpoints(tmp_path / "new", Retention(1), layer_order_of(resolve(saved)))
        saving.save(1, {"parameters": kept[saved]}, {})
        saving.close()
        for of, want in kept.items():
            order = layer_order_of(resolve(of))
            restored = restore_parameters(tmp_path / "new", 1, described(want), order)
            assert_same(restored, want)
        run = tmp_path / f"run-{saved.pipeline.virtual_stages}-{saved.mesh.stage}"
        run.mkdir()
        (tmp_path / "new").rename(run / "checkpoints")

    run = tmp_path / "run-1-2"
    export(resolve(uneven), run, 1, tmp_path / "back", lambda done, count: None)
    fill = lowering.backend(Target.parse("cpu:2")).from_shards
    for of, want in kept.items():
        folder_weights = HuggingFaceWeights(tmp_path / "back")
        assert_same(folder_weights.parameters(described(want), fill, resolve(of).stages), want)


@pytest.mark.parametrize(
    ("kind", "settings", "overrides", "words"),
    [
        (
            "gemma2",
            {},
            {"num_hidden_layers": 6},
            r"repeat every 2 blocks, and each stage holds whole repetitions, but the stages hold "
            r"3, 3 blocks; set program.pipeline.layers_per_stage = \[4, 2\], or "
            "program.mesh.stage to one of 1, 3",
        ),
        (
            "gemma3_text",
            {},
            NINE,
            r"8 of the 9 blocks of model.layers \(blocks 0 to 7; block 8 with the LM head\), but "
            r"the stages hold 9; set program.pipeline.layers_per_stage = \[4, 4\]",
        ),
        ("gemma2", {"virtual_stages": 2}, {}, r"2 repetitions cannot be divided among 4 stages"),
        (
            "gemma3_text",
            {"layers_per_stage": (4, 4), "schedule": "1f1b"},
            NINE,
            "blocks behind the stages need all positions of a sequence",
        ),
    ],
)
def test_stages_that_cannot_be_are_refused_with_those_that_can(
    kind, settings, overrides, words, folder
):
    of = in_stages(folder, kind, PipelineSettings(**settings), Mesh(stage=2), overrides)
    with pytest.raises(ShardingError, match=words):
        lower(of, "train")


def test_dumps_of_stages_of_unlike_blocks_are_refused(folder):
    of = in_stages(folder, "gemma2", PipelineSettings(), Mesh(stage=2), {})
    dumped = dataclasses.replace(of, dump=Dump(arrays=("*",)))
    with pytest.raises(PlanError, match="layers are not all alike"):
        build_graph(resolve(dumped), "dump")


def test_a_plan_says_which_blocks_are_outside_of_the_stages(folder, tmp_path):
    of = in_stages(folder, "deepseek_v3", PipelineSettings(), Mesh(stage=2), {})
    assert isinstance(of.model, TorchModel)
    lines = [*describe(of.model, tmp_path, resolve(of).stages)]
    assert (
        "pipeline stages: blocks 2 to 5 of model.layers; blocks 0 to 1 with the embedding, which "
        "every device stores and computes for 1/2 of the microbatches"
    ) in lines


@pytest.mark.parametrize(
    ("stages", "virtual", "words"),
    [(2, 2, ""), (4, 1, "the 2 blocks outside of them are more than the 1 of a stage")],
)
def test_blocks_outside_are_compared_with_all_virtual_stages_of_a_device(
    stages, virtual, words, folder, tmp_path
):
    settings = PipelineSettings(virtual_stages=virtual)
    of = in_stages(folder, "deepseek_v3", settings, Mesh(stage=stages), {})
    assert isinstance(of.model, TorchModel)
    lines = " ".join(describe(of.model, tmp_path, resolve(of).stages))
    assert words in lines and ("are more than" in lines) == bool(words)


def test_a_search_gives_stages_whole_repetitions(folder):
    wide = program(
        target="v5e:2x4",
        model=imported(folder, "gemma2"),
        batch=Batch(global_batch_size=16, seq_len=32),
    )
    assert {one.mesh.axes["stage"] for one in search(wide, keep=50).ranked} == {1, 2}
    mixture = dataclasses.replace(wide, model=imported(folder, "deepseek_v3"))
    assert "blocks 0 to 1 with the embedding" in search(mixture, keep=1).rejected["stage"]
