"""Days and money of a number of tokens, at prices of the user."""

from dataclasses import replace

import pytest

from graphtrain.cost_model.assessment import StepTime
from graphtrain.errors import PlanError
from graphtrain.planning.costs import (
    PUBLISHED_RANGE,
    Cost,
    PhaseSteps,
    Prices,
    Workload,
    read_prices,
)
from lowering.machine.target import AT_PEAK, Target

TARGET = Target.parse("h100:16")
STEP = StepTime(compute=1.5, memory=0.5, communication={}, bubble=0.0, overlapped=0.0)
OF_H100 = replace(AT_PEAK, machine="h100")
PRICES = Prices({"h100": 2.5}, "EUR")
WORK = Workload(tokens=86_400_000, prices=PRICES)


def test_tokens_take_days_and_money_by_the_time_of_a_step():
    cost = WORK.cost(TARGET, "bfloat16", 2_000, STEP)  # 1,000 tokens per second: one day
    assert cost == Cost(tokens_per_second=1_000, days=1.0, price=24 * 16 * 2.5)
    assert WORK.cells(cost) == ["1,000", "1", "960"] and WORK.columns[-1] == ">EUR"
    assert WORK.sentence(cost) == "86,400,000 tokens: 1 days at 1,000 tokens/s, 960 EUR"
    assert Workload().cells(cost) == ["1,000"] and Workload().columns == [">tokens/s"]


def test_tokens_of_earlier_phases_take_their_own_time():
    earlier = [PhaseSteps(100, 1_000, replace(STEP, compute=0.5))]  # a step takes a second
    work = Workload(300_000)  # 100,000 in 100 s, and 200,000 in 100 steps of 2 s
    cost = work.cost(TARGET, "bfloat16", 2_000, STEP, earlier)
    assert cost.days == pytest.approx(300 / 86_400) and cost.tokens_per_second == 1_000
    few = Workload(50_000).cost(TARGET, "bfloat16", 2_000, STEP, earlier)
    assert few.days == pytest.approx(50 / 86_400)
    assert Workload().cost(TARGET, "bfloat16", 2_000, STEP, earlier).tokens_per_second == 1_000
    unknown = [replace(earlier[0], time=replace(STEP, memory=None))]
    assert work.cost(TARGET, "bfloat16", 2_000, STEP, unknown) == Cost()


def test_what_published_steps_took_gives_a_range():
    cost = WORK.cost(TARGET, "bfloat16", 2_000, replace(STEP, achieved=OF_H100))
    low, high = PUBLISHED_RANGE
    assert cost.between(1.0) == f"1 ({low:.3g} to {high:.3g})"
    assert f"80 % of the published steps took {low} to {high} x" in WORK.sentence(cost)


@pytest.mark.parametrize(("target", "dtype"), [("mi300x:16", "bfloat16"), ("h100:16", "float32")])
def test_machines_and_dtypes_that_nothing_was_fitted_to_have_no_range(target, dtype):
    work = Workload(WORK.tokens)
    cost = work.cost(Target.parse(target), dtype, 2_000, replace(STEP, achieved=OF_H100))
    machine = target.split(":")[0]
    assert cost.range is None and cost.days == 1.0
    assert Workload.note([cost]) == (
        f"nothing was fitted to published steps of {machine} in {dtype}: no range"
    )


def test_steps_shorter_than_published_ones_have_no_range():
    short = replace(STEP, compute=0.01, memory=0.01, achieved=OF_H100)
    cost = WORK.cost(TARGET, "bfloat16", 2_000, short)
    assert cost.range is None and cost.days
    assert "published steps of less than 0.1 s: no range" in WORK.sentence(cost)


def test_machines_without_a_range_are_named_in_one_sentence():
    costs = [Cost(unfitted=name) for name in ("l4 in bfloat16", "a10g in bfloat16")]
    assert Workload.note([*costs, *costs]) == (
        "nothing was fitted to published steps of l4 in bfloat16, a10g in bfloat16: no range"
    )


def test_an_incomplete_time_has_no_cost():
    cost = WORK.cost(TARGET, "bfloat16", 2_000, replace(STEP, memory=None))
    assert cost == Cost() and WORK.cells(cost) == ["unknown"] * 3
    assert "unknown" in WORK.sentence(cost) and WORK.cost(TARGET, "bfloat16", 2_000, None) == Cost()


def test_the_price_of_a_target_takes_precedence_over_its_machines():
    prices = Prices({"h100": 2.5, "h100:16": 2.0})
    assert prices.hour(Target.parse("h100:2x8")) == 32
    one = Prices({"h100": 2.5, "h100:1": 3.0})
    assert one.hour(Target.parse("h100:1x1")) == 3  # the same device
    assert prices.hour(TARGET) == 32 and prices.hour(Target.parse("h100:8")) == 20
    with pytest.raises(PlanError, match=r"no price of v5p; add it to \[device_hour\]"):
        prices.hour(Target.parse("v5p:2x2x1"))
    slices = Prices({"v5p": 4.0, "2xv5p:2x2x1": 3.0})
    assert slices.hour(Target.parse("3xv5p:2x2x1")) == 48
    assert slices.hour(Target.parse("2xv5p:2x2x1")) == 24


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("foo = 1", "device_hour"),
        ("[device_hour]\nh1000 = 1", "did you mean h100"),
        ("[device_hour]\nh100 = 0", "device_hour.h100: should be greater than 0"),
        ("[device_hour]\nh100 = nan", "device_hour.h100: should be a finite number"),
        ("[device_hour]\nh100 = '2'", "valid number"),
        ("[device_hour]\nh100 = -1", "greater than 0"),
        ("[device_hour]\nh100 = inf", "device_hour.h100: should be a finite number"),
        ("[device_hour]\n'v5p:3x3x3' = 1", "v5p has no slice of 3x3x3"),
        ("[device_hour]\n'2xh100:8' = 1", "only TPUs have slices"),
        ("[device_hour]\n'1xv5p:4x4x4' = 1", "write '1xv5p:4x4x4' as 'v5p:4x4x4'"),
        ("[device_hour]\n'h100:64' = 1\n'h100:8x8' = 2", "are the same devices"),
        ("[device_hour", "Expected"),
        ("per_hour = 3\n[device_hour]\nh100 = 1", "per_hour"),
    ],
)
def test_wrong_prices_are_named(tmp_path, text, problem):
    path = tmp_path / "prices.toml"
    path.write_text(text)
    with pytest.raises(PlanError, match=r"--prices .*prices.toml") as error:
        read_prices(path)
    assert problem in str(error.value)
    with pytest.raises(PlanError, match="cannot be read"):
        read_prices(tmp_path / "none.toml")


@pytest.mark.parametrize("currency", ["", "  ", "EUR\\u001b[31m", "EUR\\n"])
def test_a_currency_that_a_line_cannot_show_is_refused(currency, tmp_path):
    path = tmp_path / "prices.toml"
    path.write_text(f'currency = "{currency}"\n[device_hour]\nh100 = 2.5\n')
    with pytest.raises(PlanError, match=r"currency: .*the name or the sign of a currency"):
        read_prices(path)


def test_prices_are_read(tmp_path):
    path = tmp_path / "prices.toml"
    path.write_text('currency = "EUR"\n[device_hour]\nh100 = 2.5\n"v5p:2x2x1" = 4\n')
    assert read_prices(path) == Prices({"h100": 2.5, "v5p:2x2x1": 4.0}, "EUR")
