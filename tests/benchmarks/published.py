"""Predicted beside published throughput: the judge of the plan's time model.

    python tests/benchmarks/published.py [--json FILE] [--markdown]

Every row of published_steps.toml becomes a program and is estimated without a compiler, as by
`graphtrain plan --no-compile`. What machines reach of their peak (`achieved` in topologies.toml)
is fitted on half of the rows, chosen by a hash of their names; errors are reported for the other
half. Rows that the model or the planner cannot express are listed with the reason, and count as
misses.
"""

import argparse
import hashlib
import json
import math
import statistics
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from graphtrain.config.resolve import ResolvedProgram, resolve
from graphtrain.config.schema import Batch, Mesh, Model, PipelineSettings, Precision, Program
from graphtrain.config.schema.model import MixtureOfExperts
from graphtrain.cost_model.assessment import Assessment, StepTime
from graphtrain.cost_model.compute import expected_excess
from graphtrain.cost_model.padded_stages import with_padding_layers
from graphtrain.cost_model.time import overlap_of, step_time
from graphtrain.cost_model.traffic import bubble_of
from graphtrain.planning.assess import estimate
from lowering.errors import LoweringError
from lowering.machine.target import AT_PEAK, Achieved
from sharding_rules.errors import ShardingError

ROWS = Path(__file__).with_name("published_steps.toml")
TOLERANCE = 0.15  # of the published step time
REMAT = {
    "full": "full",
    "none": "none",
    "none (no recompute flag in the script)": "none",
    "minimal (saves matmul outputs)": "dots",
    "save matmul outputs (SAVE_DOT_WITH_NO_BATCH_DIM)": "dots",
    "selective attention + sequence parallel": "attention",
    "selective (attention)": "attention",
}
PLATFORMS = {
    **dict.fromkeys(("h100", "a100"), "cuda"),
    **dict.fromkeys(("v4", "v5e", "v5p", "v6e", "tpu7x"), "tpu"),
    "trn1": "neuron",
    "ascend910b": "ascend",
}
_TELLING = 0.05  # of the FLOPs of a step are attention's scores
_OUTLIER = 0.4  # of the logarithm: a row that is farther off counts as much as one at 0.4
Kernel = Literal["flash", "cuDNN", "none"]
# How sources count FLOPs per token, and the factor of attention's scores in it.
FORMULAS = {"6*N + 6*layers*heads*head_dim*S": 6, "6*N + 12*layers*heads*head_dim*S": 12}


class NotModelled(Exception):
    """A row needs what the planner or the native model does not have."""


@dataclass(frozen=True, eq=False)
class Prediction:
    """One row: seconds of a step, as published and as estimated."""

    name: str
    machine: str
    kernel: Kernel
    published: float
    program: ResolvedProgram
    assessment: Assessment
    is_held_out: bool

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

    def seconds(self, achieved: Achieved) -> float:
        """Return the seconds of a step that reaches fractions of the machine's peak."""
        peak, reached = self._at_peak, achieved.attention
        wide = self._compute - self._scores - self._narrow
        compute = wide / achieved.products + self._narrow / achieved.narrow_products
        compute += self._scores / (achieved.products if self.kernel == "none" else reached)
        hideable = sum(
            (seconds or 0.0) * overlap_of(axes.split("+"), achieved)
            for axes, seconds in peak.communication.items()
        )
        bubble = (peak.bubble or 0.0) * compute / self._compute
        time = replace(peak, compute=compute, bubble=bubble, overlapped=min(hideable, compute))
        return time.known

    def error(self, achieved: Achieved) -> float:
        """Return the relative error of the predicted seconds; negative if predicted too fast."""
        return self.seconds(achieved) / self.published - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", action="store_true", help="print the rows as a table")
    arguments = parser.parse_args()
    predictions, reasons = predict_all(tomllib.loads(ROWS.read_text())["row"])
    fitted = fit(predictions)
    for line in report(predictions, fitted, reasons, arguments.markdown):
        print(line)
    if arguments.json:
        arguments.json.write_text(
            json.dumps(as_json(predictions, fitted, reasons), indent=2) + "\n"
        )


def predict_all(rows: Sequence[Mapping[str, Any]]) -> tuple[list[Prediction], dict[str, str]]:
    """Return the rows that can be predicted, and the reasons why the others cannot."""
    predictions, reasons = [], {}
    for row in rows:
        try:
            predictions.append(predict(row))
        except (NotModelled, ShardingError, LoweringError, ValueError) as error:
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
    machine = row["target"].partition(":")[0]
    digest = hashlib.sha256(row["name"].encode()).digest()
    published, held_out = published_seconds(row), digest[0] % 2 == 1
    kernel = kernel_of(row)
    return Prediction(row["name"], machine, kernel, published, program, assessment, held_out)


def kernel_of(row: Mapping[str, Any]) -> Kernel:
    """Return the kind of attention kernel; presumed by the stack where a source does not say it.

    NVIDIA's stacks call cuDNN's; Korthikanti et al. and Pax without Transformer Engine have none.
    """
    name = row["name"]
    if name.startswith("korthikanti") or (name.startswith("pax") and "Engine" not in name):
        return "none"
    return "cuDNN" if row["source"].startswith("NVIDIA/") else "flash"


def published_seconds(row: Mapping[str, Any]) -> float:
    """Return the seconds of a step, from whichever of its forms the source gives.

    Raises:
        NotModelled: only a utilization is given, whose FLOPs the convention decides.
    """
    result, sequences = row["result"], row["global_batch"]
    tokens = sequences * row["seq_len"]
    if "step_seconds" in result:
        return result["step_seconds"]
    if "tokens_per_second_per_chip" in result:
        return tokens / (result["tokens_per_second_per_chip"] * row["chips"])
    if "sequences_per_second" in result:
        return sequences / result["sequences_per_second"]
    flops = flops_per_token(row)
    return tokens * flops / (result["tflops_per_second_per_chip"] * 1e12 * row["chips"])


def flops_per_token(row: Mapping[str, Any]) -> float:
    """Return the FLOPs per token by which a source converts seconds into FLOP/s.

    Raises:
        NotModelled: the source does not say how.
    """
    model = row["model"]
    scores = model["layers"] * model["heads"] * model.get("head_dim", 0) * row["seq_len"]
    for formula, factor in FORMULAS.items():
        if formula in row["convention"] and "tflops_per_second_per_chip" in row["result"]:
            return 6 * model["parameters_computed"] + factor * scores
    raise NotModelled("the source gives FLOP/s or a utilization, and not the formula")


def program_of(row: Mapping[str, Any]) -> Program:
    """Return a row as settings of a program.

    Raises:
        NotModelled: a recomputation or a part of the model is not expressible.
    """
    if ":" not in row["target"] or " " in row["target"]:
        raise NotModelled(f"{row['target']} is not a target")
    sizes = {name: size for name, size in row["mesh"].items() if size > 1}
    return Program(
        target=row["target"],
        mesh=Mesh(**sizes),
        model=model_of(row),
        precision=Precision(compute="fp8" if is_fp8(row) else "bfloat16"),
        batch=Batch(
            global_batch_size=row["global_batch"],
            seq_len=row["seq_len"],
            microbatches=row.get("microbatches", 1),
        ),
        pipeline=PipelineSettings(
            schedule="circular" if row.get("virtual_stages", 1) > 1 else "1f1b",
            virtual_stages=row.get("virtual_stages", 1),
        ),
    )


def is_fp8(row: Mapping[str, Any]) -> bool:
    """Return whether the products of a row are in fp8, of whatever recipe."""
    return row.get("precision", "bf16").startswith("fp8")


def model_of(row: Mapping[str, Any]) -> Model:
    """Return the native model with the sizes of a row's; recomputation that is not stated: none.

    Raises:
        NotModelled: attention of another kind, or a recomputation without a counterpart.
    """
    sizes = row["model"]
    if "kv_lora_rank" in sizes or "sliding_window" in sizes:
        raise NotModelled("multi-head latent attention, or a window with a kernel")
    remat = row.get("remat", "none")
    if remat not in REMAT:
        raise NotModelled(f"recomputation: {remat}")
    learned = sizes.get("learned_positions", False)
    experts = None
    if "experts" in sizes:
        experts = MixtureOfExperts(experts=sizes["experts"], experts_per_token=sizes["top_k"])
    return Model(
        layers=sizes["layers"],
        embed=sizes["hidden"],
        heads=sizes["heads"],
        kv_heads=sizes["kv_heads"],
        head_dim=sizes.get("head_dim"),
        mlp=sizes.get("moe_mlp", sizes["mlp"]),
        vocab=sizes["vocab"],
        activation="swiglu" if sizes["gated"] else "gelu_tanh",
        bias="all" if sizes.get("biases") else "none",
        positions="learned" if learned else "rope",
        max_position_embeddings=row["seq_len"] if learned else None,
        norm="layer" if learned else "rms",
        tie_word_embeddings=sizes.get("tied_embeddings", False),
        moe=experts,
        remat=REMAT[remat],
        attention="dense" if kernel_of(row) == "none" else "auto",
    )


def fit(predictions: Sequence[Prediction]) -> dict[tuple[str, Kernel], Achieved]:
    """Fit what each machine and kernel reaches, on the rows that are not held out.

    Products and attention by machine, the overlap of tensor parallelism by platform: all values of
    a grid are tried together. A kernel or a machine all of whose rows are held out has the median
    of its machine's kernels, or of its platform's machines.
    """
    fitted = [one for one in predictions if not one.is_held_out]
    found: dict[tuple[str, Kernel], Achieved] = {}
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


def fit_machines(
    rows: Sequence[Prediction], tensor_overlap: float
) -> dict[tuple[str, Kernel], Achieved]:
    """Fit products and attention of each machine of a platform, and of each kernel."""
    found: dict[tuple[str, Kernel], Achieved] = {}
    for machine in sorted({one.machine for one in rows}):
        own = [one for one in rows if one.machine == machine]
        wide = [one for one in own if not one.share_of_narrow]
        found |= min(
            (fit_kernels(wide, percent / 100, tensor_overlap) for percent in range(40, 91, 2)),
            key=lambda of: loss(wide, of),
        )
        found |= fit_narrow([one for one in own if one.share_of_narrow], found)
    return found


def fit_narrow(
    rows: Sequence[Prediction], wide: Mapping[tuple[str, Kernel], Achieved]
) -> dict[tuple[str, Kernel], Achieved]:
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


def fit_kernels(
    rows: Sequence[Prediction], products: float, tensor_overlap: float
) -> dict[tuple[str, Kernel], Achieved]:
    """Fit the attention of each kernel, which is at most as fast as products.

    Rows of which attention is a small part do not tell: half of what products reach is assumed.
    """
    found: dict[tuple[str, Kernel], Achieved] = {}
    for kernel in sorted({one.kernel for one in rows}):
        key = rows[0].machine, kernel
        own = [one for one in rows if one.kernel == kernel]
        grid = [percent / 100 for percent in range(20, 91, 5) if percent / 100 <= products]
        if max(one.share_of_scores for one in own) < _TELLING:
            grid = [products / 2]
        tried = [{key: Achieved(products, attention, tensor_overlap)} for attention in grid]
        found |= min(tried, key=lambda of: loss(own, of))
    return found


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


def report(
    predictions: Sequence[Prediction],
    fitted: Mapping[tuple[str, Kernel], Achieved],
    reasons: Mapping[str, str],
    markdown: bool,
) -> list[str]:
    """Return the lines of the report."""
    held_out = [one for one in predictions if one.is_held_out]
    errors = {one.name: one.error(fitted[one.machine, one.kernel]) for one in predictions}
    within = [one for one in held_out if abs(errors[one.name]) <= TOLERANCE]
    ordered = sorted(held_out, key=lambda one: -abs(errors[one.name]))
    lines = [
        f"{len(predictions)} of {len(predictions) + len(reasons)} rows can be predicted",
        "fitted, of the peak: products, attention, overlap of tensor parallelism",
        *(
            f"  {machine}, {kernel}: {of.products:.2f} {of.attention:.2f} {of.tensor_overlap:.1f}"
            + (f", in 8 bits {of.products_8bit:.2f}" if of.products_8bit else "")
            for (machine, kernel), of in sorted(fitted.items())
        ),
        f"held out: {len(within)} of {len(held_out)} within {TOLERANCE:.0%}, "
        f"median error {statistics.median(abs(errors[one.name]) for one in held_out):.1%}",
        "held out: 80 % took {:.2f} to {:.2f} x as long as predicted".format(
            *middle([1 / (1 + errors[one.name]) for one in held_out])
        ),
    ]
    if markdown:
        lines += ["", "| row | published, s | predicted, s | error | |", "|---|---|---|---|---|"]
        template = "| {name} | {published:.3g} | {predicted:.3g} | {error:+.0%} | {part} |"
        ordered = sorted(predictions, key=lambda one: one.name)
    else:
        template = "{error:+5.0%}  {published:8.3f} s  {predicted:8.3f} s  {name}"
    lines += [
        template.format(
            name=one.name,
            published=one.published,
            predicted=one.published * (1 + errors[one.name]),
            error=errors[one.name],
            part="held out" if one.is_held_out else "fitted",
        )
        for one in ordered
    ]
    return [*lines, "", *(f"not predicted: {name}: {why}" for name, why in reasons.items())]


def middle(ratios: Sequence[float]) -> tuple[float, float]:
    """Return the bounds of the middle 80 %; planning/costs.py prints those of the held-out rows."""
    tenths = statistics.quantiles(ratios, n=10, method="inclusive")
    return tenths[0], tenths[-1]


def as_json(
    predictions: Sequence[Prediction],
    fitted: Mapping[tuple[str, Kernel], Achieved],
    reasons: Mapping[str, str],
) -> dict[str, Any]:
    """Return the report for programs."""
    return {
        "fitted": [
            {"machine": machine, "kernel": kernel, **asdict(achieved)}
            for (machine, kernel), achieved in fitted.items()
        ],
        "rows": [
            {
                "name": one.name,
                "published": one.published,
                "predicted": one.seconds(fitted[one.machine, one.kernel]),
                "error": one.error(fitted[one.machine, one.kernel]),
                "held_out": one.is_held_out,
            }
            for one in predictions
        ],
        "not_predicted": dict(reasons),
    }


if __name__ == "__main__":
    main()
