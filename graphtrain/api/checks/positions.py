"""Problems of positions: sequences longer than what an imported model has, or was trained on."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from graphtrain.api.checks.problem import Problem
from graphtrain.config.hf_config import (
    HF_FILES,
    config_path,
    first_int,
    read_config,
    read_config_json,
)
from graphtrain.config.lines import KeyPath
from graphtrain.config.schema import Config, TorchModel, is_imported
from graphtrain.config.schema.phase import describe_phase
from graphtrain.config.serving_program import context_of_serving
from graphtrain.errors import ImportedModelError
from sharding_rules.documents import DocumentError

_SEQ_LEN: KeyPath = ("program", "batch", "seq_len")
_CONTEXT: KeyPath = ("program", "serve", "context_length")
_LIMITS = ("max_position_embeddings", "n_positions")
# Model types of transformers with a table of learned positions.
_LEARNED = ("biogpt", "gpt2", "gpt_bigcode", "gpt_neo", "openai-gpt", "opt")


def position_problems(config: Config) -> Iterator[Problem]:
    """Yield the problems of positions, of all phases of a run."""
    program = config.program
    yield from _problems(config)
    for index, phase in enumerate(program.phases):
        longer = phase.seq_len is not None and phase.seq_len > program.batch.seq_len
        for problem in (
            _problems(replace(config, program=program.in_phase(phase))) if longer else ()
        ):
            message = f"{describe_phase(index + 1, phase)}: {problem.message}"
            place = ("program", "phase", str(index))
            settings = ((*place, "seq_len"), place, *problem.settings)
            yield Problem(problem.kind, message, settings)


def _problems(config: Config) -> Iterator[Problem]:
    """Yield settings that ask for more positions than the config.json of the weights has.

    A position beyond a table of learned ones cannot be computed. Rotary embeddings compute any, but
    the model was trained on none beyond.
    """
    found = _config_json(config)
    if found is None:
        return
    path, hf = found
    limit = first_int(hf, _LIMITS)
    if not limit:
        return
    if is_imported(config.program.model) and hf.get("model_type") in _LEARNED:
        yield from _beyond_table(config, path, limit)
    elif _is_rotary(config, hf):
        yield from _beyond_training(config, path, max(limit, _extended(config, hf, limit)))


def _config_json(config: Config) -> tuple[Path, Mapping[str, Any]] | None:
    """Return the configuration of the model or its weights, with its path; None if none is read."""
    model = config.program.model
    try:
        if isinstance(model, TorchModel) and model.hf is not None:
            return config_path(model.hf), read_config(model.hf, model.overrides)
        for path in _paths(config):
            if path.is_file():
                return path, read_config_json(path)
    except (ImportedModelError, DocumentError, OSError):  # reported where the weights are read
        pass
    return None


def _paths(config: Config) -> Iterator[Path]:
    yield Path(config.run.directory) / HF_FILES / "config.json"
    if config.run.init_from is not None:
        yield Path(config.run.init_from) / HF_FILES / "config.json"
        yield Path(config.run.init_from) / "config.json"


def _is_rotary(config: Config, hf: Mapping[str, Any]) -> bool:
    model = config.program.model
    return not hf.get("alibi") if is_imported(model) else model.positions == "rope"


def _extended(config: Config, hf: Mapping[str, Any], limit: int) -> float:
    """Return the positions to which a scaling of rotary frequencies extends a model."""
    model = config.program.model
    if not is_imported(model):
        scaling = model.rope_scaling
        if scaling is None:
            return limit
        return scaling.factor * (scaling.original_max_position_embeddings or limit)
    settings = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    factor = settings.get("factor")
    original = first_int(settings, ("original_max_position_embeddings",)) or limit
    return factor * original if isinstance(factor, int | float) else limit


def _beyond_table(config: Config, path: Path, limit: int) -> Iterator[Problem]:
    lengths = {
        _SEQ_LEN: config.program.batch.seq_len,
        _CONTEXT: config.program.serve.context_length or 0,
    }
    for setting, length in lengths.items():
        if length > limit:
            yield Problem(
                "program",
                f"{'.'.join(setting)} = {length} is more than the {limit} learned positions of "
                f"{path}; use at most {limit}",
                (setting,),
            )


def _beyond_training(config: Config, path: Path, limit: float) -> Iterator[Problem]:
    context = context_of_serving(config.program)
    if context > limit:
        setting = _SEQ_LEN if config.program.serve.context_length is None else _CONTEXT
        yield Problem(
            "doubt",
            f"{'.'.join(setting)} = {context} is more than the {limit:.0f} positions of {path}: "
            f"unless it is trained on longer texts, the model generates badly beyond {limit:.0f}",
            (setting,),
        )
