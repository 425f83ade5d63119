"""Names and forms that published weights have, by transformers' own conversions.

A folder may have each expert by itself, other names, or other divisions than the module.
transformers records for each family how it converts them when it loads and saves a folder.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import conversion_mapping, core_model_loading

from graphtrain.errors import WeightsError
from graphtrain.weights.files import FolderFiles, Index
from graphtrain.weights.torch_arrays import as_numpy, as_torch

Reader = Callable[[str], torch.Tensor]


@dataclass
class Conversion:
    """Tensors that become others together; without a converter, one that is only renamed."""

    module: Any
    name: str  # of the first result
    converter: Any = None  # of transformers
    sources: dict[str, str] = field(default_factory=dict)  # pattern of the converter by name
    rename: Callable[[str], str] = lambda name: name  # of results

    def results(self, read: Reader) -> dict[str, torch.Tensor]:
        """Convert the tensors that `read` returns by name."""
        if self.converter is None:
            (source,) = self.sources
            return {self.rename(self.name): read(source)}
        converter = deepcopy(self.converter)
        for source, pattern in self.sources.items():
            converter.add_tensor(self.name, source, pattern, read(source))
        converted = converter.convert(self.name, model=self.module, config=self.module.config)
        return {
            self.rename(name): tensor[0] if isinstance(tensor, list) else tensor
            for name, tensor in converted.items()
        }

    def shapes(self, read: Callable[[str], tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the results, from those of the sources."""
        results = self.results(lambda name: torch.empty(read(name), device="meta"))
        return {name: tuple(tensor.shape) for name, tensor in results.items()}


class PublishedFiles:
    """Tensors of a folder by the names of a module of transformers.

    Args:
        files: The folder.
        module: The module, without weights.

    Raises:
        WeightsError: transformers cannot convert the tensors.
    """

    def __init__(self, files: FolderFiles, module: Any) -> None:
        self._files = files
        self._stored = set(module.state_dict())
        self._by_name: dict[str, Conversion] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._last: tuple[Conversion | None, dict[str, torch.Tensor]] = None, {}
        conversions, unread = _conversions(files.names, module, self._stored)
        for conversion in conversions:
            with _explained(conversion):
                shapes = conversion.shapes(files.shape)
            self._shapes |= shapes
            self._by_name |= dict.fromkeys(shapes, conversion)
        self.unread = [name for name in unread if not _is_ignored(name, module)]
        self.names = tuple(self._by_name)

    def sources(self, name: str) -> Iterable[str]:
        """Return the names in the folder of what a tensor is made of."""
        return self._by_name[name].sources

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def part(self, name: str, index: Index) -> np.ndarray:
        """Read a part of a tensor as float32."""
        conversion = self._by_name[name]
        if conversion.converter is None:
            (source,) = conversion.sources
            return self._files.part(source, index).astype(np.float32)
        if self._last[0] is not conversion:
            self._last = None, {}  # freed before the next one is read
            with _explained(conversion):
                self._last = conversion, conversion.results(self._tensor)
        tensor = self._last[1][name][index].float()
        return as_numpy(tensor, np.dtype(np.float32)).copy()

    def _tensor(self, name: str) -> torch.Tensor:
        return as_torch(self._files.read(name))


def saved_conversions(module: Any, names: Iterable[str]) -> list[Conversion]:
    """Return how transformers converts the tensors of a module when it saves them.

    Args:
        module: The module, without weights.
        names: Names of its tensors.
    """
    mapping = [
        transform.reverse_transform()
        for transform in reversed(_mapping(module, add_legacy=False))
        if not isinstance(transform, core_model_loading.PrefixChange)
    ]
    renamings, converters = _by_kind(mapping)

    def rename(name: str) -> str:
        return core_model_loading.apply_renamings(name, renamings)

    conversions: dict[str, Conversion] = {}
    for name in sorted(names, key=core_model_loading.dot_natural_key):
        target, pattern = core_model_loading.apply_converters(name, converters)
        if pattern is None:
            target = name
        converter = None if pattern is None else _converter_of(pattern, converters)
        conversion = conversions.setdefault(
            target, Conversion(module, target, converter, rename=rename)
        )
        conversion.sources[name] = pattern or name
    return list(conversions.values())


def _conversions(
    names: Iterable[str], module: Any, stored: set[str]
) -> tuple[list[Conversion], list[str]]:
    """Return the conversions of a folder's tensors, and the names that the module does not have."""
    renamings, converters = _by_kind(_mapping(module, add_legacy=True))
    prefix, known = module.base_model_prefix, dict.fromkeys(stored, True)
    conversions: dict[str, Conversion] = {}
    unread = []
    for name in sorted(names, key=core_model_loading.dot_natural_key):
        target, pattern = core_model_loading.rename_source_key(
            name, renamings, converters, prefix, known
        )
        if target not in stored and name in stored:
            target, pattern = name, None
        if target not in stored:
            unread.append(name)
            continue
        converter = None if pattern is None else _converter_of(pattern, converters)
        conversion = conversions.setdefault(target, Conversion(module, target, converter))
        conversion.sources[name] = pattern or name
    return list(conversions.values()), unread


def _mapping(module: Any, *, add_legacy: bool) -> list[Any]:
    return conversion_mapping.get_model_conversion_mapping(module, add_legacy=add_legacy)


def _by_kind(mapping: Iterable[Any]) -> tuple[list[Any], list[Any]]:
    """Return the renamings and the converters among transformers' conversions."""
    mapping = list(mapping)
    renamings = [one for one in mapping if isinstance(one, core_model_loading.WeightRenaming)]
    converters = [one for one in mapping if isinstance(one, core_model_loading.WeightConverter)]
    return renamings, converters


def _converter_of(pattern: str, converters: Iterable[Any]) -> Any:
    return next(one for one in reversed(list(converters)) if pattern in one.source_patterns)


def _is_ignored(name: str, module: Any) -> bool:
    """Return whether transformers loads folders of a family without this tensor, too."""
    patterns: set[str] = set(module._keys_to_ignore_on_load_unexpected or ())
    buffers = [buffer for buffer, _ in module.named_buffers()]
    if any(buffer.endswith("rotary_emb.inv_freq") for buffer in buffers):
        patterns.add(r"rotary_emb\.inv_freq")
    if any(buffer.endswith("position_ids") for buffer in buffers):
        patterns.add(r"(^|\.)position_ids$")
    return any(re.search(pattern, name) for pattern in patterns)


class _explained:
    """Context that turns errors of transformers' conversions into ones of this project."""

    def __init__(self, conversion: Conversion) -> None:
        self._conversion = conversion

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, Exception) and not isinstance(error, WeightsError):
            first = next(iter(self._conversion.sources))
            raise WeightsError(
                f"transformers cannot convert {first} and the tensors beside it to "
                f"{self._conversion.name}: {' '.join(str(error).split())}; the folder is not "
                "that of the model in program.model.hf, or is damaged"
            ) from error


class SavedTensors:
    """Tensors of a module, converted to the published form as soon as all parts of one are there.

    Args:
        module: The module, without weights.
        shapes: Shapes of its tensors.
    """

    def __init__(self, module: Any, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._conversions = saved_conversions(module, shapes)
        self._of = {name: one for one in self._conversions for name in one.sources}
        self._waiting: dict[str, np.ndarray] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for conversion in self._conversions:
            self.shapes |= conversion.shapes(lambda name: shapes[name])

    def add(self, name: str, array: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
        """Add a tensor; yield the published tensors that are complete."""
        conversion = self._of[name]
        if conversion.converter is None:
            (published,) = conversion.shapes(lambda name: array.shape)
            yield published, array
            return
        self._waiting[name] = array
        if conversion.sources.keys() <= self._waiting.keys():
            parts = {source: self._waiting.pop(source) for source in conversion.sources}
            for published, tensor in conversion.results(lambda n: as_torch(parts[n])).items():
                yield published, as_numpy(tensor, array.dtype)
