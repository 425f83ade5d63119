"""From a folder of Hugging Face to the decoder's arrays and back, an array at a time."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from graphtrain.config.render import render_model
from graphtrain.config.schema import Model, Program, is_imported
from graphtrain.errors import WeightsError
from graphtrain.models.flops import parameter_count
from graphtrain.weights.families import Family, family_for, family_of, mathematics
from graphtrain.weights.families.family import Piece, array_shape, to_decoder, to_hugging_face
from graphtrain.weights.files import CODES, Folder, open_folder
from graphtrain.weights.sources import SIDE, checkpoint_step, open_source, stored_name
from graphtrain.weights.writer import Writer

Progress = Callable[[int, int], None]  # arrays done, and of how many
_WEIGHTS = re.compile(r".*\.(safetensors|bin|pt|pth|h5|msgpack|gguf|onnx)|.*\.index\.json")


@dataclass(frozen=True)
class Summary:
    """What a conversion made."""

    family: str
    parameters: int
    arrays: int
    dtype: str


def from_hugging_face(source: Path, destination: Path, progress: Progress) -> Summary:
    """Make a converted folder of one that transformers would load.

    Raises:
        WeightsError: the family is not known, or the weights are not those of its config.json.
    """
    config = read_config(source)
    family = family_of(config)
    model = family.model(config)
    folder = open_folder(source)
    pieces = [_renamed(piece, family, folder) for piece in family.pieces(model)]
    _check_names(pieces, family, model, folder)
    arrays = {}
    for piece in pieces:
        dtype = dtype_of(piece, folder)
        for path in piece.row.paths:
            arrays[stored_name(path, piece.layer)] = dtype, array_shape(path, model)
    with making(destination) as directory:
        writer = Writer(directory / "weights", arrays)
        for done, piece in enumerate(pieces):
            progress(done, len(pieces))
            tensors = [folder.read(name) for name in piece.names]
            made = to_decoder(piece, tensors, model)
            for path, array in zip(piece.row.paths, made, strict=True):
                writer.write(stored_name(path, piece.layer), array)
        writer.close()
        (directory / "model.toml").write_text(render_model(model))
        copy_side(source, directory / SIDE)
    progress(len(pieces), len(pieces))
    return summary(family, model, arrays)


def to_hugging_face_folder(
    source: Path, destination: Path, progress: Progress, step: int | None = None
) -> Summary:
    """Make a folder that transformers loads, of a converted folder or of a run.

    The family, the dtypes, the vocabulary without padding and all files beside the weights are
    those of the folder the weights began in; a model that began from nothing is of the first family
    that can express it, in float32.

    Raises:
        WeightsError: no family has such a model, or the source is not whole.
    """
    if (run := _run_of_pytorch(source)) is not None:
        return _export(run, source, destination, progress, step)
    weights = open_source(source, step)
    # Of a model that began from nothing only the tokenizer may be there.
    config = read_config(weights.side) if (weights.side / "config.json").is_file() else None
    family = family_of(config) if config else family_for(weights.model)
    model = without_padding(weights.model, config)
    pieces = list(family.pieces(model))
    usual = np.dtype(_config_dtype(config))
    arrays = {}
    for piece in pieces:
        dtype = weights.dtype(piece.row.paths[0]) or usual
        for name, shape in _shapes(piece, model):
            arrays[name] = dtype, shape
    with making(destination) as directory:
        writer = Writer(directory, arrays)
        for done, piece in enumerate(pieces):
            progress(done, len(pieces))
            whole = weights.read(piece.row.paths, piece.layer)
            cut = [_cut(path, one, model) for path, one in zip(piece.row.paths, whole, strict=True)]
            for name, tensor in to_hugging_face(piece, cut, model):
                writer.write(name, tensor.astype(arrays[name][0], copy=False))
        writer.close()
        if weights.side.is_dir():
            copy_side(weights.side, directory)
        _write_config(directory, family, model, config, arrays)
    progress(len(pieces), len(pieces))
    return summary(family, model, arrays)


def _run_of_pytorch(source: Path) -> Program | None:
    """The program of a run's directory, if its model is one of PyTorch."""
    if not (source / "config.toml").is_file() or not (source / "checkpoints").is_dir():
        return None
    from graphtrain.config import load_config

    program = load_config(source / "config.toml").program
    return program if is_imported(program.model) else None


def _export(
    program: Program, source: Path, destination: Path, progress: Progress, step: int | None
) -> Summary:
    from graphtrain.weights.torch_modules import export

    at = checkpoint_step(source, step)
    with making(destination) as directory:
        if (source / SIDE).is_dir():
            copy_side(source / SIDE, directory)
        kind, numbers, arrays = export(program, source, at, directory, progress)
    return Summary(kind, numbers, arrays, "float32")


def read_config(directory: Path) -> dict[str, Any]:
    """A folder's config.json.

    Raises:
        WeightsError: there is none.
    """
    path = directory / "config.json"
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise WeightsError(f"{path} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise WeightsError(f"{path} holds no table of settings")
    return config


def _renamed(piece: Piece, family: Family, folder: Folder) -> Piece:
    """Under the names without the prefix, where the folder leaves it out."""
    if piece.names[0] in folder.names or not family.prefix:
        return piece
    return replace(piece, names=tuple(name.removeprefix(family.prefix) for name in piece.names))


def _check_names(pieces: list[Piece], family: Family, model: Model, folder: Folder) -> None:
    wanted = {name for piece in pieces for name in piece.names}
    there = set(folder.names)
    if missing := sorted(wanted - there):
        raise WeightsError(f"the weights lack {some(missing)}, which config.json asks for")
    head = ("lm_head\\.weight",) if model.tied_head else ()  # the embedding once more
    empty = re.compile("|".join((*family.without_weights, *head)))
    if left := sorted(name for name in there - wanted if not empty.fullmatch(name)):
        raise WeightsError(
            f"the weights hold {some(left)}, which is in no {family.model_type} model of this "
            "config.json"
        )


def some(names: list[str]) -> str:
    rest = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + rest


def dtype_of(piece: Piece, folder: Folder) -> np.dtype:
    found = {folder.dtype(name) for name in piece.names}
    if len(found) > 1:
        raise WeightsError(
            f"{piece.names[0]} and its like are of {' and '.join(sorted(map(str, found)))}; "
            "graphtrain keeps them in one array, of one dtype"
        )
    return found.pop()


def _config_dtype(config: dict[str, Any] | None) -> str:
    told = config or {}
    named = str(told.get("dtype") or told.get("torch_dtype"))
    return named if named in {str(dtype) for dtype in CODES} else "float32"


def without_padding(model: Model, config: dict[str, Any] | None) -> Model:
    """With the vocabulary of the config.json it began with, if that is smaller."""
    vocab = (config or {}).get("vocab_size", model.vocab)
    return replace(model, vocab=min(vocab, model.vocab))


def _cut(path: str, array: np.ndarray, model: Model) -> np.ndarray:
    """Without rows past the vocabulary."""
    return array[tuple(slice(size) for size in array_shape(path, model))]


def _shapes(piece: Piece, model: Model) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Of the tensors of a piece, from arrays that take no memory."""
    empty = [np.broadcast_to(np.int8(0), array_shape(path, model)) for path in piece.row.paths]
    for name, tensor in to_hugging_face(piece, empty, model):
        yield name, tensor.shape


def _write_config(
    directory: Path,
    family: Family,
    model: Model,
    config: dict[str, Any] | None,
    arrays: dict[str, tuple[np.dtype, tuple[int, ...]]],
) -> None:
    """The source's own where it says the same model; else with what is different."""
    if config is not None and mathematics(family.model(config)) == mathematics(model):
        return
    usual = Counter(dtype for dtype, _ in arrays.values()).most_common(1)[0][0]
    told = (config or {}) | family.config(model) | {"torch_dtype": str(usual)}
    (directory / "config.json").write_text(json.dumps(told, indent=2) + "\n")


def copy_side(source: Path, destination: Path) -> None:
    """All files but weights: configuration, tokenizer, chat template, code, licence."""
    destination.mkdir(exist_ok=True)
    for path in source.iterdir():
        if path.is_file() and not _WEIGHTS.fullmatch(path.name):
            shutil.copyfile(path, destination / path.name)


@contextmanager
def making(destination: Path) -> Iterator[Path]:
    """A folder that appears under its name when it is whole.

    Raises:
        WeightsError: there is something of that name, or the disk refuses.
    """
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise WeightsError(f"{destination} is there already; remove it or name another")
    unfinished = destination.with_name(f".{destination.name}.unfinished")
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        yield unfinished
        if destination.exists():
            destination.rmdir()
        unfinished.rename(destination)
    except OSError as error:
        raise WeightsError(f"{destination} cannot be written: {error}") from error
    finally:
        _remove(unfinished)


def _remove(directory: Path) -> None:
    """Until it stays away: after an error TensorStore still ends the writes it has begun."""
    for _ in range(20):
        if not directory.exists():
            return
        shutil.rmtree(directory, ignore_errors=True)
        time.sleep(0.1)


def summary(
    family: Family, model: Model, arrays: dict[str, tuple[np.dtype, tuple[int, ...]]]
) -> Summary:
    dtypes = Counter(str(dtype) for dtype, _ in arrays.values())
    return Summary(
        family.model_type,
        parameter_count(model),
        len(arrays),
        " and ".join(name for name, _ in dtypes.most_common()),
    )
