"""Settings of products in fp8 and int8, and the package that they need."""

import dataclasses
import re

import pytest

from graphtrain.api.checks import machine
from graphtrain.config.schema import (
    Batch,
    FlaxModel,
    MixtureOfExperts,
    Model,
    Precision,
    Program,
    TorchModel,
)
from lowering.hlo.collectives import read
from sharding_rules.mesh import MeshShape

MODEL = Model(layers=1, embed=8, heads=2, mlp=16, vocab=32)
FP8 = Precision(compute="fp8")


def program(**settings):
    return Program(**{"model": MODEL, "batch": Batch(global_batch_size=2, seq_len=8)} | settings)


def test_fp8_has_a_scale_for_a_tensor_and_int8_one_for_a_channel_unless_a_recipe_is_set():
    assert FP8.recipe_or_default == "tensor"
    assert Precision(compute="int8").recipe_or_default == "channel"
    assert Precision(compute="fp8", recipe="channel").recipe_or_default == "channel"
    assert Precision().recipe_or_default is None


def test_settings_that_need_or_exclude_quantized_products_are_refused():
    with pytest.raises(ValueError, match='recipe needs compute = "fp8" or "int8"; set it'):
        Precision(recipe="tensor")
    with pytest.raises(ValueError, match="exclude"):
        Precision(**{"compute": "fp8", "exclude": ("norm",)})  # has no product
    per_step = Batch(global_batch_size=2, seq_len=8, gradient_reduction="per_step")
    words = re.escape(
        'precision.compute = "fp8" cannot be used with batch.gradient_reduction = "per_'
    )
    with pytest.raises(ValueError, match=words):
        program(precision=FP8, batch=per_step)


def test_imported_models_without_products_in_8_bits_are_refused():
    flax = FlaxModel(flax="mine.py:M", vocab=8)
    with pytest.raises(ValueError, match=r'"fp8" cannot be used with model\.flax; remove it'):
        program(model=flax, precision=FP8)
    torch = TorchModel(torch="mine.py:M", vocab=8)
    with pytest.raises(ValueError, match='does not name "experts", and those of an imported'):
        program(model=torch, precision=dataclasses.replace(FP8, exclude=("head",)))


def test_experts_without_a_capacity_have_no_product_in_8_bits():
    dropless = dataclasses.replace(MODEL, moe=MixtureOfExperts(experts=2))
    assert program(model=dropless, precision=FP8).precision.excluded[1] == "experts"
    named = dataclasses.replace(FP8, exclude=("head",))
    with pytest.raises(ValueError, match=r'does not name "experts".*or set capacity_factor'):
        program(model=dropless, precision=named)


def test_a_missing_package_is_named_with_its_extra_before_anything_is_compiled(monkeypatch):
    monkeypatch.setattr(machine, "is_installed", lambda module: False)
    (problem,) = machine.precision_problems(program(precision=FP8))
    assert problem.message.endswith("run: pip install 'graphtrain[quantized]'")
    assert not list(machine.precision_problems(program()))


HLO = """HloModule jit_step, is_scheduled=true

ENTRY %main (a: f8e4m3fn[16,16], b: f8e5m2[16,16], c: bf16[16,16]) -> f32[16,16] {
  %a = f8e4m3fn[16,16]{1,0} parameter(0)
  %b = f8e5m2[16,16]{1,0} parameter(1)
  %c = bf16[16,16]{1,0} parameter(2)
  %one = f32[16,16]{1,0} custom-call(%a, %b), custom_call_target="__cublas$lt$matmul$f8", metadata={op_name="jit(step)/transpose(jvp())/mlp/up/quantized_product/dot_general"}
  %two = f32[16,16]{1,0} dot(%a, %c), lhs_contracting_dims={1}, rhs_contracting_dims={0}, metadata={op_name="jit(step)/mlp/down/quantized_product/dot_general"}
  %three = f32[16,16]{1,0} dot(%c, %c), lhs_contracting_dims={1}, rhs_contracting_dims={0}, metadata={op_name="jit(step)/head/dot_general"}
  %four = f32[16,16]{1,0} dot(%c, %c), lhs_contracting_dims={1}, rhs_contracting_dims={0}, metadata={op_name="jit(step)/transpose(jvp(head))/head/quantized_product/dot_general"}
  ROOT %sum = f32[16,16]{1,0} add(%one, %two), metadata={op_name="jit(step)/mlp/up/quantized_product/add"}
}
"""  # noqa: E501


def test_a_product_counts_as_fp8_only_if_both_operands_are():
    facts = read(HLO, MeshShape.resolve({"data": 1}, 1))
    assert dict(facts.products) == {
        "fp8 mlp/up backward": 1,
        "bf16 mlp/down forward": 1,
        "bf16 head backward": 1,
    }
    assert type(facts).from_record(facts.to_record()) == facts
