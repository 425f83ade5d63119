"""MindIR graphs loaded on the ranks of this host, as functions of trees of arrays.

State stays on the ranks: a graph returns ids of arrays there, which the next call accepts as
arguments. Only values that are read, such as a loss or a checkpoint, are copied to this process.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
from jax.sharding import Mesh

from lowering.ascend.per_rank import fill_in_rank, rank_groups
from lowering.ascend.ranks import Ranks
from lowering.errors import LoweringError
from lowering.per_device.layout import RankLayout
from lowering.trees import Tree, flatten, unflatten

# MindSpore's names of the types in graphs, by HLO's names.
_TYPES = {
    "pred": "bool_", "s8": "int8", "s16": "int16", "s32": "int32", "s64": "int64", "u8": "uint8",
    "u16": "uint16", "f16": "float16", "f32": "float32", "f64": "float64", "bf16": "bfloat16",
}  # fmt: skip


class RankArray:
    """Global array whose shards are stored on the ranks, under the id `array_id`."""

    def __init__(self, ranks: Ranks, layout: RankLayout) -> None:
        self.ranks, self.layout = ranks, layout
        self.shape, self.dtype, self.sharding = layout.shape, layout.dtype, layout.sharding
        self.array_id: int | None = ranks.new_array_id()
        self.scalar: Any = None  # its only element, if a program has reported it

    def to_host(self) -> jax.Array:
        """Copy the array to this process, with the same sharding."""
        shards = self.ranks.call("get", lambda rank: [self._checked()])
        placed = [
            jax.device_put(shard.astype(self.dtype).reshape(self.layout.shard_shape), device)
            for shard, device in zip(shards, self.layout.devices, strict=True)
        ]
        return jax.make_array_from_single_device_arrays(self.shape, self.sharding, placed)

    def is_deleted(self) -> bool:
        """Return whether the array was donated, so that an output now uses its memory."""
        return self.array_id is None

    def donate(self) -> int:
        """Return the array's id for a program that overwrites it; mark the array as deleted."""
        array_id = self._checked()
        self.array_id = None
        return array_id

    def _checked(self) -> int:
        if self.array_id is None:
            raise RuntimeError(
                "this array was donated to a step; use the array that the step returned"
            )
        return self.array_id

    def __float__(self) -> float:
        array_id = self._checked()
        if self.scalar is None:
            self.ranks.wait_for_answers()
        if self.scalar is None:
            self.scalar = self.ranks.call("get", lambda rank: [array_id])[0]
        return float(self.scalar.reshape(-1)[0])

    def __int__(self) -> int:
        return int(float(self))

    def __del__(self) -> None:
        if self.array_id is not None:
            self.ranks.delete_array(self.array_id)


class RankProgram:
    """A graph loaded on every rank; call it with the trees that it names, in order."""

    def __init__(
        self, mindir: bytes, record: Mapping[str, Any], mesh: Mesh, ranks: Ranks, device: str
    ) -> None:
        about = record["ascend"]
        self._record, self._about = record, about
        self._ranks = ranks
        self._inputs = {path: RankLayout(fact, mesh) for path, fact in record["inputs"].items()}
        self._outputs = {path: RankLayout(fact, mesh) for path, fact in record["outputs"].items()}
        self._types = [_TYPES[dtype] for _, dtype in about["stored"]]
        self._in_place: dict[int, int] = dict(about["aliases"])  # output index to input index
        self._load(mindir, device)
        self._rank = self._store_rank_numbers() if about["rank_input"] else None

    def _load(self, mindir: bytes, device: str) -> None:
        variables = {
            f"input{index}": (self._about["stored"][index][0], self._types[index])
            for index in self._about["variables"]
        }
        groups, exchanges = self._about["groups"], self._about["exchanges"]
        directory = self._ranks.directory
        name = self._record["graph"]

        def arguments(rank: int) -> list[Any]:
            path = Path(directory) / f"{name}.{rank}.mindir"
            path.write_bytes(fill_in_rank(mindir, groups, exchanges, rank, device))
            return [name, str(path), rank_groups(groups, rank, device), variables]

        self._ranks.call("load", arguments)

    def _store_rank_numbers(self) -> int:
        """Store an array with each rank's own number on the ranks; return the array's id."""
        array_id = self._ranks.new_array_id()
        self._ranks.call(
            "put", lambda rank: [[(array_id, np.array(rank, np.int64), self._types[-1])]]
        )
        return array_id

    def __call__(self, *trees: Tree) -> Tree:
        leaves = [
            (self._inputs[path], leaf)
            for name, tree in zip(self._record["arguments"], trees, strict=True)
            for path, leaf in flatten(tree, name).items()
        ]
        arguments = self._placed(leaves)
        output_of_input = {
            input_index: output_index for output_index, input_index in self._in_place.items()
        }
        variables = {f"input{n}": arguments[n].donate() for n in self._about["variables"]}
        inputs = [
            array._checked()
            for n, array in enumerate(arguments)
            if n not in self._about["variables"]
        ]
        inputs += [self._rank] if self._rank is not None else []
        results = [RankArray(self._ranks, layout) for layout in self._outputs.values()]
        returned = [results[n].array_id for n in self._about["returned"]]
        variable_results = {
            f"input{n}": results[output_of_input[n]].array_id for n in self._about["variables"]
        }
        result_by_id = {array.array_id: weakref.ref(array) for array in results}

        def note(answers: list[Any]) -> None:
            for array_id, scalar in answers[0].items():
                array = result_by_id[array_id]()
                if array is not None:
                    array.scalar = scalar

        self._ranks.send(
            "run",
            lambda rank: [self._record["graph"], inputs, variables, returned, variable_results],
            note,
        )
        return unflatten(dict(zip(self._outputs, results, strict=True)))

    def _placed(self, leaves: list[tuple[RankLayout, Any]]) -> list[RankArray]:
        """Return the arguments as arrays on the ranks; send those of the host in one message."""
        placed, sent = [], []
        for index, (layout, leaf) in enumerate(leaves):
            if isinstance(leaf, RankArray):
                self._check(leaf, layout)
                placed.append(leaf)
                continue
            array = RankArray(self._ranks, layout)
            placed.append(array)
            shards = zip(self._ranks.local_ranks, layout.shards(leaf), strict=True)
            sent.append((array.array_id, dict(shards), index))
        if sent:
            self._ranks.call(
                "put",
                lambda rank: [
                    [
                        (array_id, _to_mindspore_dtype(shards[rank]), self._types[input_index])
                        for array_id, shards, input_index in sent
                    ]
                ],
            )
        return placed

    def _check(self, leaf: RankArray, layout: RankLayout) -> None:
        if not leaf.sharding.is_equivalent_to(layout.sharding, len(layout.shape)):
            raise LoweringError(
                f"an array sharded as {leaf.sharding.spec} was passed to the compiled "
                f"{self._record['graph']} step, which expects {layout.sharding.spec}"
            )


def _to_mindspore_dtype(array: np.ndarray) -> np.ndarray:
    """Convert an array to a type that MindSpore accepts from NumPy."""
    if array.dtype == ml_dtypes.bfloat16:
        return array.astype(np.float32)
    return array.astype(np.int64) if array.dtype.kind == "u" and array.itemsize > 2 else array
