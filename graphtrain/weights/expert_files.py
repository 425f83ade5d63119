"""Weight files of mixtures of experts, with the names that modules of transformers 5 have.

Published folders have each matrix of each expert by itself. The modules have one array of the gates
and ups of all experts, and one of their downs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import numpy as np

from graphtrain.weights.files import FolderFiles, Index

_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(\w+)\.weight", re.ASCII)
_STACKED = {  # the matrices of an expert that are one below the other, by either names
    "gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")),
    "down_proj": (("down_proj",), ("w2",)),
}
_RENAMED = (".block_sparse_moe.", ".mlp.")  # of Mixtral: in folders, and in modules


class ModuleFiles:
    """Tensors of a folder by the names of modules.

    Args:
        files: The folder.
    """

    def __init__(self, files: FolderFiles) -> None:
        self._files = files
        self._stacked = _stacked_experts(files.names)
        renamed = {name.replace(*_RENAMED): name for name in files.names if _RENAMED[0] in name}
        self._stored = {name: name for name in files.names} | renamed
        self.names = (*self._stored, *self._stacked)

    def sources(self, name: str) -> Iterable[str]:
        """Return the names in the folder of what a tensor is made of."""
        if name in self._stored:
            return [self._stored[name]]
        return [part for parts in self._stacked[name] for part in parts]

    def shape(self, name: str) -> tuple[int, ...]:
        if name in self._stored:
            return tuple(self._files.shape(self._stored[name]))
        experts = self._stacked[name]
        rows, columns = zip(*(self._files.shape(part) for part in experts[0]), strict=True)
        return len(experts), sum(rows), columns[0]

    def part(self, name: str, index: Index) -> np.ndarray:
        """Read a part of a tensor as float32."""
        if name in self._stored:
            return self._read(self._stored[name], index)
        inner = slice(None), index[2]
        experts = [
            np.concatenate([self._read(part, inner) for part in parts])[index[1]]
            for parts in self._stacked[name][index[0]]
        ]
        return np.stack(experts)

    def _read(self, name: str, index: Index) -> np.ndarray:
        return self._files.part(name, index).astype(np.float32)


def _stacked_experts(names: Sequence[str]) -> dict[str, list[list[str]]]:
    """Return the names of each expert's matrices, by the name of the array of all experts."""
    counts: dict[str, int] = {}
    for name in names:
        if match := _EXPERT.fullmatch(name):
            counts[match[1]] = max(counts.get(match[1], 0), int(match[2]) + 1)
    available, stacked = set(names), {}
    for prefix, count in counts.items():
        for array, forms in _STACKED.items():
            for parts in forms:
                experts = [
                    [f"{prefix}.{expert}.{part}.weight" for part in parts]
                    for expert in range(count)
                ]
                if all(available.issuperset(expert) for expert in experts):
                    name = f"{prefix}.{array}"
                    stacked |= {name: experts, name.replace(*_RENAMED): experts}
    return stacked
