"""Arguments and options that commands share."""

import shlex
from collections.abc import Sequence
from pathlib import Path

import click

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

cache_option = click.option(
    "--cache",
    type=click.Path(file_okay=False, path_type=Path),
    default="cache",
    show_default=True,
    envvar="GRAPHTRAIN_CACHE",
    show_envvar=True,
    help="Store of compiled programs.",
)

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")


def compile_command(config: Path, target: str | None, overrides: Sequence[str], cache: Path) -> str:
    """The command that compiles what a command with these options needs."""
    words = ["graphtrain", "compile", str(config)]
    words += ["--target", target] if target else []
    words += [word for override in overrides for word in ("--set", override)]
    words += ["--cache", str(cache)] if cache != Path("cache") else []
    return shlex.join(words)
