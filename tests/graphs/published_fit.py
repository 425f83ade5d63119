"""Fits what machines reach of their peak to the published steps that are not held out."""

import hashlib
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from published_rows import Kernel, NotModelled, kernel_of, program_of, published_seconds
from pydantic import ValidationError

from graphtrain.config.resolve import ResolvedProgram, resolve
from graphtrain.cost_model.assessment import Assessment, StepTime
from graphtrain.cost_model.compute import expected_excess
from graphtrain.cost_model.padded_stages import with_padding_layers
from graphtrain.cost_model.time import hideable_seconds, step_time
from graphtrain.cost_model.traffic import bubble_of
from graphtrain.planning.assess import estimate
from lowering.errors import LoweringError
from lowering.machine.target import AT_PEAK, Achieved, machine_of
from sharding_rules.errors import ShardingError

PLATFORMS = {
    **dict.fromkeys(("h100", "a100"), "cuda"),
    **dict.fromkeys(("v4", "v5e", "v5p", "v6e", "tpu7x"), "tpu"),
    "trn1": "neuron",
    "ascend910b": "ascend",
}
_TELLING = 0.05  # of the FLOPs of a step are attention's scores
_OUTLIER = 0.4  # of the logarithm: a row that is farther off counts as much as one at 0.4
Fits = dict[tuple[str, Kernel], Achieved]


@dataclass(frozen=True, eq=False)
class Prediction:
    """One row: seconds of a step, as published and as estimated."""

    name: str
    source: str
    machine: str
    kernel: Kernel
    published: float
    program: ResolvedProgram
    assessment: Assessment
    is_held_out: bool
    is_serial: bool = False  # collectives of tensor parallelism do not overlap, the source says

    @cached_property
    def _at(self) -> Callable[[Achieved], StepTime]:
        padded, assessment = with_padding_layers(self.program), self.assessment
        bubble = bubble_of(self.program)
        flash = self.kernel != "none"
        excess = expected_excess(self.program, flash=flash)
        collectives = assessment.collectives
        return lambda achieved: step_time(
            padded, assessment.memory, collectives, bubble, achieved, flash, excess
        )

    @cached_property
    def _at_peak(self) -> StepTime:
        return self._at(AT_PEAK)

    @cached_property
    def _scores(self) -> float:
        """Seconds of attention's scores at the peak."""
        return (self._at(replace(AT_PEAK, attention=0.5)).compute or 0.0) - self._compute

    @cached_property
    def _narrow(self) -> float:
        """Seconds of products in 8 bits at the peak."""
        return (self._at(replace(AT_PEAK, products_8bit=0.5)).compute or 0.0) - self._compute

    @property
    def share_of_narrow(self) -> float:
        """Products in 8 bits as a part of the step's time at the peak."""
        return self._narrow / self._compute

    @property
    def share_of_scores(self) -> float:
        """Attention's scores as a part of the step's FLOPs."""
        return self._scores / self._compute

    @property
    def _compute(self) -> float:
        return self._at_peak.compute or 0.0

    @property
    def _idle_per_tick(self) -> float:
        idle = bubble_of(self.program)
        return idle / (1 - idle)

    def seconds(self, achieved: Achieved) -> float:
        """Return the seconds of a step that reaches fractions of the machine's peak."""
        peak, reached = self._at_peak, achieved.attention
        if self.is_serial:
            achieved = replace(achieved, tensor_overlap=0.0)
        wide = self._compute - self._scores - self._narrow
        compute = wide / achieved.products + self._narrow / achieved.narrow_products
        compute += self._scores / (achieved.products if self.kernel == "none" else reached)
        # Published pipelines are taken to sum gradients beside their last backward passes, as
        # Megatron-LM does (--overlap-grad-reduce); most of graphtrain's own do so after them.
        hideable = hideable_seconds(peak.communication, achieved)
        bubble = (peak.bubble or 0.0) + (compute - self._compute) * self._idle_per_tick
        time = replace(peak, compute=compute, bubble=bubble, overlapped=min(hideable, compute))
        return time.known

    def error(self, achieved: Achieved) -> float:
        """Return the relative error of the predicted seconds; negative if predicted too fast."""
        return self.seconds(achieved) / self.published - 1


def predict_all(rows: Sequence[Mapping[str, Any]]) -> tuple[list[Prediction], dict[str, str]]:
    """Return the rows that can be predicted, and the reasons why the others cannot."""
    predictions, reasons = [], {}
    for row in rows:
        try:
            predictions.append(predict(row))
        except ValidationError as error:  # pydantic's: its message names the model's internals
            messages = (one["msg"].removeprefix("Value error, ") for one in error.errors())
            reasons[row["name"]] = "; ".join(messages)
        except (NotModelled, ShardingError, LoweringError) as error:
            reasons[row["name"]] = str(error).replace("\n", " ")
    return predictions, reasons


def predict(row: Mapping[str, Any]) -> Prediction:
    """Estimate a row.

    Raises:
        NotModelled: the row needs what there is not.
    """
    program = resolve(program_of(row))
    assessment = estimate(program)
    if not assessment.time.is_complete or assessment.time.total is None:
        raise NotModelled("a speed of the machine is unknown")
    name = row["name"]
    return Prediction(
        name=name,
        source=row["source"],
        machine=machine_of(row["target"]),
        kernel=kernel_of(row),
        published=published_seconds(row),
        program=program,
        assessment=assessment,
        is_held_out=hashlib.sha256(name.encode()).digest()[0] % 2 == 1,
        is_serial=row.get("tensor_collectives") == "serial",
    )


def fit(predictions: Sequence[Prediction]) -> Fits:
    """Fit what each machine and kernel reaches, on the rows that are not held out.

    Products and attention by machine, the overlap of tensor parallelism by platform: all values of
    a grid are tried together. A kernel or a machine all of whose rows are held out has the median
    of its machine's kernels, or of its platform's machines.
    """
    fitted = [one for one in predictions if not one.is_held_out]
    found: Fits = {}
    for name in sorted({platform(one) for one in fitted}):
        rows = [one for one in fitted if platform(one) == name]
        found |= min(
            (fit_machines(rows, tenth / 10) for tenth in range(0, 11, 2)),
            key=lambda of: loss(rows, of),
        )
    for one in predictions:
        alike = {key: of for key, of in found.items() if PLATFORMS[key[0]] == platform(one)}
        own = [of for (machine, _), of in alike.items() if machine == one.machine]
        found.setdefault((one.machine, one.kernel), median_of(own or [*alike.values()]))
    return found


def fit_machines(rows: Sequence[Prediction], tensor_overlap: float) -> Fits:
    """Fit products and attention of each machine of a platform, and of each kernel."""
    found: Fits = {}
    for machine in sorted({one.machine for one in rows}):
        own = [one for one in rows if one.machine == machine]
        wide = [one for one in own if not one.share_of_narrow]
        found |= min(
            (fit_kernels(wide, percent / 100, tensor_overlap) for percent in range(40, 91, 2)),
            key=lambda of: loss(wide, of),
        )
        found |= fit_narrow([one for one in own if one.share_of_narrow], found)
    return found


def fit_narrow(rows: Sequence[Prediction], wide: Mapping[tuple[str, Kernel], Achieved]) -> Fits:
    """Fit what products in 8 bits reach on a machine, beside the fractions of its other rows."""
    machine = {one.machine for one in rows}
    tried = (
        {
            key: replace(of, products_8bit=percent / 100)
            for key, of in wide.items()
            if key[0] in machine
        }
        for percent in range(30, 91, 2)
    )
    return min(tried, key=lambda of: loss(rows, of)) if rows else {}


def fit_kernels(rows: Sequence[Prediction], products: float, tensor_overlap: float) -> Fits:
    """Fit the attention of each kernel, which is at most as fast as products.

    Rows of which attention is a small part do not tell: half of what products reach is assumed.
    """
    found: Fits = {}
    for kernel in sorted({one.kernel for one in rows}):
        key = rows[0].machine, kernel
        own = [one for one in rows if one.kernel == kernel]
        grid = [percent / 100 for percent in range(20, 91, 5) if percent / 100 <= products]
        if max(one.share_of_scores for one in own) < _TELLING:
            grid = [products / 2]
        tried = [{key: Achieved(products, attention, tensor_overlap)} for attention in grid]
        found |= min(tried, key=lambda of: loss(own, of))
    return found


def achieved_of(one: Prediction, fitted: Fits) -> Achieved:
    """Return what is fitted for a row's machine and kernel."""
    return fitted[one.machine, one.kernel]


def machines_table(predictions: Sequence[Prediction], fitted: Fits) -> dict[str, Achieved]:
    """Return `achieved` as it belongs in topologies.toml, of each machine with a fitted row.

    Attention is that of kernels which are not cuDNN's: the one that graphtrain's own are like.
    """
    machines = sorted({one.machine for one in predictions if not one.is_held_out})
    return {machine: fitted[machine, "flash"] for machine in machines}


def held_out_range(predictions: Sequence[Prediction], fitted: Fits) -> tuple[float, float]:
    """Return measured over predicted time of the middle 80 % of the held-out rows.

    planning/costs.py prints it beside days and costs.
    """
    held_out = [one for one in predictions if one.is_held_out]
    ratios = [1 / (1 + one.error(achieved_of(one, fitted))) for one in held_out]
    tenths = statistics.quantiles(ratios, n=10, method="inclusive")
    return tenths[0], tenths[-1]


def loss(rows: Sequence[Prediction], of: Mapping[tuple[str, Kernel], Achieved]) -> float:
    """Return the sum of the rows' errors, as logarithms."""
    errors = (one.error(of[one.machine, one.kernel]) for one in rows)
    return sum(min(abs(math.log(1 + error)), _OUTLIER) for error in errors)


def median_of(several: Sequence[Achieved]) -> Achieved:
    """Return the median of each fraction."""
    products, attention, overlap = (
        statistics.median(getattr(of, name) for of in several)
        for name in ("products", "attention", "tensor_overlap")
    )
    narrow = [of.products_8bit for of in several if of.products_8bit is not None]
    return Achieved(
        products, attention, overlap, products_8bit=statistics.median(narrow) if narrow else None
    )


def platform(prediction: Prediction) -> str:
    """Return the platform of a row's machine."""
    return PLATFORMS[prediction.machine]
