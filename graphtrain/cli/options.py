"""Arguments and options that commands share."""

import os
import shlex
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import click


class Size(click.ParamType):
    """Bytes, as people write them."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        from graphtrain.cache.sizes import parse

        try:
            return parse(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


config_argument = click.argument("config", type=click.Path(path_type=Path))

overrides_option = click.option(
    "--set",
    "overrides",
    metavar="SECTION.NAME=VALUE",
    multiple=True,
    help="Change a setting of CONFIG, as in --set run.steps=10. May be repeated.",
)

target_option = click.option(
    "--target", metavar="NAME", help="The machine to compile for, as in cpu:8; over program.target."
)


def cache_as(make: Callable[[Path], Any]) -> Callable:
    """--cache; the command is given what is made of its path as `cache`."""
    return click.option(
        "--cache",
        metavar="DIR",
        type=click.Path(file_okay=False, path_type=Path),
        default=_default_root,
        show_default="$GRAPHTRAIN_CACHE, else ./cache",
        callback=lambda _context, _option, root: make(root),
        help="Store of compiled programs.",
    )


def _default_root() -> Path:
    from graphtrain.cache import default_root

    return default_root()


cache_option = cache_as(Path)


def process_options(command: Callable) -> Callable:
    """Who the other processes of a run are; Slurm tells by itself."""
    for option in (
        click.option(
            "--rank", type=int, envvar="GRAPHTRAIN_RANK", help="Which of the processes this is."
        ),
        click.option(
            "--processes",
            "count",
            type=click.IntRange(1),
            envvar="GRAPHTRAIN_PROCESSES",
            help="How many processes make the run, one for each host.",
        ),
        click.option(
            "--coordinator",
            metavar="HOST:PORT",
            envvar="GRAPHTRAIN_COORDINATOR",
            help="Where rank 0 listens. With --processes and --rank; Slurm tells by itself.",
        ),
    ):
        command = option(command)
    return command


def enter_run(target: str, coordinator: str | None, count: int | None, rank: int | None) -> None:
    """Make this process one of a run: set up its memory, meet the others if there are any.

    Raises:
        LoweringError: the target runs in another number of processes.
    """
    from lowering.machine import distributed, host
    from lowering.machine.target import Target

    member = distributed.membership(coordinator=coordinator, count=count, rank=rank)
    machine = Target.parse(target)
    if machine.on_host:
        host.keep_pages()
    distributed.check_target(machine, member)
    if member is not None and member.count > 1:
        distributed.join(member, machine)


def pull_shared(store: Any, programs: Iterable[Any]) -> None:
    """Fetch what programs need and the store lacks from $GRAPHTRAIN_SHARED_CACHE, if set."""
    if "GRAPHTRAIN_SHARED_CACHE" not in os.environ:
        return
    from graphtrain.compile.request_keys import request_keys

    pull_requests(store, [key for program in programs for key in request_keys(program).values()])


def pull_requests(store: Any, requests: Iterable[Any]) -> None:
    """Fetch what answers requests and the store lacks from $GRAPHTRAIN_SHARED_CACHE, if set."""
    if "GRAPHTRAIN_SHARED_CACHE" not in os.environ:
        return
    from graphtrain.cache.exchange import pull_shared

    digests = [request.digest for request in requests]
    pull_shared(store, digests, lambda line: click.echo(line, err=True))


def is_first() -> bool:
    """Whether this process speaks for all of a run."""
    from lowering.machine import distributed

    return distributed.rank() == 0


def write_file(path: Path, text: str) -> None:
    """Write what an option asked to have in a file.

    Raises:
        GraphtrainError: it cannot be written.
    """
    from graphtrain.errors import GraphtrainError

    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise GraphtrainError(f"cannot write {path}: {error.strerror}") from error


json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")


def compile_command(config: Path, target: str | None, overrides: Sequence[str], cache: Path) -> str:
    """The command that compiles what a command with these options needs."""
    return command_line("compile", config, target, overrides, cache)


def command_line(
    verb: str, config: Path, target: str | None, overrides: Sequence[str], cache: Path
) -> str:
    """Another command with the options of this one."""
    named = cache if cache != Path("cache") else None
    return shlex.join(["graphtrain", verb, *arguments(config, target, overrides, named)])


def arguments(
    config: Path, target: str | None, overrides: Sequence[str], cache: Path | None = None
) -> list[str]:
    """CONFIG and options, as words of a command."""
    words = [str(config)]
    words += ["--target", target] if target else []
    words += [word for override in overrides for word in ("--set", override)]
    return words + (["--cache", str(cache)] if cache else [])
