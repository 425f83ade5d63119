"""The register of causal families of transformers, from tests/register/results.json."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from markdown import table

RESULTS = Path(__file__).parents[2] / "tests/register/results.json"
CHECKS = ("trace", "training", "weights")  # of every family
MORE_CHECKS = ("fsdp", "tensor", "expert", "stage", "generate")
HEAD = """# Register of families

Causal language models of transformers 5.24, each in a small configuration with the family's own
kinds of layers, by `python tests/register`:

- **trace**: the module and its initial values become JAX functions.
- **training**: five steps of AdamW (weight decay 5) equal eager PyTorch: loss to 1e-5, weights to
  1e-4. Where float32 does not suffice for that, both are compared with PyTorch in float64, and
  graphtrain is not farther from it than PyTorch in float32.
- **weights**: a folder of `save_pretrained` is read and written again, every tensor bit for bit.
- **fsdp**: one step on two devices has the loss of one device, to 1e-5.
- **tensor**, **expert**, **stage**: one step with `mesh.data = 2` and `mesh.tensor = 2`, with
  `mesh.expert = 2` (families with experts), with `mesh.stage = 2` (two microbatches) has the loss
  of one device, to 1e-5, and the same weights after it, to 1e-4.
- **generate**: the logits of a prompt and of each token after it, by the KV cache, equal those of
  eager PyTorch without one, to 1e-4 of the largest.

A family is *refused* where the command ends with an error that names the reason; "-" is not
checked.

"""


def page() -> str:
    """Return the page."""
    results: dict[str, Any] = json.loads(RESULTS.read_text())
    checked = {family: found for family, found in results.items() if found}
    columns = CHECKS + MORE_CHECKS
    rows = [
        (f"`{family}`", *(_verdict(found, check) for check in columns), _reasons(found))
        for family, found in sorted(checked.items())
    ]
    others = ", ".join(f"`{family}`" for family, found in sorted(results.items()) if not found)
    end = f"\n## Not checked yet\n\n{others}\n" if others else ""
    return HEAD + _summary(results, checked) + table(("model_type", *columns, "reason"), rows) + end


def _summary(results: Mapping[str, Any], checked: Mapping[str, Any]) -> str:
    passed = sum(all(_verdict(one, check) == "yes" for check in CHECKS) for one in checked.values())
    refused = sum(_verdict(one, "trace") == "refused" for one in checked.values())
    lines = [
        f"Of {len(results)} families {passed} ({passed / len(results):.1%}) pass the first three "
        f"checks, {refused} are refused, {len(results) - len(checked)} not checked yet."
    ]
    for check in MORE_CHECKS:
        verdicts = [_verdict(one, check) for one in checked.values()]
        count = sum(verdict != "-" for verdict in verdicts)
        lines.append(f"{check}: {verdicts.count('yes')} of {count} pass.")
    return " ".join(lines) + "\n\n"


def _verdict(found: Mapping[str, Any], check: str) -> str:
    if check not in found or found[check]["words"] == "no experts":
        return "-"
    if found[check]["passed"]:
        return "yes"
    return "refused" if found[check].get("refused") else "no"


def _reasons(found: Mapping[str, Any]) -> str:
    """Return why checks failed, each reason once."""
    reasons = dict.fromkeys(
        one["words"] for one in found.values() if not one["passed"] and one["words"]
    )
    return "<br>".join(reason.replace("|", "\\|").replace("<", "&lt;") for reason in reasons)
