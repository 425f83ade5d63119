"""Loading of a configuration from TOML, dicts and --set, with all problems reported at once."""

import json
import math
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, time
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError

from graphtrain.config.datasets import (
    DIRECTORY,
    apply_data_directory,
    remove_datasets,
    with_data_vocab,
)
from graphtrain.config.hf_folder import hf_folder_config
from graphtrain.config.lines import KeyPath
from graphtrain.config.overrides import Override, parse_overrides
from graphtrain.config.presets import apply_preset
from graphtrain.config.render import as_document, toml_document
from graphtrain.config.run_record import CONFIG, warn_if_changed
from graphtrain.config.saved_settings import check_frozen_biases
from graphtrain.config.schema import Config
from graphtrain.errors import ConfigError
from sharding_rules.documents import MAX_TOML_BYTES, DocumentError, parse_toml, read_text
from sharding_rules.errors import UserError

if TYPE_CHECKING:
    from graphtrain.config.problems import ConfigSource

_OLDER_DTYPE, _COMPUTE = ("program", "model", "dtype"), ("program", "precision", "compute")
_MAX_PROBLEMS = 50  # of one configuration that are reported
# What a directory contains that is of a run, or of converted weights, and not only of a project.
_OF_RUN_OR_WEIGHTS = ("checkpoints", "metrics.jsonl", "model.toml")


Source = str | os.PathLike[str] | Mapping[str, Any] | Config


def load_config(source: Source, overrides: Sequence[str] = (), target: str | None = None) -> Config:
    """Load a configuration, changed by overrides ("section.name=value") and `target`.

    Args:
        source: Path of a file or of the directory of a run; TOML, a string of several lines; tables
            as a dict; or a configuration.
        overrides: Settings to change.
        target: Machine to compile for, in place of program.target.

    Raises:
        ConfigError: one line for each problem: the file and line or the flag that caused it, the
            setting, and the values that it accepts.
    """
    if isinstance(source, Config) and not overrides and target is None:
        check_frozen_biases(source, "configuration")
        return source
    changes = parse_overrides(overrides, target)
    read = _read_source(source)
    document = read.document
    _follow_moved_run(read, document)
    if any(change.path == DIRECTORY for change in changes):
        remove_datasets(document)
    has_mesh = "mesh" in _table(document, "program")
    blocked = [change for change in changes if not change.apply(document)]
    if not has_mesh and not any(change.path == ("program", "mesh") for change in changes):
        _keep_default_mesh(document)
    has_compute = _take_compute_dtype(read.name, document, changes)
    apply_preset(document)
    if has_compute:  # a preset is a model, whatever dtype it was written with
        _table(_table(document, "program"), "model").pop("dtype", None)
    apply_data_directory(document)
    vocab_from_data = _take_vocab_from_data(document)
    foreign = set(_foreign((), document))
    errors = []
    try:
        # Through JSON, because the strict schema refuses Python dicts and lists.
        config = TypeAdapter(Config).validate_json(json.dumps(document, default=lambda _: None))
        if not blocked and not foreign:
            is_record = Path(read.name).name == CONFIG and not changes
            check_frozen_biases(config, read.name, Path(read.name) if is_record else None)
            return _with_data_vocab(config, read.name) if vocab_from_data else config
    except ValidationError as error:
        errors = error.errors(include_url=False)

    from graphtrain.config.problems import explain  # not needed for a valid file

    problems = explain(_located(read, document, changes), document, errors, foreign)
    shown = list(islice(problems, _MAX_PROBLEMS))
    if next(problems, None) is not None:
        shown.append(f"{read.name}: more problems; these are the first {_MAX_PROBLEMS}")
    raise ConfigError("\n".join(shown))


def config_source(
    source: Source, overrides: Sequence[str] = (), target: str | None = None
) -> "ConfigSource":
    """Return where the settings of a configuration are, for messages; its file is read again.

    Raises:
        ConfigError: it cannot be read.
    """
    read = _read_source(source)
    return _located(read, read.document, parse_overrides(overrides, target))


def _located(
    read: "_Read", document: Mapping[str, Any], changes: tuple[Override, ...]
) -> "ConfigSource":
    from graphtrain.config.problems import ConfigSource  # not needed for a valid file

    text = read.text if read.text is not None else toml_document(document)
    return ConfigSource(read.name, text, changes, has_lines=read.text is not None)


class UnknownVocabulary(ConfigError):
    """A configuration is valid but for its vocabulary, which would follow from the data."""

    def __init__(self, message: str, config: Config, *, of_data: bool) -> None:
        """Create the error.

        Args:
            message: what is wrong.
            config: the configuration, with a placeholder for the vocabulary.
            of_data: whether the data is the cause, and not the target, the mesh or the rules.
        """
        super().__init__(message)
        self.config, self.of_data = config, of_data


def config_file(path: Path) -> Path:
    """Return the config.toml of the directory of a run; any other path as it is."""
    file = path / CONFIG
    return file if file.is_file() else path


def run_directory(path: Path) -> Path:
    """Return the directory of the run of a configuration or project; any other path as it is."""
    file = config_file(path)
    if not file.is_file() or any((path / one).exists() for one in _OF_RUN_OR_WEIGHTS):
        return path
    return Path(load_config(file).run.directory)


def _follow_moved_run(read: "_Read", document: dict[str, Any]) -> None:
    """Let the config.toml of a run mean the directory that it is in, not where the run was made.

    Otherwise a command that is given a moved or copied run would read, or train, the original.
    """
    file, run = Path(read.name), document.get("run")
    is_of_run = read.text is not None and file.name == CONFIG
    if not (is_of_run and isinstance(run, dict) and (file.parent / "metrics.jsonl").is_file()):
        return
    named = run.get("directory")
    if not isinstance(named, str) or Path(named).absolute() != file.parent.absolute():
        run["directory"] = str(file.parent)


@dataclass(frozen=True)
class _Read:
    """A configuration as tables, and the text that they were read from."""

    name: str  # for messages
    document: dict[str, Any]
    text: str | None = None  # None: there are no lines to name in messages


def _read_source(source: Source) -> _Read:
    if isinstance(source, Config):
        return _Read("configuration", as_document(source))
    if isinstance(source, Mapping):
        return _Read("configuration", _plain(source))
    if isinstance(source, str) and "\n" in source:
        name, text = "configuration", source
    elif isinstance(source, str | os.PathLike):
        path = config_file(Path(source))
        if path.name == CONFIG:
            warn_if_changed(path)
        name = str(path)
        text = (hf_folder_config(path) if path.is_dir() else None) or _read(path)
    else:
        raise ConfigError(
            f"a configuration is a path, TOML text, a dict or a Config, not {type(source).__name__}"
        )
    try:
        return _Read(name, parse_toml(text), text)
    except DocumentError as error:
        raise ConfigError(f"{name}: not valid TOML: {error}") from error


def _plain(value: Any) -> Any:
    """Return a value as TOML has it: dicts, lists, and strings for paths; None is left out."""
    match value:
        case Mapping():
            return {str(name): _plain(inner) for name, inner in value.items() if inner is not None}
        case list() | tuple():
            return [_plain(inner) for inner in value]
        case os.PathLike():
            return os.fspath(value)
        case _:
            return value


def _take_vocab_from_data(document: dict[str, Any]) -> bool:
    """Return whether a native model leaves its vocabulary to the data; then set a placeholder."""
    program = document.get("program")
    model = program.get("model") if isinstance(program, dict) else None
    if not isinstance(model, dict) or model.keys() & {"torch", "hf", "vocab", "vocab_padding"}:
        return False
    model["vocab"] = 1
    return True


def _with_data_vocab(config: Config, name: str) -> Config:
    try:
        return with_data_vocab(config)
    except UserError as error:
        of_data = isinstance(error, ConfigError)
        raise UnknownVocabulary(f"{name}: {error}", config, of_data=of_data) from None


def _keep_default_mesh(document: dict[str, Any]) -> None:
    """Let data parallelism use the devices that --set program.mesh.AXIS=SIZE leaves.

    Without a table [program.mesh], data is "rest". The first axis that --set names would otherwise
    replace that default by a mesh that does not use all devices.
    """
    mesh = _table(document, "program").get("mesh")
    if isinstance(mesh, dict) and "data" not in mesh and "rest" not in mesh.values():
        mesh["data"] = "rest"


def _take_compute_dtype(name: str, document: dict[str, Any], changes: Sequence[Override]) -> bool:
    """Return whether program.precision.compute is set; refuse another dtype by its older name.

    What a flag sets counts, whichever of the names the file has.

    Raises:
        ConfigError: both names are set, and their values differ.
    """
    program = _table(document, "program")
    model, precision = _table(program, "model"), _table(program, "precision")
    if "dtype" not in model or "compute" not in precision:
        return "compute" in precision
    flags = [change.path for change in changes]
    if _OLDER_DTYPE in flags and _COMPUTE not in flags:
        del precision["compute"]
        return False
    dtype, compute = model.pop("dtype"), precision["compute"]
    if _COMPUTE not in flags and dtype != ("bfloat16" if compute in ("fp8", "int8") else compute):
        raise ConfigError(
            f"{name}: program.model.dtype = {json.dumps(dtype)} is the older name of "
            f"program.precision.compute, which is {json.dumps(compute)}; remove program.model.dtype"
        )
    return True


def _table(document: dict[str, Any], name: str) -> dict[str, Any]:
    value = document.get(name)
    return value if isinstance(value, dict) else {}


def _read(path: Path) -> str:
    try:
        return read_text(path, MAX_TOML_BYTES)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file{_close_by(path)}") from None
    except IsADirectoryError:
        raise ConfigError(
            f"{path}: is a directory without {CONFIG}{_close_by(path / '_')}"
        ) from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except DocumentError as error:
        location = f"{path}:{error.line}" if error.line else f"{path}"
        raise ConfigError(f"{location}: {error.reason}") from error


def _close_by(path: Path) -> str:
    """Suggest files that the user may have meant."""
    from difflib import get_close_matches

    try:
        present = sorted(file.name for file in path.parent.iterdir() if file.suffix == ".toml")
    except OSError:
        return f"; {path.parent} is not a directory either" if not path.parent.is_dir() else ""
    stems = [name.removesuffix(".toml") for name in present]
    if close := get_close_matches(path.name[:100].removesuffix(".toml"), stems, n=1):
        return f"; did you mean {path.parent / close[0]}.toml?"
    if CONFIG in present and not path.suffix:
        return (
            f"; if it is the directory of a run of {path.parent}, it is not trained yet; to train "
            f"it: {shlex.join(['graphtrain', 'run', str(path.parent), '--compile'])}"
        )
    return f"; in the same directory: {', '.join(present[:5])}" if present else ""


def _foreign(path: KeyPath, value: Any) -> Iterator[KeyPath]:
    """Yield the paths of values that no setting accepts: dates, infinity, NaN, large integers.

    Validation does not refuse them all: JSON cannot represent a date, so it would see null.
    """
    match value:
        case dict():
            for name, inner in value.items():
                yield from _foreign((*path, name), inner)
        case list():
            for inner in value:
                yield from _foreign(path, inner)
        case date() | time():
            yield path
        case float() if not math.isfinite(value):
            yield path
        case int() if value.bit_length() > 63:
            yield path
