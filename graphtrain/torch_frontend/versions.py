"""Supported combinations of PyTorch, torchax and transformers versions."""

from __future__ import annotations

from graphtrain.errors import ImportedModelError
from lowering.machine.extras import missing_extra
from lowering.machine.toolchain import version

TORCHAX = "0.0.14.dev20261026"


def installed() -> dict[str, str | None]:
    """Return the versions of the packages that trace an imported model; None if missing."""
    return {name: version(name) for name in ("torch", "torchax", "transformers")}


def check_versions(installed_versions: dict[str, str | None], *, hf: bool) -> None:
    """Refuse versions that do not work together, before they fail with an obscure error.

    Args:
        installed_versions: versions by package, as from installed().
        hf: whether the model is one of transformers.

    Raises:
        ImportedModelError: a version is unsupported; says what to install.
        MissingExtra: a package is not installed.
    """
    needed = ["torch", "torchax", *(["transformers"] if hf else [])]
    if missing := [name for name in needed if installed_versions[name] is None]:
        setting, extra = ("hf", "hf") if hf else ("torch", "torch")
        raise missing_extra(missing[0], f"program.model.{setting}", extra)
    torch, torchax = installed_versions["torch"] or "", installed_versions["torchax"] or ""
    if _numbers(torchax) < (0, 0, 14) and _numbers(torch) >= (2, 13):
        raise ImportedModelError(
            f"torchax {torchax} does not import with torch {torch} (google/torchax#101); "
            f"pip install torchax=={TORCHAX}"
        )
    if not (2, 13) <= _numbers(torch) < (2, 14):
        raise ImportedModelError(
            f"torch {torch} is untested with torchax {torchax}; pip install torch==2.13.0"
        )
    transformers = installed_versions["transformers"] or ""
    if hf and not (5, 24) <= _numbers(transformers) < (6,):
        raise ImportedModelError(
            f"transformers {transformers} is not supported: graphtrain replaces the attention of "
            "its models by the interfaces of 5.24; pip install 'transformers>=5.24,<6'"
        )


def _numbers(text: str) -> tuple[int, ...]:
    """Parse the leading numbers of a version: "2.13.0+cpu" becomes (2, 13, 0)."""
    numbers = []
    for component in text.partition("+")[0].split("."):
        if not component.isdigit():
            break
        numbers.append(int(component))
    return tuple(numbers)
