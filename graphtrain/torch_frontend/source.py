"""Configuration and sources of an imported model, and the ingredients of its cache key.

Imports no PyTorch.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphtrain.config.hf_config import read_config
from graphtrain.config.hf_images import read_normalization
from graphtrain.config.user_code import find_file, local_sources
from graphtrain.errors import ImportedModelError
from graphtrain.torch_frontend.versions import installed

if TYPE_CHECKING:
    from graphtrain.config.schema import TorchModel

# Files that tracing executes. Estimates, conversions and the parity check change no program.
_SOURCES = (
    *("activation_checkpointing.py", "adapted_parameter.py", "adapters.py", "attention.py"),
    *("axes.py", "block_calls.py", "block_ranges.py", "blocks.py"),
    *("bridge.py", "decode.py", "dependencies.py", "expert_loops.py"),
    "experts.py",
    *("functions.py", "hf_attention.py", "image_pixels.py", "image_positions.py", "image_text.py"),
    "initial_arrays.py",
    *("joint.py", "language_model.py", "load_balancing.py"),
    *("meta_module.py", "model.py", "module_calls.py", "module_factory.py", "names.toml"),
    *("open_module.py", "partial_runs.py"),
    *("pipeline_parts.py", "private_torch.py"),
    *(
        "quantized_modules.py",
        "random_operations.py",
        "random_values.py",
        "recorded_modules.py",
        "scan.py",
        "scan_blocks.py",
        "segmented_attention.py",
        "silent_failures.py",
        "source.py",
        "staged_blocks.py",
        "strict.py",
        "strict_logits.py",
        "traced_calls.py",
    ),
    "transformers_model.py",
    "vision_tower.py",
)


def key_ingredients(model: TorchModel) -> dict[str, Any]:
    """Return all that can change the traced model, for its cache key.

    Files are represented by their contents, not by their names.

    Raises:
        ImportedModelError: the configuration or the module cannot be found.
    """
    settings = asdict(model)
    if model.hf is not None:
        settings["hf"] = read_config(model.hf, {})
        if model.images:
            settings["normalization"] = asdict(read_normalization(model.hf))
    else:
        assert model.torch is not None
        name, function = split_name(model.torch)
        settings["torch"] = {
            "factory": function,
            "sources": sorted(local_sources(find_module_file(name))),
        }
    package_sources = {name: _digest(Path(__file__).with_name(name)) for name in _SOURCES}
    return settings | {"versions": installed(), "sources": package_sources}


def split_name(name: str) -> tuple[str, str]:
    """Split "module:factory" into a module, or the path of a .py file, and a function name.

    Raises:
        ImportedModelError: the name is not of that form.
    """
    module, colon, function = name.rpartition(":")
    if not colon or not module or not function.isidentifier():
        raise ImportedModelError(
            f'program.model.torch = "{name}" is not of the form "module:factory"'
        )
    return module, function


def find_module_file(name: str) -> Path:
    """Return the file of a module; the working directory is searched first.

    Raises:
        ImportedModelError: the module does not exist.
    """
    path = find_file(name)
    if path is None:
        raise ImportedModelError(
            f'program.model.torch = "{name}:...": module not found in the working directory or on '
            "sys.path; set it to an importable module, or to a path that ends in .py"
        )
    return path


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
