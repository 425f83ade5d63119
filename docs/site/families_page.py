"""The register of causal families of transformers, from tests/register/results.json."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from markdown import table

RESULTS = Path(__file__).parents[2] / "tests/register/results.json"
CHECKS = ("trace", "training", "weights", "fsdp")
HEAD = """# Register of families

Causal language models of transformers 5.24, each in a small configuration with the family's own
kinds of layers, by `python tests/register`:

- **trace**: the module and its initial values become JAX functions.
- **training**: five steps of AdamW (weight decay 5) equal eager PyTorch: loss to 1e-5, weights to
  1e-4.
- **weights**: a folder of `save_pretrained` is read and written again, every tensor bit for bit.
- **fsdp**: one step on two devices has the loss of one device.

"""


def page() -> str:
    """Return the page."""
    results: dict[str, Any] = json.loads(RESULTS.read_text())
    checked = {family: found for family, found in results.items() if found}
    passed = sum(_passes(found) for found in checked.values())
    summary = (
        f"Of {len(results)} families {len(checked)} have been checked; {passed} of these pass all "
        "four checks. About the others nothing is known.\n\n"
    )
    rows = [
        (f"`{family}`", *(_mark(found, check) for check in CHECKS), _reason(found))
        for family, found in sorted(checked.items())
    ]
    others = ", ".join(f"`{family}`" for family, found in sorted(results.items()) if not found)
    end = f"\n## Not checked yet\n\n{others}\n" if others else ""
    return HEAD + summary + table(("model_type", *CHECKS, "reason"), rows) + end


def _passes(found: Mapping[str, Any]) -> bool:
    return all(found.get(check, {}).get("passed") for check in CHECKS)


def _mark(found: Mapping[str, Any], check: str) -> str:
    if check not in found:
        return "-"
    return "yes" if found[check]["passed"] else "no"


def _reason(found: Mapping[str, Any]) -> str:
    """Return why the first check failed."""
    words = next((one["words"] for one in found.values() if not one["passed"]), "")
    return words.replace("|", "\\|").replace("<", "&lt;")
