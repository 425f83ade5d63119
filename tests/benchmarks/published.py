"""Predicted beside published throughput: the judge of the plan's time model.

    python tests/benchmarks/published.py [--json FILE] [--markdown]

Every row of published_steps.toml becomes a program and is estimated without a compiler, as by
`graphtrain plan --no-compile`. One efficiency for each kind of machine (the part of its peak that
products reach) is fitted on half of the rows, chosen by a hash of their names; errors are reported
for the other half. Rows that the model or the planner cannot express are listed with the
reason, and count as misses.
"""

import argparse
import hashlib
import json
import statistics
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graphtrain.config.resolve import resolve
from graphtrain.config.schema import Batch, Mesh, Model, PipelineSettings, Program
from graphtrain.config.schema.model import MixtureOfExperts
from graphtrain.cost_model.assessment import StepTime
from graphtrain.cost_model.time import OVERLAPPED_AXES
from graphtrain.planning.assess import estimate
from lowering.errors import LoweringError
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
# How sources count FLOPs per token, and the factor of attention's scores in it.
FORMULAS = {"6*N + 6*layers*heads*head_dim*S": 6, "6*N + 12*layers*heads*head_dim*S": 12}


class NotModelled(Exception):
    """A row needs what the planner or the native model does not have."""


@dataclass(frozen=True)
class Prediction:
    """One row: seconds of a step, as published and as estimated."""

    name: str
    machine: str
    published: float
    time: StepTime  # products at the machine's peak
    is_held_out: bool

    def seconds(self, efficiency: float) -> float:
        """Return the seconds of a step whose products reach a part of the machine's peak."""
        compute = (self.time.compute or 0.0) / efficiency
        sent = {axes: seconds or 0.0 for axes, seconds in self.time.communication.items()}
        hideable = sum(sent[axes] for axes in sent if set(axes.split("+")) <= OVERLAPPED_AXES)
        exposed = sum(sent.values()) - min(hideable, compute)
        bubble = (self.time.bubble or 0.0) / efficiency
        return max(compute, self.time.memory or 0.0) + exposed + bubble

    @property
    def efficiency(self) -> float:
        """Return the efficiency that predicts what was published, from 0.01 to 1."""
        low, high = 0.01, 1.0
        while high - low > 1e-4:
            middle = (low + high) / 2
            low, high = (middle, high) if self.seconds(middle) > self.published else (low, middle)
        return high


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
    time = estimate(resolve(program_of(row))).time
    if not time.is_complete or time.total is None:
        raise NotModelled("a speed of the machine is unknown")
    machine = row["target"].partition(":")[0]
    digest = hashlib.sha256(row["name"].encode()).digest()
    return Prediction(row["name"], machine, published_seconds(row), time, digest[0] % 2 == 1)


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
        NotModelled: a precision, a recomputation or a part of the model is not expressible.
    """
    precision = row.get("precision", "bf16")
    if precision.startswith("fp8"):
        raise NotModelled("fp8 is not a dtype of the planner")
    if ":" not in row["target"] or " " in row["target"]:
        raise NotModelled(f"{row['target']} is not a target")
    sizes = {name: size for name, size in row["mesh"].items() if size > 1}
    return Program(
        target=row["target"],
        mesh=Mesh(**sizes),
        model=model_of(row),
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
        attention="auto",
    )


def fit(predictions: Sequence[Prediction]) -> dict[str, float]:
    """Return the median efficiency of each machine over the rows that are not held out.

    A machine all of whose rows are held out has the median of all machines.
    """
    fitted = [one for one in predictions if not one.is_held_out]
    overall = statistics.median(one.efficiency for one in fitted)
    found = {one.machine: overall for one in predictions}
    for machine in found:
        if own := [one.efficiency for one in fitted if one.machine == machine]:
            found[machine] = statistics.median(own)
    return found


def error_of(prediction: Prediction, fitted: Mapping[str, float]) -> float:
    """Return the relative error of the predicted seconds; negative if predicted too fast."""
    return prediction.seconds(fitted[prediction.machine]) / prediction.published - 1


def report(
    predictions: Sequence[Prediction],
    fitted: Mapping[str, float],
    reasons: Mapping[str, str],
    markdown: bool,
) -> list[str]:
    """Return the lines of the report."""
    held_out = [one for one in predictions if one.is_held_out]
    within = [one for one in held_out if abs(error_of(one, fitted)) <= TOLERANCE]
    ordered = sorted(held_out, key=lambda one: -abs(error_of(one, fitted)))
    lines = [
        f"{len(predictions)} of {len(predictions) + len(reasons)} rows can be predicted",
        "efficiency fitted: "
        + ", ".join(f"{name} {value:.2f}" for name, value in sorted(fitted.items())),
        f"held out: {len(within)} of {len(held_out)} within {TOLERANCE:.0%}, "
        f"median error {statistics.median(abs(error_of(one, fitted)) for one in held_out):.1%}",
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
            predicted=one.seconds(fitted[one.machine]),
            error=error_of(one, fitted),
            part="held out" if one.is_held_out else "fitted",
        )
        for one in ordered
    ]
    return [*lines, "", *(f"not predicted: {name}: {why}" for name, why in reasons.items())]


def as_json(
    predictions: Sequence[Prediction], fitted: Mapping[str, float], reasons: Mapping[str, str]
) -> dict[str, Any]:
    """Return the report for programs."""
    return {
        "efficiency": dict(fitted),
        "rows": [
            {
                "name": one.name,
                "published": one.published,
                "predicted": one.seconds(fitted[one.machine]),
                "error": error_of(one, fitted),
                "held_out": one.is_held_out,
            }
            for one in predictions
        ],
        "not_predicted": dict(reasons),
    }


if __name__ == "__main__":
    main()
