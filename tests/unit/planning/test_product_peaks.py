"""Products in 8 bits count at the peak of their dtype, in the time of a step and in its MFU."""

from dataclasses import replace

import pytest

from graphtrain.config.resolve import resolve
from graphtrain.config.schema import Batch, MixtureOfExperts, Model, Precision, Program
from graphtrain.cost_model.compute import flops_by_part
from graphtrain.cost_model.product_peaks import part_peak, quantized_share, step_peak
from graphtrain.cost_model.time import mfu, step_time
from graphtrain.planning.assess import estimate
from lowering.machine.target import Achieved

MODEL = Model(layers=2, embed=64, heads=4, kv_heads=2, mlp=128, vocab=256)
FP8, INT8 = Precision(compute="fp8"), Precision(compute="int8")


def resolved(precision: Precision = FP8, target: str = "h100:1", model: Model = MODEL):
    batch = Batch(global_batch_size=2, seq_len=16)
    return resolve(Program(model=model, batch=batch, target=target, precision=precision))


def test_the_peak_is_that_of_the_dtype_of_the_products():
    of = resolved()
    assert part_peak(of, "MLP") == part_peak(of, "attention projections") == 1978.9e12
    assert part_peak(of, "LM head") == part_peak(of, "attention scores") == 989.4e12
    assert part_peak(resolved(Precision()), "MLP") == 989.4e12
    assert part_peak(resolved(INT8, "a100:1"), "MLP") == 624e12
    assert part_peak(resolved(FP8, "a100:1"), "MLP") == 312e12  # falls back


def test_products_in_8_bits_reach_another_fraction_of_their_peak():
    reached = Achieved(0.5, 0.5, tensor_overlap=0.0, products_8bit=0.25)
    assert part_peak(resolved(), "MLP", reached) == 1978.9e12 / 4
    assert part_peak(resolved(), "LM head", reached) == 989.4e12 / 2
    assert part_peak(resolved(), "MLP", replace(reached, products_8bit=None)) == 1978.9e12 / 2


@pytest.mark.parametrize(
    ("exclude", "moe", "shares"),
    [
        (("down", "output"), None, (8 / 12, 2 / 3, 1.0)),
        (("experts", "head"), MixtureOfExperts(experts=4, capacity_factor=2.0), (1.0, 0.0052, 0)),
        (("router", "up"), MixtureOfExperts(experts=4, capacity_factor=2.0), (1.0, 0.6632, 1)),
    ],
)
def test_what_is_excluded_counts_at_the_peak_of_the_model(exclude, moe, shares):
    precision = Precision(compute="fp8", exclude=exclude)
    of = resolved(precision, model=replace(MODEL, moe=moe))
    parts = "attention projections", "MLP", "LM head"
    found = tuple(quantized_share(of, part) for part in parts)
    assert found == pytest.approx(shares, abs=1e-4)


def test_a_step_in_fp8_takes_the_time_of_its_parts_and_has_the_mfu_of_their_peaks():
    wide, narrow = resolved(Precision()), resolved()
    memory = estimate(wide).memory
    times = [step_time(of, memory, (), flash=False) for of in (wide, narrow)]
    parts = {part.name: part.ideal for part in flops_by_part(wide, flash=False)}
    in_8_bits = parts["MLP"] + parts["attention projections"]
    reached = narrow.target.achieved
    speeds = 989.4 * reached.products, 1978.9 * reached.narrow_products
    saved = in_8_bits / sum(parts.values()) * (1 - speeds[0] / speeds[1])
    assert times[1].compute == pytest.approx(times[0].compute * (1 - saved))
    assert step_peak(wide) == 989.4e12 < step_peak(narrow) < 1978.9e12
    assert mfu(narrow, 1.0) == pytest.approx(mfu(wide, 1.0) * 989.4e12 / step_peak(narrow))
