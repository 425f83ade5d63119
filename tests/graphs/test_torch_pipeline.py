"""Models of transformers in stages give the numbers of one device, by every schedule."""

import dataclasses
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import pytest
from programs import alone, assert_same, described, lower, program, stored
from test_parallel import assert_close, loss_and_gradients
from torch_families import imported

import lowering
from graphtrain.checkpoints.checkpoint import Checkpoints, restore_parameters
from graphtrain.checkpoints.layer_order import layer_order_of
from graphtrain.checkpoints.steps import Retention
from graphtrain.config.resolve import resolve
from graphtrain.config.schema import Batch, Mesh, PipelineSettings, TorchModel
from graphtrain.errors import TrainingError
from graphtrain.graphs.build import build_graph
from graphtrain.graphs.plan import plan_program
from graphtrain.planning.search import search
from graphtrain.torch_frontend import experts
from graphtrain.torch_frontend.open_module import open_model
from graphtrain.torch_frontend.parity import module_with_weights, stack_weights
from graphtrain.weights.imported_export import export
from graphtrain.weights.imported_folder import HuggingFaceWeights
from lowering.machine.target import Target
from lowering.trees import flatten, unflatten
from sharding_rules.errors import ShardingError

ONE_ONE = PipelineSettings(schedule="1f1b")
CUBE = Mesh(data=2, stage=2, tensor=2)
BATCH = Batch(global_batch_size=16, seq_len=8, microbatches=4)
CASES = {
    "llama, gpipe, uneven": (
        "llama",
        PipelineSettings(schedule="gpipe", layers_per_stage=(1, 3)),
        CUBE,
    ),
    "llama, 1f1b": ("llama", ONE_ONE, Mesh(fsdp=4, stage=2)),
    "gpt2, circular, uneven": (
        "gpt2",
        PipelineSettings(layers_per_stage=(3, 1)),
        Mesh(data=2, fsdp=2, stage=2),
    ),
    "gpt2, 1f1b": ("gpt2", ONE_ONE, CUBE),
    "mixtral, 1f1b": ("mixtral", ONE_ONE, Mesh(data=2, stage=2, expert=2)),
}
DEEP = {"llama": {"num_hidden_layers": 4}, "gpt2": {"n_layer": 4}, "mixtral": {}}
MODULES = Path(__file__).parents[1] / "extras/torch_models/modules.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


def in_stages(folder, kind, pipeline, mesh, **settings):
    model = imported(folder, kind, overrides=DEEP[kind], **settings)
    return program(target="cpu:8", mesh=mesh, pipeline=pipeline, batch=BATCH, model=model)


def one_device(of):
    """Without a pipeline's settings, so that all cases share it."""
    return dataclasses.replace(alone(of), pipeline=PipelineSettings())


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_equal_those_of_one_device(case, folder):
    of = in_stages(folder, *CASES[case])
    want = unflatten(loss_and_gradients(one_device(of)))
    with mock.patch.object(experts, "computes_active_experts", lambda *sizes: True):  # as on a TPU
        assert_close(loss_and_gradients(of), flatten(stored(of, want)))


@pytest.mark.parametrize("mesh", [Mesh(stage=2, data=4), Mesh(context=2)], ids=["1f1b", "ring"])
def test_documents_are_isolated_as_on_one_device(mesh, folder):
    sizes = dataclasses.replace(BATCH, cross_document_attention=False)
    of = dataclasses.replace(in_stages(folder, "llama", ONE_ONE, mesh), batch=sizes)
    of = dataclasses.replace(of, target=f"cpu:{mesh.data * mesh.stage * mesh.context}")
    want = unflatten(loss_and_gradients(one_device(of)))
    assert_close(loss_and_gradients(of), flatten(stored(of, want)))


def of_module(pipeline, mesh, **overrides):
    given = TorchModel(
        torch=f"{MODULES}:Given", vocab=16, dtype="float32", remat="none", overrides=overrides
    )
    return program(target="cpu:8", mesh=mesh, pipeline=pipeline, batch=BATCH, model=given)


@pytest.mark.parametrize(
    ("pipeline", "mesh", "drop"),
    [
        (PipelineSettings(schedule="1f1b", layers_per_stage=(1, 3)), Mesh(data=4, stage=2), 0.0),
        (
            PipelineSettings(virtual_stages=2, layers_per_stage=(1, 1, 1, 1)),
            Mesh(fsdp=4, stage=2),
            0.3,
        ),
    ],
)
def test_blocks_are_given_what_depends_on_tokens_and_drop_what_they_would(pipeline, mesh, drop):
    of = of_module(pipeline, mesh, drop=drop)
    want = unflatten(loss_and_gradients(one_device(of)))
    assert_close(loss_and_gradients(of), flatten(stored(of, want)))


@pytest.mark.parametrize(
    ("use", "words"),
    [
        ("weights", "the blocks of blocks get an argument that depends on table"),
        ("slice", "the blocks of blocks get an argument that depends on table"),
        ("longer", r"its blocks get a hidden state of shape \(2, 5, 8\), not \(2, 4, width\)"),
        ("two", r"its blocks are in several lists \(blocks and more\)"),
        ("after", "the computation after blocks depends on the tokens"),
        ("dropped", "the computation after blocks depends on dropout"),
        ("mixed", "the computation after its blocks mixes positions"),
    ],
)
def test_what_stages_cannot_pass_through_is_refused_with_the_reason(use, words):
    of = of_module(PipelineSettings(layers_per_stage=(2, 2)), Mesh(data=4, stage=2), use=use)
    with pytest.raises(ShardingError, match=words):
        build_graph(resolve(of), "train")


def test_blocks_that_no_stage_can_take_are_refused_with_the_reason():
    numbered = TorchModel(torch=f"{MODULES}:Blocks", vocab=16, overrides={"use": "numbered"})
    of = dataclasses.replace(
        of_module(PipelineSettings(layers_per_stage=(2, 2)), Mesh(data=4, stage=2)), model=numbered
    )
    with pytest.raises(ShardingError, match="traced block by block, because block 1 computes"):
        build_graph(resolve(of), "train")
    with pytest.raises(ShardingError, match=r"has 4 blocks, but the stages hold 5"):
        lower(of_module(PipelineSettings(layers_per_stage=(2, 3)), Mesh(data=4, stage=2)), "train")
    with pytest.raises(ValueError, match=r"pipeline.layers_per_stage, for example \[6, 6\]"):
        of_module(PipelineSettings(), Mesh(data=4, stage=2))


@pytest.mark.parametrize(
    ("kind", "rules", "mesh"),
    [
        ("llama", ("zero2", "fsdp", "tensor"), Mesh(data=2, fsdp=2, tensor=2)),
        ("gpt2", ("data",), Mesh(data=8)),
    ],
)
def test_gradients_reduced_last_are_those_of_one_device(kind, rules, mesh, folder):
    last = dataclasses.replace(BATCH, global_batch_size=32, gradient_reduction="per_step")
    of = dataclasses.replace(
        in_stages(folder, kind, PipelineSettings(), mesh), rules=rules, batch=last
    )
    alone_each = dataclasses.replace(
        one_device(of), batch=dataclasses.replace(last, gradient_reduction="per_microbatch")
    )
    assert_close(loss_and_gradients(of), loss_and_gradients(alone_each))


def test_a_checkpoint_goes_into_other_stages_and_to_a_folder_and_back(folder, tmp_path):
    uneven = in_stages(folder, *CASES["gpt2, circular, uneven"])
    rounds = dataclasses.replace(uneven, pipeline=PipelineSettings(virtual_stages=2))
    module = module_with_weights(uneven.model)
    weights = {name: one.detach().numpy() for name, one in module.named_parameters()}
    whole = unflatten(stack_weights(open_model(uneven.model), weights))
    kept = {
        of: jax.tree.map(jnp.asarray, stored(of, whole))
        for of in (uneven, rounds, one_device(uneven))
    }
    saving = Checkpoints(tmp_path, Retention(1), layer_order_of(resolve(uneven)))
    saving.save(1, {"parameters": kept[uneven]}, {})
    saving.close()

    for of, want in kept.items():
        restored = restore_parameters(tmp_path, 1, described(want), layer_order_of(resolve(of)))
        assert_same(restored, want)
    turned = dataclasses.replace(uneven, pipeline=PipelineSettings(layers_per_stage=(1, 3)))
    with pytest.raises(TrainingError, match="in another order"):
        restore_parameters(tmp_path, 1, described(kept[uneven]), layer_order_of(resolve(turned)))

    (tmp_path / "run/checkpoints").mkdir(parents=True)
    tmp_path.joinpath("1").rename(tmp_path / "run/checkpoints/1")
    export(resolve(uneven), tmp_path / "run", 1, tmp_path / "back", lambda done, count: None)
    for of, want in kept.items():
        fill = lowering.backend(Target.parse("cpu:8")).from_shards
        read = HuggingFaceWeights(tmp_path / "back").parameters(
            described(want), fill, resolve(of).stages
        )
        assert_same(read, want)


def test_a_search_ranks_strategies_of_a_model_of_transformers(folder):
    wide = {"n_embd": 1024, "n_layer": 8, "n_head": 16, "vocab_size": 4098}  # not a multiple of 4
    model = imported(folder, "gpt2", overrides=wide)
    of = program(
        target="v5e:2x4", mesh=Mesh(), model=model, batch=Batch(global_batch_size=16, seq_len=32)
    )
    found = search(of, keep=50)
    assert all(one.program.model.overrides == wide for one in found.ranked)
    assert {one.mesh.axes["stage"] for one in found.ranked} >= {4, 8}
    assert {one.mesh.axes["tensor"] for one in found.ranked} <= {1, 2}
    assert {one.program.model.remat for one in found.ranked} <= {"none", "dots", "full"}
    assert found.rejected["tensor 4"] == "does not divide vocab = 4098"
    best = next(one for one in found.ranked if one.mesh.axes["stage"] == 4)
    assert plan_program(best.program).mesh == best.mesh
