"""Estimates of models of text and images, beside the arrays and the operations of transformers."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from image_text_folders import KINDS
from image_text_models import batch_of, eager_inputs, program_of
from torch.utils.flop_counter import FlopCounterMode

from graphtrain.config.resolve import resolve
from graphtrain.config.schema import Adapter, Batch, Mesh, Program
from graphtrain.cost_model.compute import flops_by_part
from graphtrain.cost_model.native_equivalent import sizes_unknown, with_native_model
from graphtrain.cost_model.tower import useful_step_flops
from graphtrain.errors import PlanError
from graphtrain.planning.assess import estimate
from graphtrain.planning.search import search


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


def forward_flops(of: Program) -> int:
    """The operations of transformers' own products for a batch whose rows all have two images."""
    model: Any = of.model
    module = transformers.AutoModelForImageTextToText.from_pretrained(
        model.hf, dtype=torch.float32, attn_implementation="eager"
    )
    inputs = batch_of(of)
    inputs = {name: array[:, 2::3] for name, array in inputs.items()}  # 0, 1, 2, 0, ... images
    arguments = eager_inputs(of, inputs)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        module(**arguments, use_cache=False)
    rows = arguments["input_ids"].shape[0]
    return counter.get_total_flops() // rows * of.batch.rows


@pytest.mark.parametrize("kind", KINDS)
def test_flops_are_those_of_transformers(kind, directory):
    of = program_of(kind, directory)
    parts = flops_by_part(resolve(of), flash=False)
    step = sum(part.model for part in parts)
    assert step / 3 == pytest.approx(forward_flops(of), rel=0.04)
    assert sizes_unknown(of)  # a run takes them from the compiled program: it builds no module
    useful = useful_step_flops(of)["mfu"] * of.batch.tokens
    assert useful == pytest.approx(step, rel=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mesh", [Mesh(data=2), Mesh(fsdp=2)])
def test_the_state_is_that_of_the_plan(kind, directory, mesh):
    of = resolve(program_of(kind, directory, target="cpu:2", mesh=mesh))
    assessment: Any = estimate(of)
    plan, memory = assessment.plan, assessment.memory
    stored = sum(map(plan.bytes_per_device, ("parameter", "constant", "buffer")))
    assert memory.parameters == pytest.approx(stored, rel=0.03)
    assert memory.optimizer == pytest.approx(plan.bytes_per_device("optimizer"), rel=0.03)
    assert memory.peak > memory.parameters + memory.optimizer + memory.activations
    assert assessment.time.compute > 0


ADAPTER = Adapter(rank=1, alpha=1.0)


@pytest.mark.parametrize(
    ("kind", "pattern"),
    [
        ("llava", "multi_modal_projector/*"),
        ("llava", "vision_tower/*"),
        ("qwen2_5_vl", "visual/*"),
    ],
)
def test_parts_of_a_tower_that_an_adapter_trains_in_full_are_counted(kind, pattern, directory):
    """The frozen parts have no moments and no product for a gradient."""
    adapter = replace(ADAPTER, modules_to_save=(pattern,))
    frozen, trained = (
        resolve(program_of(kind, directory, adapter=each)) for each in (ADAPTER, adapter)
    )
    before: Any = estimate(frozen)
    after: Any = estimate(trained)
    for role, name in (("optimizer", "optimizer"), ("parameter", "parameters")):
        more = after.plan.bytes_per_device(role) - before.plan.bytes_per_device(role)
        estimated = getattr(after.memory, name) - getattr(before.memory, name)
        assert estimated == pytest.approx(more, rel=0.1) and more > 0
    assert after.memory.peak > before.memory.peak
    step = useful_step_flops(trained.settings)["mfu"]
    parts = flops_by_part(trained, flash=False)
    assert sum(part.model for part in parts) / trained.batch.tokens == pytest.approx(step, rel=0.01)
    assert useful_step_flops(frozen.settings)["mfu"] < step
    assert step < useful_step_flops(replace(trained.settings, adapter=None))["mfu"]


def test_more_images_take_more_memory_and_time(directory):
    of = program_of("llava", directory, batch=Batch(global_batch_size=8, seq_len=80))
    one: Any
    four: Any
    one, four = (
        estimate(resolve(replace(of, model=replace(of.model, images=images)))) for images in (1, 4)
    )
    assert four.memory.activations > one.memory.activations
    assert four.memory.parameters == one.memory.parameters
    assert four.time.compute > 1.05 * one.time.compute


@pytest.mark.parametrize("kind", KINDS)
def test_a_search_ranks_strategies_of_a_program_with_images(kind, directory):
    of = program_of(kind, directory, target="cpu:2", mesh=Mesh(fsdp=2))
    result = search(of, keep=3)
    assert len(result.ranked) == 3
    for candidate in result.ranked:
        model: Any = candidate.program.model
        assert model.images == 2 and candidate.program.tower is None
        assert candidate.memory.peak == estimate(candidate.program).memory.peak
    assert {"stage", "context"} <= result.rejected.keys()


def test_a_tower_of_another_kind_is_not_estimated(directory):
    of = program_of("llava", directory)
    model = replace(of.model, overrides={"vision_feature_layer": [-2, -1]})
    with pytest.raises(PlanError, match=r"images: estimates know the vision towers of Llava and"):
        with_native_model(replace(of, model=model))
    assert sizes_unknown(replace(of, model=model))
