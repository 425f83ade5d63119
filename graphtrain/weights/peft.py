"""Adapters as PEFT writes them: adapter_config.json and adapter_model.safetensors.

Every adapted weight has the axis embed on one side. With the rank in embed's place, the other
factor is what the weight is to its family's table, so the table says how it is turned, packed and
named. Where Hugging Face packs several weights into one, PEFT has one pair of factors for all:
ours side by side, each with zeros for the others' outputs, so exact, in a rank as many times ours.

Source: https://huggingface.co/docs/peft/developer_guides/checkpoint
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from graphtrain.config.schema import Adapter, Model, Program
from graphtrain.errors import WeightsError
from graphtrain.families import Family, family_for, family_of
from graphtrain.families.family import Piece, array_shape, to_decoder, to_hugging_face
from graphtrain.models.tuned import A, B, adapted_paths, trained_arrays, whole_paths
from graphtrain.weights.convert import Summary, making, read_config, without_padding
from graphtrain.weights.sources import RunCheckpoint

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."


def to_peft_folder(source: Path, destination: Path, step: int | None = None) -> Summary:
    """Make a folder that peft loads, of a run that trained an adapter.

    Raises:
        WeightsError: the run trained none, or something that PEFT cannot say.
    """
    run = RunCheckpoint(source, step)
    adapter = run.program.adapter
    if adapter is None:
        raise WeightsError(f"{source} trained its weights themselves, not an adapter")
    table = _Table.of(run.side, run.model, adapter)
    _check_modules(table)
    tensors: dict[str, np.ndarray] = {}
    for piece in table.adapted():
        paths = [path for path in piece.row.paths if path in table.targets]
        found = run.read([f"{path}/{name}" for path in paths for name in (A, B)], piece.layer)
        pairs = dict(zip(paths, zip(found[::2], found[1::2], strict=True), strict=True))
        tensors |= _named(piece, *_factors(piece, pairs, table.model))
    for piece in table.saved():
        whole = run.read(piece.row.paths, piece.layer)
        cut = [
            array[tuple(slice(size) for size in array_shape(path, table.model))]
            for path, array in zip(piece.row.paths, whole, strict=True)
        ]
        for name, tensor in to_hugging_face(piece, cut, table.model):
            tensors[_PREFIX + name] = tensor
    with making(destination) as directory:
        from safetensors.numpy import save_file

        plain = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
        save_file(plain, directory / _WEIGHTS, {"format": "pt"})
        (directory / _CONFIG).write_text(json.dumps(_config(table), indent=2) + "\n")
    count = sum(tensor.size for tensor in tensors.values())
    return Summary(table.family.model_type, count, len(tensors), "float32")


class PeftAdapter:
    """An adapter that peft saved, as arrays that a program trains, by path.

    Raises:
        WeightsError: it is another than the program's, or one that graphtrain has not.
    """

    def __init__(self, directory: Path, program: Program, side: Path) -> None:
        assert program.adapter is not None
        self.directory, self.adapter = directory, program.adapter
        self.config = _read(directory)
        self._table = _Table.of(side, program.model, program.adapter)
        self._tensors = _load(directory / _WEIGHTS)
        self.arrays = self._stack(program)
        if self._tensors:
            raise WeightsError(
                f"{directory} also holds {', '.join(sorted(self._tensors)[:3])}, which "
                "[program.adapter] does not train; set its targets and whole so that they do"
            )

    def _stack(self, program: Program) -> dict[str, np.ndarray]:
        specs = trained_arrays(program)
        arrays = {path: np.zeros(spec.shape, np.float32) for path, spec in specs.items()}
        for piece in self._table.adapted():
            for path, (first, second) in self._pairs(piece).items():
                arrays[f"{path}/{A}"][piece.layer] = first
                arrays[f"{path}/{B}"][piece.layer] = second
        for piece in self._table.saved():
            tensors = [self._take(name, _PREFIX + name) for name in piece.names]
            decoded = to_decoder(piece, tensors, self._table.model)
            for path, array in zip(piece.row.paths, decoded, strict=True):
                into = arrays[path] if piece.layer is None else arrays[path][piece.layer]
                into[tuple(map(slice, array.shape))] = array  # rows of zeros past the vocabulary
        return arrays

    def _pairs(self, piece: Piece) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Both factors of each weight in a piece."""
        module = _module(piece)
        first = self._take(module, f"{_PREFIX}{module}.lora_A.weight")
        second = self._take(module, f"{_PREFIX}{module}.lora_B.weight")
        rank, count = self.adapter.rank, len(first)
        targets = [path for path in piece.row.paths if path in self._table.targets]
        if count not in (rank, rank * len(targets)):
            raise WeightsError(
                f"{self.directory}: {module} has rank {count} and program.adapter.rank is {rank}; "
                f"set {count}"
            )
        share = _scale(self.config, module, count) / self.adapter.scale
        second = second * np.float32(share) if share != 1 else second
        pairs = {}
        for index, path in enumerate(targets):
            mine = slice(None) if count == rank else slice(index * rank, (index + 1) * rank)
            own = _split(piece, first[mine], second[:, mine], self._table.model)
            others = set(own) - {path}
            separate = count != rank or len(targets) < len(own)
            if separate and any(own[other][1].any() for other in others - set(targets)):
                raise WeightsError(
                    f"{self.directory}: {module} also adapts {', '.join(sorted(others))}; "
                    "add them to program.adapter.targets"
                )
            if count != rank and any(own[other][1].any() for other in others):
                raise WeightsError(
                    f"{self.directory}: {module} packs {len(own)} weights with factors in common; "
                    f"set program.adapter.rank = {count}"
                )
            pairs[path] = own[path]
        return pairs

    def _take(self, module: str, name: str) -> np.ndarray:
        if name not in self._tensors:
            raise WeightsError(
                f"{self.directory} has no {name}, but [program.adapter] trains {module}; leave it "
                "out of targets or whole"
            )
        return self._tensors.pop(name).astype(np.float32)


@dataclass(frozen=True)
class _Table:
    """A family's names for what an adapter trains."""

    family: Family
    model: Model
    adapter: Adapter
    targets: frozenset[str]
    whole: frozenset[str]

    @classmethod
    def of(cls, side: Path, model: Model, adapter: Adapter) -> _Table:
        config = read_config(side) if side.is_dir() else None
        family = family_of(config) if config else family_for(model)
        targets = frozenset(adapted_paths(model, adapter))
        whole = frozenset(whole_paths(model, adapter))
        return cls(family, without_padding(model, config), adapter, targets, whole)

    def adapted(self) -> Iterator[Piece]:
        for piece in self.family.pieces(self.model):
            if self.targets & set(piece.row.paths):
                yield piece

    def saved(self) -> Iterator[Piece]:
        for piece in self.family.pieces(self.model):
            if self.whole & set(piece.row.paths):
                yield piece


def _module(piece: Piece) -> str:
    return piece.names[0].removesuffix(".weight")


def _check_modules(table: _Table) -> None:
    """PEFT saves modules, so all that is in one is trained whole or none is."""
    modules = {name.rpartition(".")[0] for piece in table.saved() for name in piece.names}
    for piece in table.family.pieces(table.model):
        for name in piece.names:
            left = set(piece.row.paths) - table.whole
            if name.rpartition(".")[0] in modules and left:
                raise WeightsError(
                    f"PEFT saves whole modules, and {name.rpartition('.')[0]} also holds "
                    f"{', '.join(sorted(left))}; train with them in program.adapter.whole"
                )


def _embed_is_input(path: str, model: Model) -> bool:
    return array_shape(path, replace(model, embed=1))[0] == 1


def _rank_axis(piece: Piece, model: Model) -> int:
    """Where embed is in Hugging Face's tensor; the other axis is all that is not embed."""
    thin = replace(model, embed=1)
    empty = [np.zeros(array_shape(path, thin), np.int8) for path in piece.row.paths]
    ((_, tensor),) = to_hugging_face(piece, empty, thin)
    return tensor.shape.index(1)


def _factors(
    piece: Piece, pairs: dict[str, tuple[np.ndarray, np.ndarray]], model: Model
) -> tuple[np.ndarray, np.ndarray]:
    """PEFT's (rank, in) and (out, rank), of ours by path."""
    axis, firsts, seconds = _rank_axis(piece, model), [], []
    for path, (first, second) in pairs.items():
        inward = _embed_is_input(path, model)
        like_weight, plain = (second, first) if inward else (first, second)
        rank = plain.shape[1] if inward else plain.shape[0]
        thin = replace(model, embed=rank)
        arrays = [
            like_weight if other == path else np.zeros(array_shape(other, thin), np.float32)
            for other in piece.row.paths
        ]
        ((_, tensor),) = to_hugging_face(piece, arrays, thin)
        wide = np.moveaxis(tensor, axis, 0)  # (rank, in or out)
        firsts.append(plain.T if inward else wide)
        seconds.append(wide.T if inward else plain.T)
    return np.concatenate(firsts), np.concatenate(seconds, 1)


def _split(
    piece: Piece, first: np.ndarray, second: np.ndarray, model: Model
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Ours by path, of PEFT's (rank, in) and (out, rank)."""
    inward = _embed_is_input(piece.row.paths[0], model)
    thin = replace(model, embed=len(first))
    wide = second.T if inward else first
    arrays = to_decoder(piece, [np.moveaxis(wide, 0, _rank_axis(piece, model))], thin)
    return {
        path: (first.T, array) if inward else (array, second.T)
        for path, array in zip(piece.row.paths, arrays, strict=True)
    }


def _named(piece: Piece, first: np.ndarray, second: np.ndarray) -> dict[str, np.ndarray]:
    module = _PREFIX + _module(piece)
    return {f"{module}.lora_A.weight": first, f"{module}.lora_B.weight": second}


def _config(table: _Table) -> dict[str, Any]:
    adapter, packed, turned = table.adapter, {}, False
    targets: dict[str, None] = {}
    for piece in table.adapted():
        name = _inside(_module(piece))
        targets[name] = None
        packed[name] = len(table.targets & set(piece.row.paths))
        inward = _embed_is_input(piece.row.paths[0], table.model)
        turned |= _rank_axis(piece, table.model) == (0 if inward else 1)
    several = {name: count for name, count in packed.items() if count > 1}
    saved = {_inside(name.rpartition(".")[0]) for p in table.saved() for name in p.names}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "use_rslora": adapter.root_rank,
        "lora_dropout": adapter.dropout,
        "target_modules": list(targets),
        "rank_pattern": {name: adapter.rank * count for name, count in several.items()},
        "alpha_pattern": {
            name: adapter.alpha * (count**0.5 if adapter.root_rank else count)
            for name, count in several.items()
        },
        "modules_to_save": sorted(saved) or None,
        "fan_in_fan_out": turned,
        "bias": "none",
        "inference_mode": True,
    }


def _inside(module: str) -> str:
    """A module's name within its layer, the same in each; outside of layers its last part."""
    in_layer = re.fullmatch(r".*?\.\d+\.(.*)", module)
    return in_layer[1] if in_layer else module.rpartition(".")[2]


def _read(directory: Path) -> dict[str, Any]:
    path = directory / _CONFIG
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise WeightsError(f"{path} cannot be read: {error}") from error
    refused = {
        "peft_type": config.get("peft_type") != "LORA",
        "use_dora": config.get("use_dora"),
        "bias": config.get("bias", "none") != "none",
        "lora_bias": config.get("lora_bias"),
        "target_parameters": config.get("target_parameters"),
        "trainable_token_indices": config.get("trainable_token_indices"),
    }
    for setting, is_refused in refused.items():
        if is_refused:
            raise WeightsError(
                f"{path}: {setting} = {config.get(setting)!r}, which graphtrain's adapters have not"
            )
    return config


def _scale(config: dict[str, Any], module: str, rank: int) -> float:
    """What PEFT multiplies a module's product by."""

    def pattern(setting: str, usual: float) -> float:
        for name, value in (config.get(setting) or {}).items():
            if re.match(rf"(.*\.)?({name})$", module):
                return value
        return usual

    alpha = pattern("alpha_pattern", config["lora_alpha"])
    return alpha / (rank**0.5 if config.get("use_rslora") else rank)


def _load(path: Path) -> dict[str, np.ndarray]:
    from graphtrain.weights.files import SafetensorsFolder

    if not path.is_file():
        raise WeightsError(f"{path} is not there; peft's save_pretrained writes it")
    folder = SafetensorsFolder([path])
    return {name: folder.read(name) for name in folder.names}
