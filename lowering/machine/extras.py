"""Optional packages: the extra of graphtrain that installs each, and the error without it."""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager

from sharding_rules.errors import UserError

# Top-level module: name of its package, and the extra in pyproject.toml that installs it.
_PACKAGES = {
    "PIL": ("Pillow", "vision"),
    "backports": ("backports.zstd", "data"),
    "datasets": ("datasets", "hub"),
    "jax_plugins": ("XLA's compiler for GPUs", "gpu"),
    "jinja2": ("jinja2", "data"),
    "libtpu": ("the TPU compiler, libtpu", "tpu"),
    "lm_eval": ("lm-eval", "eval"),
    "mlflow": ("mlflow-skinny", "mlflow"),
    "mindspore": ("MindSpore", "ascend"),
    "obstore": ("obstore", "share"),
    "pyarrow": ("pyarrow", "data"),
    "prometheus_client": ("prometheus-client", "serve"),
    "qwix": ("qwix", "quantized"),
    "ray": ("Ray", "ray"),
    "securesystemslib": ("securesystemslib", "share"),
    "cryptography": ("cryptography", "share"),
    "simple_slurm": ("simple-slurm", "slurm"),
    "starlette": ("starlette", "serve"),
    "tokenizers": ("tokenizers", "data"),
    "torch": ("PyTorch", "torch"),
    "torchax": ("torchax", "torch"),
    "transformers": ("transformers", "hf"),
    "uvicorn": ("uvicorn", "serve"),
    "wandb": ("wandb", "wandb"),
    "vl_convert": ("vl-convert", "html"),
}


class MissingExtra(UserError):
    """An optional package that is needed is not installed; the message says how to install it."""


def missing_extra(module: str, purpose: str, extra: str | None = None) -> MissingExtra:
    """Return the error for a package that is not installed.

    Args:
        module: module of the package, for example "vl_convert".
        purpose: what needs the package, as the beginning of a sentence.
        extra: extra that installs it; None for the usual one of the package.
    """
    package, usual_extra = _PACKAGES[module.partition(".")[0]]
    return MissingExtra(
        f"{purpose} needs {package}, which is not installed; "
        f"run: {install_command(extra or usual_extra)}"
    )


def install_command(extra: str) -> str:
    """Return the command that installs an extra."""
    return f"pip install 'graphtrain[{extra}]'"


@contextmanager
def optional_import(purpose: str, extra: str | None = None) -> Iterator[None]:
    """Turn the failed import of an optional package in the block into an error with a remedy.

    Args:
        purpose: what needs the package, as the beginning of a sentence.
        extra: extra that installs it; None for the usual one of the package.

    Raises:
        MissingExtra: the package is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if not is_optional(error.name):
            raise
        raise missing_extra(error.name or "", purpose, extra) from None


def is_optional(module: str | None) -> bool:
    """Return whether a module is of a package that an extra installs."""
    return (module or "").partition(".")[0] in _PACKAGES


def is_installed(module: str) -> bool:
    """Return whether a module can be found, without importing it."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ModuleNotFoundError, ValueError):  # its package is missing, or has no specification
        return False
