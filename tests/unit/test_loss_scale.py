"""Settings of the loss scale, and what a run says of a step that overflowed."""

import dataclasses
import math

import pytest

from graphtrain.config.resolve import resolve
from graphtrain.config.schema import Batch, LossScaling, Model, Precision, Program
from graphtrain.models.compute_dtype import check_compute_dtype
from graphtrain.run.metrics import good_steps
from graphtrain.run.pending_step import is_overflow
from graphtrain.run.report_lines import MeanSpeed, step_line
from lowering.errors import LoweringError

HALF = Model(layers=1, embed=8, heads=2, mlp=16, vocab=32, dtype="float16")


def program(**settings):
    return Program(model=HALF, batch=Batch(global_batch_size=2, seq_len=8), **settings)


def test_float16_has_the_dynamic_scale_of_grad_scaler_unless_a_number_is_set():
    expected = LossScaling(initial=65536, growth_interval=2000, growth_factor=2, backoff_factor=0.5)
    assert Precision().scaling("float16") == expected
    assert Precision(loss_scale=128).scaling("float16") == 128.0
    assert Precision().scaling("bfloat16") is None
    assert not any(dataclasses.asdict(Precision()).values())  # older checkpoints name none


@pytest.mark.parametrize("name", ["loss_scale", "initial_scale"])
@pytest.mark.parametrize("value", [0.0, 1e-40, 1e39])
def test_a_scale_that_float32_cannot_hold_is_refused(name, value):
    with pytest.raises(ValueError, match=name):
        Precision(**{name: value})


def test_a_loss_scale_of_another_dtype_or_settings_of_a_constant_one_are_refused():
    words = r'precision\.growth_interval is for compute = "float16"'
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(
            program(precision=Precision(growth_interval=5)),
            model=dataclasses.replace(HALF, dtype="bfloat16"),
        )
    with pytest.raises(ValueError, match='initial_scale is a setting of loss_scale = "dynamic"'):
        Precision(loss_scale=8.0, initial_scale=4.0)


def test_a_target_that_does_not_multiply_in_float16_refuses_it():
    with pytest.raises(LoweringError, match=r'v5e:1x1 does not multiply in float16.*"bfloat16"'):
        check_compute_dtype(resolve(program(target="v5e:1x1")))
    check_compute_dtype(resolve(program(target="h100:1")))


@pytest.mark.parametrize(
    ("metrics", "skipped"),
    [
        ({"grad_norm": math.inf, "loss_scale": 2.0}, True),
        ({"grad_norm": math.nan, "loss_scale": 1.0}, False),  # the scale is not the reason
        ({"grad_norm": math.nan}, False),  # there is no scale
        ({"grad_norm": 1.0, "loss_scale": 2.0}, False),
    ],
)
def test_a_step_is_skipped_only_where_a_smaller_scale_can_help(metrics, skipped):
    assert is_overflow(metrics) == skipped


def test_a_skipped_step_is_reported_and_its_loss_does_not_make_a_checkpoint_good():
    metrics = {"loss": None, "grad_norm": None, "learning_rate": 1e-3, "mfu": None}
    line = step_line(metrics | {"loss_scale": 4096.0, "skipped_steps": 2}, MeanSpeed())
    assert line.startswith("loss overflow  gradient overflow  lr 1.00e-03")
    assert line.endswith("scale 4096, 2 skipped")
    assert good_steps([{"step": 4, "loss": None}, {"step": 5, "loss": 1.0}]) == {4}
