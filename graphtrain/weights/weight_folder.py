"""Weights of a folder: one file, or several with an index that says where each tensor is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from typing_extensions import TypedDict  # pydantic refuses that of typing before Python 3.12

from graphtrain.errors import WeightsError
from graphtrain.files import validate
from graphtrain.weights.files import BinFiles, SafetensorsFiles
from sharding_rules.documents import read_object


class _Index(TypedDict):
    """Index of several files of weights."""

    weight_map: dict[str, str]  # file of each array


def open_weight_files(
    directory: Path, stem: str = "model", bin_stem: str = "pytorch_model"
) -> SafetensorsFiles | BinFiles:
    """Open the weights in a folder: safetensors if there are any, else .bin.

    Args:
        directory: folder of weights.
        stem: file name of safetensors without its suffix.
        bin_stem: file name of .bin without its suffix.

    Raises:
        WeightsError: there are no weights, a file named in an index is missing, or what the index
            says is not so.
    """
    kinds = ((".safetensors", stem, SafetensorsFiles), (".bin", bin_stem, BinFiles))
    for suffix, name, kind in kinds:
        index = directory / f"{name}{suffix}.index.json"
        single = directory / f"{name}{suffix}"
        if index.is_file():
            return _open_indexed(index, single, kind)
        if single.is_file():
            return kind([single])
    raise WeightsError(
        f"{directory} contains no weights: expected {stem}.safetensors, {bin_stem}.bin, or an "
        "index of several files (.index.json)"
    )


def _open_indexed(
    index: Path, single: Path, kind: type[SafetensorsFiles] | type[BinFiles]
) -> SafetensorsFiles | BinFiles:
    """Open several files by their index; each tensor must be where it says.

    The Hub's converter to safetensors leaves tied tensors out of a file, not of the index, and
    names the one that it keeps in the metadata of the file.
    """
    file_of = _file_of_each(index)
    paths = _indexed_files(index, sorted(set(file_of.values())))
    if single.is_file() and single not in paths:
        raise WeightsError(
            f"{index.parent} contains both {single.name} and {index.name} of other files, which "
            "may have other values; remove those that do not belong to the model"
        )
    files = kind(paths)
    available = set(files.names)
    for name, file in file_of.items():
        if name not in available and files.tied.get(name) in available:
            continue
        if name not in available or files.path(name).name != file:
            found = f"is in {files.path(name).name}" if name in available else "is missing there"
            raise WeightsError(
                f"{index} says that {name} is in {file}, but it {found}; get the files again"
            )
    return files


def _file_of_each(index: Path) -> dict[str, str]:
    try:
        return validate(_Index, read_object(index))["weight_map"]
    except (OSError, ValueError) as error:
        raise WeightsError(f"{index} is not an index of weights: {error}") from error


def _indexed_files(index: Path, files: Sequence[str]) -> list[Path]:
    for name in files:
        if Path(name).name != name or "\0" in name or len(name.encode(errors="replace")) > 255:
            raise WeightsError(f"{index} lists {name[:200]!r}, which is outside its folder")
        if not (index.parent / name).is_file():
            raise WeightsError(f"{index} lists {name}, which does not exist")
    return [index.parent / name for name in files]
