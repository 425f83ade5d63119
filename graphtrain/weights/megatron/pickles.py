"""Safe reading of PyTorch files and pickles: nothing that they name is imported or called."""

from __future__ import annotations

import argparse
import io
import pickle
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from graphtrain.errors import WeightsError
from graphtrain.weights.files import unloadable
from lowering.machine.extras import optional_import


class Placeholder:
    """Placeholder for an object of a class that a pickle names; stores its arguments and state."""

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.state = state
        if isinstance(state, dict):
            self.__dict__.update(state)


# Harmless container classes that are restored as themselves.
_ALLOWED_CLASSES: dict[tuple[str, str], Any] = {
    ("argparse", "Namespace"): argparse.Namespace,
    ("collections", "OrderedDict"): OrderedDict,
    ("torch", "Size"): tuple,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return _ALLOWED_CLASSES.get((module, name)) or _placeholder_class(f"{module}.{name}")


def load_pickle(path: Path) -> Any:
    """Load a pickle, with a Placeholder in place of every object of another class.

    Raises:
        WeightsError: the pickle is damaged.
    """
    try:
        with path.open("rb") as file:
            return _Unpickler(file).load()
    except Exception as error:  # a damaged pickle can raise any exception
        raise WeightsError(f"{path} is not a complete pickle: {error!r}") from error


def load_torch(path: Path) -> Any:
    """Load a file written by torch.save; its tensors are memory-mapped, and read when used.

    Raises:
        WeightsError: PyTorch is not installed, or the file is damaged.
    """
    return _load(path, lambda torch: torch.load(path, "cpu", weights_only=True, mmap=True), path)


def load_tensor(path: Path, offset: int, length: int) -> Any:
    """Load the tensor that torch.save wrote to a byte range of a file.

    Raises:
        WeightsError: PyTorch is not installed, or the file is damaged.
    """

    def load(torch: Any) -> Any:
        with path.open("rb") as file:
            byte_range = io.BufferedReader(_ByteRange(file, offset, length))
            return torch.load(byte_range, "cpu", weights_only=True)

    return _load(path, load)


def import_torch(purpose: str) -> Any:
    """Import PyTorch.

    Args:
        purpose: What needs it, as the beginning of a sentence.

    Raises:
        MissingExtra: it is not installed.
    """
    with optional_import(purpose, "bin"):
        import torch
    return torch


def _load(path: Path, load: Callable[[Any], Any], globals_path: Path | None = None) -> Any:
    torch = import_torch(f"{path}: a checkpoint of Megatron-LM")
    serialization = torch.serialization
    try:
        global_names = (
            serialization.get_unsafe_globals_in_checkpoint(globals_path) if globals_path else []
        )
        allowed_globals = [(argparse.Namespace, "argparse.Namespace")]
        placeholder_globals = [
            (_placeholder_class(name), name)
            for name in global_names
            if name != "argparse.Namespace"
        ]
        with serialization.safe_globals([*allowed_globals, *placeholder_globals]):  # type: ignore[list-item]
            return load(torch)
    except Exception as error:  # a damaged file can raise any exception
        raise unloadable(path, error) from error


def _placeholder_class(name: str) -> type:
    return type(name.rpartition(".")[2], (Placeholder,), {})


class _ByteRange(io.RawIOBase):
    """Byte range of an open file, as a read-only file."""

    def __init__(self, file: io.BufferedReader, offset: int, length: int) -> None:
        self._file, self._offset, self._length = file, offset, length
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        begin = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        self._at = begin + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        self._file.seek(self._offset + self._at)
        count = self._file.readinto(memoryview(buffer)[: max(0, self._length - self._at)])
        self._at += count
        return count
