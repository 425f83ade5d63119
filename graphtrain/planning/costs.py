"""Throughput, days and money of a number of tokens on a target, at prices that the user gives."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from graphtrain.cost_model.assessment import StepTime
from graphtrain.errors import PlanError
from graphtrain.files import validate
from graphtrain.planning.formats import UNKNOWN
from lowering.machine.machine_tables import machines, suggestion
from lowering.machine.target import Target
from sharding_rules.documents import DocumentError, read_toml
from sharding_rules.errors import UserError

_SECONDS_PER_DAY = 86_400
# Measured over predicted time of a step, of the middle 80 % of the published steps to which nothing
# was fitted: tests/benchmarks/published.py prints it.
PUBLISHED_RANGE = 0.88, 1.18
_SHORT_STEP = 0.1  # seconds; the published steps take longer, and starting kernels is not counted
_PUBLISHED_DTYPES = "bfloat16", "float16"  # of their models; products may be in 8 bits
_Price = Annotated[float, Field(gt=0, lt=1e9, allow_inf_nan=False)]


def _visible(text: str) -> str:
    """Refuse text that a terminal would not show in one line."""
    if not text.strip() or not text.isprintable():
        raise ValueError("should be the name or the sign of a currency, as in EUR")
    return text


@dataclass(frozen=True)
class Prices:
    """Prices of machines, from a file of the user; graphtrain ships none."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012

    device_hour: Mapping[str, _Price]  # of one device for an hour, by machine or target
    currency: Annotated[str, Field(max_length=20), AfterValidator(_visible)] = "USD"  # only shown

    def hour(self, target: Target) -> float:
        """Return the price of all devices of a target for an hour; that of its own name first.

        Raises:
            PlanError: there is none; the message says what to add.
        """
        for name, price in self.device_hour.items():
            if ":" in name and _is_same(Target.parse(name), target):
                return price * target.devices
        if target.machine in self.device_hour:
            return self.device_hour[target.machine] * target.devices
        raise PlanError(
            f"--prices has no price of {target.machine}; add it to [device_hour], as in "
            f"{target.machine} = 2.5"
        )


def read_prices(path: Path) -> Prices:
    """Read a TOML file of prices: a table [device_hour], and `currency`.

    Raises:
        PlanError: the file cannot be read, or has a wrong entry, which the message names.
    """
    try:
        prices = validate(Prices, read_toml(path))
    except OSError as error:
        raise PlanError(f"--prices {path} cannot be read: {error.strerror}") from None
    except DocumentError as error:
        raise PlanError(f"--prices {path}: {error}") from None
    for name in prices.device_hour:
        try:
            target = Target.parse(name) if ":" in name else None
        except UserError as error:
            raise PlanError(f"--prices {path}: {error}") from None
        if target is not None and str(target) != name:
            raise PlanError(f"--prices {path}: write {name[:100]!r} as {str(target)!r}")
        if target is None and name not in machines():
            raise PlanError(f"--prices {path}: unknown machine {name[:100]!r}; {suggestion(name)}")
    targets = [Target.parse(name) for name in prices.device_hour if ":" in name]
    for one, other in itertools.combinations(targets, 2):
        if _is_same(one, other):
            raise PlanError(
                f"--prices {path}: {one} and {other} are the same devices; remove one of the prices"
            )
    return prices


def _is_same(one: Target, other: Target) -> bool:
    """Return whether two names are of the same devices: h100:64 has 8 hosts of 8, as h100:8x8."""
    if not (one.is_gpu and other.is_gpu):
        return one == other
    hosts = [
        (each.machine, each.devices, min(each.devices, each.devices_per_host or each.devices))
        for each in (one, other)
    ]
    return hosts[0] == hosts[1]


@dataclass(frozen=True)
class PhaseSteps:
    """Steps of a phase of a run that is not its last."""

    steps: int
    tokens_per_step: int
    time: StepTime

    @property
    def seconds(self) -> float | None:
        """Seconds of a step; None: unknown."""
        return _complete(self.time)


def _complete(time: StepTime | None) -> float | None:
    return time.total if time is not None and time.is_complete else None


def _seconds(tokens: int, earlier: Sequence[PhaseSteps], rate: float) -> float:
    """Return the seconds of tokens: those of earlier phases, the rest at the rate of the last."""
    seconds = 0.0
    for one in earlier:
        steps = min(one.steps, tokens / one.tokens_per_step)
        seconds += steps * (one.seconds or 0.0)
        tokens -= round(steps * one.tokens_per_step)
    return seconds + tokens / rate


@dataclass(frozen=True)
class Workload:
    """Number of tokens to train on, and the prices to pay for it."""

    tokens: int | None = None  # None: only the throughput is asked for
    prices: Prices | None = None

    @property
    def columns(self) -> Sequence[str]:
        """Return the columns that cells() fills, as headings of a table."""
        days = [] if self.tokens is None else [">days"]
        money = [] if self.prices is None else [f">{self.prices.currency}"]
        return [">tokens/s", *days, *money]

    def check_prices(self, target: Target) -> None:
        """Check that a target has a price, before it is compiled for.

        Raises:
            PlanError: it has none.
        """
        if self.prices is not None:
            self.prices.hour(target)

    def cost(
        self,
        target: Target,
        dtype: str,
        tokens_per_step: int,
        time: StepTime | None,
        earlier: Sequence[PhaseSteps] = (),
    ) -> Cost:
        """Return what the tokens cost on a target with this time of a step in a dtype.

        Args:
            target: The target.
            dtype: The model's dtype.
            tokens_per_step: Tokens in a step; with phases, of the last one.
            time: Time of this step; None: unknown.
            earlier: Phases before it, which train on the first of the tokens.
        """
        seconds = _complete(time)
        if time is None or seconds is None or any(one.seconds is None for one in earlier):
            return Cost()
        rate = tokens_per_step / seconds
        if self.tokens is not None:
            rate = self.tokens / _seconds(self.tokens, earlier, rate)
        days = None if self.tokens is None else self.tokens / rate / _SECONDS_PER_DAY
        hour = None if self.prices is None else self.prices.hour(target)
        price = None if days is None or hour is None else days * 24 * hour
        if time.achieved is None:  # measured, or of a machine that none is like
            return Cost(rate, days, price)
        if time.achieved.machine != target.machine or dtype not in _PUBLISHED_DTYPES:
            return Cost(rate, days, price, unfitted=f"{target.machine} in {dtype}")
        if seconds < _SHORT_STEP:
            return Cost(rate, days, price, unfitted=f"less than {_SHORT_STEP} s")
        return Cost(rate, days, price, PUBLISHED_RANGE)

    def cells(self, cost: Cost) -> list[str]:
        """Return the text of each column."""
        days = [] if self.tokens is None else [cost.days]
        price = [] if self.prices is None else [cost.price]
        return [_rounded(value) for value in (cost.tokens_per_second, *days, *price)]

    def sentence(self, cost: Cost) -> str:
        """Return the cost in one line, for the plan of one target."""
        if cost.days is None:
            return f"{self.tokens:,} tokens: unknown days, because the step's time is incomplete"
        text = f"{self.tokens:,} tokens: {cost.between(cost.days)} days"
        text += f" at {_rounded(cost.tokens_per_second)} tokens/s"
        if self.prices is not None:
            text += f", {cost.between(cost.price)} {self.prices.currency}"
        return f"{text}; {note}" if (note := self.note([cost])) else text

    @staticmethod
    def note(costs: Sequence[Cost]) -> str:
        """Return what the ranges of costs are from, and why costs have none."""
        ranges = {cost.range for cost in costs if cost.range is not None}
        published = [
            f"80 % of the published steps took {low} to {high} x as long as predicted"
            for low, high in ranges
        ]
        others = [*dict.fromkeys(cost.unfitted for cost in costs if cost.unfitted)]
        if others:
            names = ", ".join(others)
            published.append(f"nothing was fitted to published steps of {names}: no range")
        return "; ".join(published)

    def as_json(self, cost: Cost) -> dict[str, Any]:
        """Return the cost as JSON."""
        currency = self.prices and self.prices.currency
        return asdict(cost) | {"tokens": self.tokens, "currency": currency}


@dataclass(frozen=True)
class Cost:
    """Throughput of a target, and what a workload takes on it; None: unknown, or not asked for."""

    tokens_per_second: float | None = None
    days: float | None = None
    price: float | None = None
    # Measured over predicted time, of 80 % of published steps; None: no step was published.
    range: tuple[float, float] | None = None
    unfitted: str | None = None  # machine and dtype of which no published step was fitted to

    def between(self, value: float | None) -> str:
        """Return a value with the range in which it is expected."""
        if value is None or self.range is None:
            return _rounded(value)
        low, high = (_rounded(value * factor) for factor in self.range)
        return f"{_rounded(value)} ({low} to {high})"


def _rounded(value: float | None) -> str:
    if value is None:
        return UNKNOWN
    return f"{value:.3g}" if value < 1000 else f"{float(f'{value:.3g}'):,.0f}"
