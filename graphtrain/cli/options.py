"""Arguments and options that several commands share."""

import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click


class Size(click.ParamType):
    """Number of bytes with a unit, for example 500MB or 1.5GB."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        from graphtrain.cache.sizes import parse_size

        try:
            return parse_size(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


class FiniteRange(click.FloatRange):
    """Range of numbers, without NaN, which passes click's comparisons, and without infinity."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail("not a finite number", param, ctx)
        return number


class FiniteNumber(click.ParamType):
    """Any number but NaN and infinity; the help of a range without limits would name some."""

    name = "float"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = click.FLOAT.convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail("not a finite number", param, ctx)
        return number


class LocalPath(click.Path):
    """Path of a local file or directory; refuses URLs and names that no file can have."""

    def __init__(self, **restrictions: bool) -> None:
        super().__init__(path_type=Path, **restrictions)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        from sharding_rules.paths import check_local_path

        try:
            check_local_path(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)
        return super().convert(value, param, ctx)


class ConfigPath(LocalPath):
    """Path of a configuration file; a run directory stands for the config.toml in it."""

    name = "config"

    def __init__(self) -> None:
        super().__init__()

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        from graphtrain.config.load import config_file

        return config_file(Path(str(super().convert(value, param, ctx))))


class RunPath(LocalPath):
    """Path of a run or of weights; a configuration or project stands for its run.directory."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        from graphtrain.config.load import run_directory

        return run_directory(Path(str(super().convert(value, param, ctx))))


class StepName(click.ParamType):
    """Step of a checkpoint: a number, "last" or "best"."""

    name = "step"

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        return "[N|last|best]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value in ("last", "best") or isinstance(value, int):
            return value
        if value.isascii() and value.isdigit() and len(value) < 19:
            return int(value)
        self.fail(f"{value!r} is not a step; write a number, last or best", param, ctx)


step_option = click.option(
    "--step",
    type=StepName(),
    default="last",
    show_default=True,
    help="Step of the checkpoint; best is that of the lowest validation loss.",
)


chat_template_option = click.option(
    "--chat-template",
    metavar="NAME|FILE",
    default="own",
    show_default=True,
    help="Chat template: a built-in one such as chatml or llama3, a .jinja file, or own: that of "
    "the training data, else that of the tokenizer.",
)


config_argument = click.argument("config", metavar="CONFIG|RUN", type=ConfigPath())

overrides_option = click.option(
    "--set",
    "overrides",
    metavar="SECTION.NAME=VALUE",
    multiple=True,
    help="Change a setting of CONFIG, for example --set run.steps=10. The value is parsed as TOML; "
    "anything else is taken as a string. May be repeated.",
)

target_option = click.option(
    "--target",
    metavar="NAME",
    help="Machine to compile for, for example cpu:8 or h100:64. Overrides program.target.",
)


def make_cache_option(make: Callable[[Path], Any], *, must_exist: bool = False) -> Callable:
    """Return the option --cache, whose directory `make` converts to the argument `cache`.

    Args:
        make: called with the directory.
        must_exist: whether a directory that is named on the command line must exist.
    """

    def convert(context: click.Context, option: click.Parameter, root: Path) -> Any:
        is_named = context.get_parameter_source("cache") is click.core.ParameterSource.COMMANDLINE
        if must_exist and is_named and not root.is_dir():
            raise click.BadParameter(f"{root}: no such directory", context, option)
        return make(root)

    return click.option(
        "--cache",
        metavar="DIR",
        type=LocalPath(file_okay=False),
        default=_default_root,
        show_default="$GRAPHTRAIN_CACHE, else ./cache",
        callback=convert,
        help="Directory of compiled programs.",
    )


def _default_root() -> Path:
    from graphtrain.cache import default_root

    return default_root()


cache_option = make_cache_option(Path)


def process_options(command: Callable) -> Callable:
    """Add the options that connect the processes of a run; under a launcher none is needed."""
    for option in (
        click.option(
            "--rank",
            type=int,
            envvar="GRAPHTRAIN_RANK",
            help="Rank of this process, from 0. [default: $GRAPHTRAIN_RANK, else that of the "
            "launcher: Slurm, TPU slice, torchrun, MPI, or the rank table of Ascend]",
        ),
        click.option(
            "--processes",
            "count",
            type=click.IntRange(1),
            envvar="GRAPHTRAIN_PROCESSES",
            help="Number of processes of the run, one per host. [default: $GRAPHTRAIN_PROCESSES, "
            "else that of the launcher, else 1]",
        ),
        click.option(
            "--coordinator",
            metavar="HOST:PORT",
            envvar="GRAPHTRAIN_COORDINATOR",
            help="Address of rank 0; requires --processes and --rank, unless a launcher says them. "
            "[default: $GRAPHTRAIN_COORDINATOR, else that of the launcher]",
        ),
    ):
        command = option(command)
    return command


def check_output(path: Path, mark: str) -> None:
    """Refuse to replace a file that another command, or a person, wrote.

    Args:
        path: Output file of an option.
        mark: Text that is in every file that the same option wrote before.

    Raises:
        OutputExists: the file exists without the mark.
    """
    from graphtrain.files import output_exists

    if path.is_file() and mark.encode() not in path.read_bytes():
        raise output_exists(path)


def write_file(path: Path, text: str, mark: str | None = None) -> None:
    """Write the output file of an option.

    Args:
        path: Output file.
        text: Content.
        mark: As for `check_output`. None: only a file of the same content is replaced.

    Raises:
        GraphtrainError: the file cannot be written.
        OutputExists: it would replace another file.
    """
    from graphtrain.errors import GraphtrainError

    check_output(path, text if mark is None else mark)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise GraphtrainError(f"cannot write {path}: {error.strerror}") from error


def write_report(path: Path, report: Mapping[str, Any], indent: int) -> None:
    """Write a report of a command as JSON; it replaces earlier reports with the same keys."""
    import json

    first_key = json.dumps(next(iter(report)))
    write_file(path, json.dumps(report, indent=indent) + "\n", mark=f"{first_key}: ")


json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")


def listen_options(port: int, note: str = "") -> Callable[[Callable], Callable]:
    """Return a decorator for --host and --port of a server.

    Args:
        port: The default.
        note: Sentence that is added to the help of --host.
    """

    def add(command: Callable) -> Callable:
        text = "Address to listen on; 0.0.0.0 for every network of this machine."
        with_port = click.option(
            "--port",
            type=click.IntRange(0, 65535),
            default=port,
            show_default=True,
            help="Port to listen on; 0 for any that is free.",
        )(command)
        return click.option(
            "--host", default="127.0.0.1", show_default=True, help=f"{text} {note}".strip()
        )(with_port)

    return add


def page_option(content: str) -> Callable[[Any], Any]:
    """Return the option --html of a report, which names the file of a page "with all rows"."""
    return click.option(
        "--html",
        "page",
        type=LocalPath(dir_okay=False),
        metavar="FILE",
        help=f"Write an HTML page {content}; it needs no network.",
    )


def compile_hint(config: Path, target: str | None, overrides: Sequence[str], cache: Path) -> str:
    """Return the graphtrain compile command for the same configuration and options."""
    return command_line("compile", config, target, overrides, cache)


def serve_hint(config: Path, target: str | None, overrides: Sequence[str], cache: Path) -> str:
    """Return the graphtrain compile command for the programs that serve."""
    return f"{compile_hint(config, target, overrides, cache)} --for serve"


def command_line(
    verb: str, config: Path, target: str | None, overrides: Sequence[str], cache: Path
) -> str:
    """Return a graphtrain command with the same configuration and options."""
    named = cache if cache != Path("cache") else None
    return shlex.join(["graphtrain", verb, *arguments(config, target, overrides, named)])


def arguments(
    config: Path, target: str | None, overrides: Sequence[str], cache: Path | None = None
) -> list[str]:
    """Return CONFIG and its options as command-line words."""
    args = [str(config)]
    args += ["--target", target] if target else []
    args += [word for override in overrides for word in ("--set", override)]
    return args + (["--cache", str(cache)] if cache else [])


def sampling_options(command: Callable) -> Callable:
    """Add the options that say how tokens are chosen."""
    options = (
        click.option(
            "--temperature",
            type=FiniteRange(0),
            default=0.8,
            show_default=True,
            help="Divisor of the logits; 0 always chooses the most likely token.",
        ),
        click.option(
            "--top-k",
            type=click.IntRange(1),
            help="Sample only from this many most likely tokens. [default: all tokens]",
        ),
        click.option(
            "--top-p",
            type=FiniteRange(0, 1, min_open=True),
            help="Sample only from the fewest most likely tokens whose probabilities add up to "
            "this. [default: all tokens]",
        ),
        click.option(
            "--seed",
            type=click.IntRange(0),
            default=0,
            show_default=True,
            help="Seed of the sampling.",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command
