"""Creation of a new project: its data, its configuration file, and what a LoRA starts from."""

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from graphtrain.api.starters.sizes import Size, size_for, tokenizer_for
from graphtrain.api.starters.templates import KINDS, Project, config_text
from graphtrain.config import Config, load_config
from graphtrain.config.hf_config import read_config
from graphtrain.data.prepare.text import PrepareResult, prepare
from graphtrain.data.readers.corpus import is_text
from graphtrain.data.samples.text import write_sample
from graphtrain.errors import ConfigError, DataError
from graphtrain.files import atomic_write, counted
from sharding_rules.errors import UserError

_SAMPLE_BYTES = 2_000_000
_NANOGPT = Size(0, layers=4, embed=128, heads=4, global_batch_size=12, seq_len=64)
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")
_FOLDER_KINDS = ("lora", "hf")  # which start from a folder of Hugging Face

ProgressCallback = Callable[[str, float], None]


@dataclass(frozen=True)
class NewProject:
    """A project that was created."""

    config_path: Path
    config: Config
    data: PrepareResult


def create_project(
    directory: Path,
    like: str = "llama",
    data: Sequence[Path] = (),
    tokenizer: str | None = None,
    report: ProgressCallback = lambda stage, fraction: None,
) -> NewProject:
    """Prepare data in a directory and write a configuration file for it; replace nothing.

    Args:
        directory: Directory of the project.
        like: A name of KINDS; with lora and hf, =FOLDER follows.
        data: Files of text. None: a sample that needs no network.
        tokenizer: Tokenizer, as for `prepare`. None: chosen by the kind and the size of the text.
        report: Called with the current stage and its completed fraction.

    Raises:
        ConfigError: the kind or its folder cannot be used, or there is a configuration already.
        DataError: the data cannot be used, or the directory has data of another request.
        WeightsError: the model of a LoRA cannot be converted.
    """
    kind, folder = _parse(like)
    config_path = directory / "config.toml"
    _check_directory(directory, config_path)
    hf = read_config(str(folder), {}) if folder is not None else {}  # fails before any work
    with _removed_if_it_fails(directory, directory / "data"):
        prepared = _prepare(directory, kind, folder, data, tokenizer, report)
        project = _project(directory, kind, folder, hf, prepared.train.vocab, prepared.train.tokens)
        if kind == "lora":
            assert folder is not None
            _convert(folder, directory / "base", report)
        text = config_text(project)
        config = load_config(text)
        with atomic_write(config_path) as file:
            file.write(text.encode())
    return NewProject(config_path, config, prepared)


def _check_directory(directory: Path, config_path: Path) -> None:
    """Refuse a directory that cannot be created, or that has a configuration already.

    Raises:
        ConfigError: it is one of these.
    """
    for path in (directory, *directory.parents):
        if path.exists() and not path.is_dir():
            raise ConfigError(f"{path} is a file; name a directory that does not exist yet")
    if config_path.exists():
        raise ConfigError(f"{config_path} exists already; remove it or choose another directory")


@contextmanager
def _removed_if_it_fails(*directories: Path) -> Iterator[None]:
    """Remove the directories that did not exist before if the block raises a user error."""
    new = [directory for directory in directories if not directory.exists()]
    try:
        yield
    except UserError:
        for directory in new:
            shutil.rmtree(directory, ignore_errors=True)
        raise


def _parse(like: str) -> tuple[str, Path | None]:
    """Return the kind, and the folder for the kinds that need one."""
    kind, equals, folder = like.partition("=")
    if kind not in KINDS:
        raise ConfigError(f"--like {like}: should be one of {', '.join(KINDS)}")
    if kind in _FOLDER_KINDS and not folder:
        raise ConfigError(
            f"--like {kind} needs the folder of a Hugging Face model: --like {kind}=FOLDER"
        )
    if equals and kind not in _FOLDER_KINDS:
        raise ConfigError(f"--like {kind} takes no folder; only {' and '.join(_FOLDER_KINDS)} do")
    return kind, Path(folder) if folder else None


def _prepare(
    directory: Path,
    kind: str,
    folder: Path | None,
    data: Sequence[Path],
    tokenizer: str | None,
    report: ProgressCallback,
) -> PrepareResult:
    inputs = list(data) or [_sample(directory, kind)]
    for path in inputs:
        if not path.exists():
            raise DataError(f"{path}: no such file")
    if tokenizer is None:
        tokenizer = "chars" if kind == "shakespeare-char" else _tokenizer_of(folder)
    if tokenizer is None:
        tokenizer = tokenizer_for(sum(path.stat().st_size for path in inputs))
    # Text files are kept as they are; records of other files are documents of their own.
    whole: dict[str, Any] = {"text_document": "file", "split_by": "text", "validation": 0.1}
    settings = whole if all(map(is_text, inputs)) else {}
    return prepare(inputs, directory / "data", tokenizer, report=report, **settings)


def _sample(directory: Path, kind: str) -> Path:
    """Write the built-in sample, unless it is there; return its path."""
    path = directory / "sample.jsonl"
    if not path.exists():
        parts = ("topics",) if kind == "shakespeare-char" else ("topics", "docstrings")
        write_sample(path, include=parts, limit=_SAMPLE_BYTES)
    return path


def _tokenizer_of(folder: Path | None) -> str | None:
    """Return the folder of a model if it has a tokenizer."""
    has_tokenizer = folder is not None and any((folder / name).is_file() for name in _TOKENIZERS)
    return str(folder) if has_tokenizer else None


def _convert(folder: Path, base: Path, report: ProgressCallback) -> None:
    from graphtrain.weights.hf_import import import_hugging_face

    if not (base / "model.toml").is_file():
        import_hugging_face(
            folder, base, lambda done, count: report("converting the model", done / max(count, 1))
        )


def _project(
    directory: Path, kind: str, folder: Path | None, hf: dict[str, Any], vocab: int, tokens: int
) -> Project:
    size = _NANOGPT if kind == "shakespeare-char" else size_for(tokens)
    longest = hf.get("max_position_embeddings") or hf.get("n_positions")
    if isinstance(longest, int):
        size = replace(size, seq_len=min(size.seq_len, longest))
    if tokens <= size.seq_len:
        raise DataError(
            f"the text gives {counted(tokens, 'token')} to train on; give at least "
            f"{size.seq_len + 1}, which is one sequence"
        )
    rows = hf.get("vocab_size")
    overrides = ""
    if kind == "hf" and isinstance(rows, int) and _tokenizer_of(folder) is None:
        overrides = f"{{ vocab_size = {vocab} }}  # that of the data"
    elif isinstance(rows, int) and vocab > rows:
        raise ConfigError(
            f"{folder}: its tokenizer has {vocab} tokens, but vocab_size = {rows} in config.json"
        )
    return Project(directory, kind, tokens, size, folder, overrides)
