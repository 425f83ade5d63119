"""Import of PEFT adapters of imported models.

A run stores factors in PEFT's shapes, by the names of the module's parameters. Reading imports no
PyTorch: the layers of an array are recognised by their names, as in weights of Hugging Face.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from graphtrain.config.hf_config import read_config
from graphtrain.config.hf_images import computed_blocks
from graphtrain.config.schema import Adapter
from graphtrain.errors import WeightsError
from graphtrain.models.lora.trainable import LORA_A, LORA_B
from graphtrain.weights.expert_factors import WRAPPED
from graphtrain.weights.layer_row_names import rows_of
from graphtrain.weights.padded_parts import is_stored_unpadded
from graphtrain.weights.peft_folder import (
    PEFT_PREFIX,
    load_adapter_tensors,
    peft_scale,
    read_adapter_config,
)
from graphtrain.weights.stacked_orders import layer_count, stacked_orders
from lowering.trees import Tree, flatten

if TYPE_CHECKING:
    from graphtrain.config.schema import TorchModel
    from sharding_rules.pipeline import Stages

_MOST_WRAPPED = 4
_VISION_BLOCK = re.compile(r"\bvision_tower\b.*?\.layers\.(\d+)\.")


class ImportedPeftAdapter:
    """Adapter saved by PEFT, for an imported model.

    Raises:
        WeightsError: the adapter is of an unsupported kind.
    """

    def __init__(
        self,
        directory: Path,
        adapter: Adapter,
        base_names: Collection[str],
        vocab: tuple[int, int] = (0, 0),
        model: TorchModel | None = None,
    ) -> None:
        """Read the folder.

        Args:
            directory: Folder that PEFT saved.
            adapter: Settings of the adapter that is trained.
            base_names: Names of the tensors of the base weights.
            vocab: Rows of the vocabulary in the program, and those that stand for a token.
            model: The imported model, to recognise blocks that it does not compute.
        """
        self.directory, self._adapter, self._model = directory, adapter, model
        self._base_names, self._vocab = frozenset(base_names), vocab
        self._config = read_adapter_config(directory, allow_parameters=True)
        self._tensors = {
            name.removeprefix(PEFT_PREFIX): tensor.astype(np.float32)
            for name, tensor in load_adapter_tensors(directory).items()
        }

    def arrays(self, described: Tree, stages: Stages | None) -> dict[str, np.ndarray]:
        """Return the trained arrays by path, their layers in order.

        Args:
            described: Tree of the trained arrays with their shapes.
            stages: Pipeline stages for which their rows are ordered.

        Raises:
            WeightsError: the adapter does not match [program.adapter].
        """
        shapes = {path: tuple(leaf.shape) for path, leaf in flatten(described).items()}
        unread, whole, arrays = set(self._tensors), [], {}
        for path, shape in shapes.items():
            stem, _, name = path.rpartition("/")
            if name == LORA_B:
                continue
            if name == LORA_A:
                forms = zip(
                    _forms(shape, stages), _forms(shapes[f"{stem}/{LORA_B}"], stages), strict=True
                )
                names, (a, b) = self._pair(stem, list(forms))
                arrays |= {path: a, f"{stem}/{LORA_B}": b}
            else:
                names = self._saved(path, shape, stages)
                arrays[path] = self._padded(self._read(names), shape)
                whole += names
            unread -= set(names)
        unread -= self._copies(unread, whole)
        if unread:
            unread -= self._of_idle_blocks(unread)
        if unread:
            raise WeightsError(
                f"{self.directory} also contains {', '.join(sorted(unread)[:3])}, which "
                "[program.adapter] does not train; add them to its target_modules or "
                "modules_to_save"
            )
        return arrays

    def _pair(
        self, path: str, forms: list[tuple[_Form, _Form]]
    ) -> tuple[list[str], tuple[np.ndarray, np.ndarray]]:
        """Return the names of a parameter's factors, and both, with PEFT's scale in the second."""
        found = [
            (of_a, of_b, names_a, names_b)
            for of_a, of_b in forms
            for module in _modules(path, of_a)
            if (names_a := self._find(f"{module}.lora_A.weight", _stored_a(of_a)))
            and (names_b := self._find(f"{module}.lora_B.weight", _stored_b(of_b)))
        ]
        if len(found) != 1:
            reason = "several" if found else "no"
            shapes = " or ".join(f"{a.shape} and {b.shape}" for a, b in forms)
            raise WeightsError(
                f"{self.directory} has {reason} factors for {path} of shapes {shapes}, which "
                "[program.adapter] trains; check its rank and target_modules"
            )
        ((of_a, of_b, names_a, names_b),) = found
        first, second, rank = self._read(names_a), self._read(names_b), of_a.shape[-2]
        ratios = np.asarray(self._ratios(path, names_a, of_a), np.float32)
        second = second * (ratios[:, None, None] if len(ratios) > 1 else ratios)
        if len(of_a.shape) == 3:
            experts, outputs, lead = of_a.shape[0], of_b.shape[1], first.shape[:-2]
            first = first.reshape(*lead, *of_a.shape)
            second = np.moveaxis(second.reshape(*lead, outputs, rank, experts), -1, -3)
        return [*names_a, *names_b], (first, np.ascontiguousarray(second))

    def _ratios(self, path: str, names_a: list[str], of_a: _Form) -> list[float]:
        """Return PEFT's scale of each pair of factors over that of [program.adapter].

        PEFT finds the settings of a linear layer by its module, and those of experts by their
        parameter in the module that it wraps.
        """
        modules = [name.removesuffix(".lora_A.weight") for name in names_a]
        if len(of_a.shape) == 3:
            parameter = path.rpartition("/")[2]
            modules = [f"{_unwrapped(module)}.{parameter}" for module in modules]
        rank = of_a.shape[-2]
        scales = [peft_scale(self._config, module, rank) for module in modules]
        return [scale / self._adapter.scale for scale in scales]

    def _saved(self, path: str, shape: tuple[int, ...], stages: Stages | None) -> list[str]:
        name = path.replace("/", ".")
        for form in _forms(shape, stages, least=1):
            if names := self._find(name, form, self._vocab):
                return names
        raise WeightsError(
            f"{self.directory} has no {name} of shape {list(shape)}, which [program.adapter] "
            "trains; remove it from modules_to_save"
        )

    def _copies(self, unread: set[str], whole: list[str]) -> set[str]:
        """Return the names of copies that PEFT saves for weights tied to one trained in full."""
        return {
            name
            for name in unread - self._base_names
            if any(np.array_equal(self._tensors[name], self._tensors[one]) for one in whole)
        }

    def _of_idle_blocks(self, unread: set[str]) -> set[str]:
        """Return the names of new factors of a vision tower's blocks that are not computed.

        PEFT adapts them too. They get no gradient, so that their second factor stays zero.
        """
        if self._model is None or not self._model.images or self._model.hf is None:
            return set()
        computed = computed_blocks(read_config(self._model.hf, self._model.overrides))
        return {
            name
            for name in unread
            if computed is not None
            and (block := _VISION_BLOCK.search(name))
            and int(block[1]) >= computed
            and self._is_new(name.rpartition(".lora_")[0])
        }

    def _is_new(self, stem: str) -> bool:
        """Return whether a layer has factors whose product is zero."""
        second = self._tensors.get(f"{stem}.lora_B.weight")
        return second is not None and not second.any()

    def _padded(self, array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """Return a weight with rows of zeros that pad the vocabulary."""
        rows, tokens = self._vocab
        sizes = (None,) * (array.ndim - len(shape)) + shape[len(shape) - array.ndim :]
        missing = [
            (0, rows - tokens if (found, size) == (tokens, rows) else 0)
            for found, size in zip(array.shape, sizes, strict=True)
        ]
        return np.pad(array, missing) if rows > tokens else array

    def _find(self, name: str, form: _Form, vocab: tuple[int, int] = (0, 0)) -> list[str]:
        """Return the name of a tensor, or those of its rows in all layers; empty: there is none."""

        def has(names: list[str]) -> bool:
            return all(
                one in self._tensors
                and is_stored_unpadded(self._tensors[one].shape, form.shape, *vocab)
                for one in names
            )

        if form.layers is None:
            return [name] if has([name]) else []
        return next(filter(has, rows_of(name, form.layers, set(self._tensors))), [])

    def _read(self, names: list[str]) -> np.ndarray:
        arrays = [self._tensors[name] for name in names]
        return np.stack(arrays) if len(arrays) > 1 else arrays[0]


class _Form(NamedTuple):
    """Possible form of an array: `layers` rows of a shape, or one array of it."""

    shape: tuple[int, ...]
    layers: int | None


def _forms(shape: tuple[int, ...], stages: Stages | None, least: int = 2) -> list[_Form]:
    """Return the forms in which an array of this shape may be stored."""
    stacked = [
        _Form(shape[leading:], layer_count(order))
        for order, leading in stacked_orders(shape, stages)
    ]
    forms = [*dict.fromkeys(stacked), _Form(shape, None)]
    return [form for form in forms if least <= len(form.shape) <= 3]


def _modules(path: str, factor: _Form) -> list[str]:
    """Return the names under which PEFT may store the factors of a parameter."""
    name = path.replace("/", ".")
    if len(factor.shape) == 2:
        return [name.removesuffix(".weight")]
    return [name.rpartition(".")[0] + WRAPPED * depth for depth in range(_MOST_WRAPPED)]


def _unwrapped(module: str) -> str:
    while module.endswith(WRAPPED):
        module = module.removesuffix(WRAPPED)
    return module


def _stored_a(form: _Form) -> _Form:
    """Return the form of lora_A: the ranks of all experts are one axis."""
    *experts, rank, inputs = form.shape
    return form._replace(shape=(math.prod(experts) * rank, inputs))


def _stored_b(form: _Form) -> _Form:
    """Return the form of lora_B, as _stored_a."""
    *experts, outputs, rank = form.shape
    return form._replace(shape=(outputs, rank * math.prod(experts)))
