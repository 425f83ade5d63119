"""Products that a step was to compute in fp8 or int8: how many it does, and which fell back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lowering.hlo.quantized_products import QUANTIZED

if TYPE_CHECKING:
    from graphtrain.config.schema import Precision
    from graphtrain.cost_model.assessment import Assessment

_SHOWN = 6  # products that fell back, in one finding


def with_products(assessment: Assessment, products: Mapping[str, int]) -> Assessment:
    """Return an assessment with the products of the compiled step, and a finding if some fell back.

    Args:
        assessment: Assessment of the compiled step.
        products: Executions in a step by "DTYPE PART/ARRAY DIRECTION".
    """
    findings = assessment.findings
    if wide := _fallen_back(products):
        names = [f"{name} ({count} a step)" for name, count in wide.items()]
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        findings += (
            f"{sum(wide.values())} of {sum(products.values())} products fell back to wider "
            f"operands: {', '.join(names[:_SHOWN])}{more}. The compiler for {assessment.target} "
            "has no such product, and quantization then costs time and precision: remove "
            "program.precision.compute, or name the products in program.precision.exclude.",
        )
    return replace(assessment, products=dict(products), findings=findings)


def products_line(precision: Precision, assessment: Assessment) -> list[str]:
    """Return a line with the number of products in fp8 or int8, if they were asked for."""
    asked = precision.matmul_dtype
    if asked is None:
        return []
    if assessment.products is None:
        return [f"products in {asked}: known once the step is compiled"]
    counts = _counts(assessment.products)
    total = sum(assessment.products.values())
    excluded = ", ".join(precision.excluded) or "none"
    return [
        f"products in {asked}: {counts[asked]:,} of {total:,} a step; excluded: {excluded} "
        "(source: compiler)"
    ]


def products_as_json(assessment: Assessment) -> dict[str, Any] | None:
    """Return the executions in a step by dtype, and by name those that fell back."""
    if assessment.products is None:
        return None
    return _counts(assessment.products) | {"fell_back": _fallen_back(assessment.products)}


def _counts(products: Mapping[str, int]) -> dict[str, int]:
    return {
        dtype: sum(count for name, count in products.items() if name.split(" ")[0] == dtype)
        for dtype in QUANTIZED
    }


def _fallen_back(products: Mapping[str, int]) -> dict[str, int]:
    return {name: count for name, count in products.items() if name.split(" ")[0] not in QUANTIZED}
