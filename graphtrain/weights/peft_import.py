"""Import of adapters that PEFT saved, for the native decoder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from graphtrain.config.schema import Program
from graphtrain.errors import WeightsError
from graphtrain.models.lora.trainable import LORA_A, LORA_B, trained_arrays
from graphtrain.weights.expert_factors import (
    expert_modules,
    expert_parameters,
    from_peft_experts,
    parameter_names,
)
from graphtrain.weights.exported_arrays import tensor_shapes
from graphtrain.weights.factors import EMBEDDING, AdapterTable, from_peft, module_of, peft_shapes
from graphtrain.weights.families.family import (
    LayerWeights,
    to_decoder,
)
from graphtrain.weights.peft_folder import (
    PEFT_PREFIX,
    load_adapter_tensors,
    peft_scale,
    read_adapter_config,
)


class PeftAdapter:
    """Adapter saved by PEFT, converted to the program's trainable arrays by path.

    Raises:
        WeightsError: the adapter does not match [program.adapter], or is of an unsupported kind.
    """

    def __init__(self, directory: Path, program: Program, side: Path) -> None:
        assert program.adapter is not None
        self.directory, self.adapter = directory, program.adapter
        self._table = AdapterTable.from_folder(side, program.model, program.adapter)
        has_experts = bool(expert_parameters(self._table))
        self.config = read_adapter_config(directory, allow_parameters=has_experts)
        self._tensors = load_adapter_tensors(directory)
        self.arrays = self._stack(program)
        if self._tensors:
            raise WeightsError(
                f"{directory} also contains {', '.join(sorted(self._tensors)[:3])}, which "
                "[program.adapter] does not train; add them to its target_modules or "
                "modules_to_save"
            )

    def _stack(self, program: Program) -> dict[str, np.ndarray]:
        specs = trained_arrays(program)
        arrays = {path: np.zeros(spec.shape, np.float32) for path, spec in specs.items()}
        for layer_weights in self._table.adapted_weights():
            for path, (lora_a, lora_b) in self._pairs(layer_weights).items():
                arrays[f"{path}/{LORA_A}"][layer_weights.layer] = lora_a
                arrays[f"{path}/{LORA_B}"][layer_weights.layer] = lora_b
        for layer, path, (lora_a, lora_b) in self._expert_pairs(program):
            arrays[f"{path}/{LORA_A}"][layer] = lora_a
            arrays[f"{path}/{LORA_B}"][layer] = lora_b
        for layer_weights in self._table.fully_trained_weights():
            layer = layer_weights.layer
            decoded = to_decoder(layer_weights, self._pop_row(layer_weights), self._table.model)
            for path, array in zip(layer_weights.row.paths, decoded, strict=True):
                destination = arrays[path] if layer is None else arrays[path][layer]
                # Rows of vocabulary padding stay zero.
                destination[tuple(map(slice, array.shape))] = array
        return arrays

    def _pop_row(self, layer_weights: LayerWeights) -> list[np.ndarray]:
        """Take the tensors of one row of weights that are trained in full."""
        tensors = [self._pop_tensor(name, PEFT_PREFIX + name) for name in layer_weights.names]
        if layer_weights.row.paths == (EMBEDDING,):
            self._drop_head(tensors[0])
        expected_shapes = [shape for _, shape in tensor_shapes(layer_weights, self._table.model)]
        self._check_shapes(", ".join(layer_weights.names), tensors, expected_shapes)
        return tensors

    def _drop_head(self, embedding: np.ndarray) -> None:
        """Discard the copy of the embedding that PEFT saves for a tied LM head."""
        head = self._table.tie_word_embeddings
        copy = None if head is None else self._tensors.pop(PEFT_PREFIX + head, None)
        if copy is not None and not np.array_equal(copy, embedding):
            raise WeightsError(
                f"{self.directory}: {head} differs from the embedding, but config.json ties them"
            )

    def _pairs(self, layer_weights: LayerWeights) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Return both LoRA factors of each adapted weight of one row, by path."""
        module = module_of(layer_weights)
        lora_a = self._pop_tensor(module, f"{PEFT_PREFIX}{module}.lora_A.weight")
        lora_b = self._pop_tensor(module, f"{PEFT_PREFIX}{module}.lora_B.weight")
        rank, count = self.adapter.rank, lora_a.shape[0] if lora_a.ndim else 0
        self._check_shapes(
            module, [lora_a, lora_b], peft_shapes(layer_weights, count, self._table.model)
        )
        targets = [path for path in layer_weights.row.paths if path in self._table.targets]
        if count not in (rank, rank * len(targets)):
            raise WeightsError(
                f"{self.directory}: {module} has rank {count}, but program.adapter.rank = {rank}; "
                f"set it to {count}"
            )
        scale_ratio = peft_scale(self.config, module, count) / self.adapter.scale
        lora_b = lora_b * np.float32(scale_ratio) if scale_ratio != 1 else lora_b
        pairs = {}
        for index, path in enumerate(targets):
            rank_slice = slice(None) if count == rank else slice(index * rank, (index + 1) * rank)
            converted = from_peft(
                layer_weights, lora_a[rank_slice], lora_b[:, rank_slice], self._table.model
            )
            other_paths = set(converted) - {path}
            separate = count != rank or len(targets) < len(converted)
            if separate and any(
                converted[other_path][1].any() for other_path in other_paths - set(targets)
            ):
                raise WeightsError(
                    f"{self.directory}: {module} also adapts {', '.join(sorted(other_paths))}; "
                    "add them to program.adapter.target_modules"
                )
            if count != rank and any(converted[other_path][1].any() for other_path in other_paths):
                raise WeightsError(
                    f"{self.directory}: {module} packs {len(converted)} weights that share their "
                    f"LoRA factors; set program.adapter.rank = {count}"
                )
            pairs[path] = converted[path]
        return pairs

    def _expert_pairs(
        self, program: Program
    ) -> Iterator[tuple[int, str, tuple[np.ndarray, np.ndarray]]]:
        """Yield both LoRA factors of the adapted weights of experts, by layer and path."""
        parameters = expert_parameters(self._table)
        mixture = program.model.moe
        for layer, module in expert_modules(self._table).items():
            assert mixture is not None
            for parameter, wrapper in parameter_names(module, list(parameters)).items():
                a, b = (
                    self._pop_tensor(module, f"{PEFT_PREFIX}{wrapper}.lora_{name}.weight")
                    for name in "AB"
                )
                scale = peft_scale(self.config, f"{module}.{parameter}", len(a) // mixture.experts)
                if (ratio := scale / self.adapter.scale) != 1:
                    b = b * np.float32(ratio)
                paths = parameters[parameter]
                pairs = from_peft_experts(parameter, paths, a, b, self._table)
                for path, pair in pairs.items():
                    yield layer, path, pair

    def _check_shapes(
        self, name: str, tensors: list[np.ndarray], expected: Sequence[tuple[int, ...]]
    ) -> None:
        shapes = [tensor.shape for tensor in tensors]
        if shapes != list(expected):
            raise WeightsError(
                f"{self.directory}: {name} has shape {_format_shapes(shapes)}, but program.model "
                f"requires {_format_shapes(expected)}; the adapter belongs to another model"
            )

    def _pop_tensor(self, module: str, name: str) -> np.ndarray:
        if name not in self._tensors:
            raise WeightsError(
                f"{self.directory} has no {name}, but [program.adapter] trains {module}; remove it "
                "from target_modules or modules_to_save"
            )
        return self._tensors.pop(name).astype(np.float32)


def _format_shapes(shapes: Sequence[tuple[int, ...]]) -> str:
    return " and ".join(str(list(shape)) for shape in shapes)
