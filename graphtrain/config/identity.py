"""Settings that determine what a run computes; a resumed run must have the same.

Every setting is in one of two classes. Those of `MATHEMATICS` change the model, its data or its
updates beyond rounding. Those of `EXECUTION` change where and how the same is computed, what is
written and when, or only the beginning of a run. A name stands for a setting or for a table; the
longest that matches counts.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import Any

from graphtrain.config.hf_config import config_path
from graphtrain.config.lines import KeyPath
from graphtrain.config.phase_settings import schedule, settings_of_step
from graphtrain.config.schema import Config, FlaxModel, Program, TorchModel, is_imported
from graphtrain.config.user_code import UserCode
from graphtrain.files import content_digest

MATHEMATICS = frozenset(
    {
        "program.model",
        "program.batch",
        "program.optimizer",
        "program.precision",
        "program.loss",
        "program.adapter",
        "program.phase",
        "run.data.train",
        "run.data.arguments",
        "run.data.packing",
        "run.data.overlong",
        "run.learning_rate",
        "run.seed",
    }
)

EXECUTION = frozenset(
    {
        "program.target",
        "program.rules",
        "program.mesh",
        "program.pipeline",
        "program.model.axes",  # only how arrays are sharded
        "program.model.remat",
        "program.model.mlp_blocks",
        "program.model.attention",
        "program.model.unroll",
        "program.model.front_end",
        "program.model.parity",
        "program.batch.microbatches",
        "program.batch.padding_sequences",  # they have no weight
        "program.batch.gradient_reduction",
        "program.optimizer.offload_to_host",
        "program.optimizer.group_norms",
        "program.optimizer.skip_spikes",  # may be set when a run has met its first spike
        "program.loss.chunk",
        "program.serve",
        "program.dump",
        "run.directory",
        "run.steps",  # a run may be continued; `train` says what that changes
        "run.data.validation",
        "run.data.stream",
        "run.init_from",  # frozen weights have digests of their own, in base.json
        "run.init_adapter_from",
        "run.report_every",
        "run.checkpoints",
        "run.upload",
        "run.export",
        "run.export_weights",
        "run.fallback",
        "run.verify_every",
        "run.evaluate_every",
        "run.evaluate_batches",
        "run.early_stopping_patience",
        "run.profile",
        "run.tensorboard",
        "run.trackers",
        "run.samples",
        "run.search",
        "run.spikes",
        "run.tasks",
        "run.watchdog",
    }
)

STEPS = "run.steps"  # recorded to say what a change of it does; never refused

# What older checkpoints call the setting of a newer name.
RENAMED = {"program.model.dtype": "program.precision.compute"}

# Settings that older checkpoints do not name, with the value that they had then.
ADDED = {
    "program.optimizer.kind": "adamw",
    "program.model.partial_rotary_factor": 1.0,
    "program.model.attention_sinks": False,
    "program.model.moe.dense_layers": 0,
    "program.model.moe.score_function": "softmax",
    "program.model.moe.routed_scaling_factor": 1.0,
    "program.model.moe.expert_bias": False,
    "program.model.moe.shared_expert_gate": True,
}


def classes_of(path: KeyPath) -> set[str]:
    """Return the classes that name a setting or, if none does, the nearest table around it."""
    while path:
        name = ".".join(path)
        tables = {"mathematics": MATHEMATICS, "execution": EXECUTION}
        if classes := {kind for kind, names in tables.items() if name in names}:
            return classes
        path = path[:-1]
    return set()


def mathematics(config: Config, step: int = 0) -> dict[str, Any]:
    """Return the values of the settings that determine what a run computes, as JSON, by name.

    With phases, [program.batch] and [program.model] are those of the phase of a step.

    A setting that is in no class counts: forgetting to classify it is then never silent. A path of
    a model is replaced by the digest of its file. Datasets are left to their descriptions.
    """
    values: dict[str, Any] = {}
    _collect(("program",), settings_of_step(config.program, step), values)
    _collect(("run",), config.run, values)
    del values["run.data.train"]
    del values["program.model.dtype"]
    values["program.precision.compute"] = config.program.compute
    if phases := schedule(config.program):
        values["program.phase"] = phases
    model = config.program.model
    if isinstance(model, TorchModel):
        if model.hf:
            values["program.model.hf"] = _file_digest(config_path(model.hf))
        elif model.torch and (file := Path(model.torch.rpartition(":")[0])).suffix == ".py":
            factory = model.torch.rpartition(":")[2]
            values["program.model.torch"] = f"{_file_digest(file)}:{factory}"
    for code in user_code(config.program):
        values[code.setting] = code.key_ingredients()
    return values


def user_code(program: Program) -> list[UserCode]:
    """Return the code of the user that the settings of a program name."""
    model = program.model.user_code if isinstance(program.model, FlaxModel) else None
    return [code for code in (model, program.optimizer.user_code, program.loss.user_code) if code]


# Settings of a model that matter only while it is trained, and its precision.
_OF_TRAINING = {"program.model.dropout", "program.model.init_std", "program.model.dtype"}


def model_mathematics(program: Program) -> dict[str, Any]:
    """Return the part of `mathematics` that determines the outputs of a model with given weights.

    An imported model has only its arrays' names and shapes compared.
    """
    values: dict[str, Any] = {}
    if not is_imported(program.model):
        _collect(("program", "model"), program.model, values)
    return {name: value for name, value in values.items() if is_of_model(name)}


def is_of_model(name: str) -> bool:
    """Return whether a setting determines the outputs of a model with given weights."""
    return name.startswith("program.model.") and name not in _OF_TRAINING


def say(value: Any) -> str:
    """Return a value of a setting for a message."""
    return "unset" if value is None else json.dumps(value)


def differences(saved: Mapping[str, Any], current: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the saved and the current value of each name whose values differ; None: unset."""
    return {
        name: (saved.get(name), current.get(name))
        for name in dict(saved) | dict(current)
        if saved.get(name) != current.get(name)
    }


def identity_changes(
    saved: Mapping[str, Any], current: Mapping[str, Any]
) -> dict[str, tuple[Any, Any]]:
    """Return the `differences` of what two checkpoints, or a checkpoint and a run, compute."""
    named = {RENAMED.get(name, name): value for name, value in saved.items()}
    changed = differences({**ADDED, **named}, {**ADDED, **current})
    changed.pop(STEPS, None)
    return changed


def _collect(path: KeyPath, table: Any, values: dict[str, Any]) -> None:
    for field in fields(table):
        inner, value = (*path, field.name), getattr(table, field.name)
        if is_dataclass(value) and not isinstance(value, type):
            _collect(inner, value, values)
        elif value is not None and classes_of(inner) != {"execution"}:
            values[".".join(inner)] = _plain(value)


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value


def _file_digest(path: Path) -> str:
    try:
        return f"sha256:{content_digest(path)[:16]}"
    except OSError:  # reported where the model is opened
        return "unreadable"
