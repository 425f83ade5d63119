"""`graphtrain config`: print a resolved configuration, or the JSON schema of configurations."""

import json
from pathlib import Path

import click

from graphtrain.api.checks.purpose import CHECK, SHOW
from graphtrain.cli.checked import check
from graphtrain.cli.export_note import say_export_obstacle
from graphtrain.cli.options import config_argument, json_option, overrides_option, target_option
from graphtrain.cli.usage import Group


@click.group(cls=Group)
def command() -> None:
    """Check or show a configuration; print the reference or the JSON schema of settings."""


@command.command("check")
@config_argument
@overrides_option
@target_option
def check_config(config: Path, overrides: tuple[str, ...], target: str | None) -> None:
    """Report everything that is wrong with CONFIG and with what it names, in under a second.

    Checks the settings, the target, the rules and the mesh; that every size is divided evenly; that
    the datasets exist, are not empty and fit the vocabulary; that the checkpoint to resume from is
    of the same run; and that the run directory can be written. Nothing is compiled. Exits with 2 if
    there is a problem.
    """
    check(config, overrides, target, CHECK)
    click.echo(f"{config}: no problem found")


@command.command()
@config_argument
@overrides_option
@target_option
@json_option
def show(config: Path, overrides: tuple[str, ...], target: str | None, as_json: bool) -> None:
    """Validate CONFIG and print every setting, including defaults, as TOML.

    The output is a configuration file with the same settings. A note on standard error says if the
    model could not be exported to Hugging Face, and which settings to change.
    """
    from dataclasses import asdict

    from graphtrain.config import render

    loaded = check(config, overrides, target, SHOW).config
    click.echo(
        json.dumps(asdict(loaded), indent=2) if as_json else render(loaded, with_choices=True),
        nl=as_json,
    )
    say_export_obstacle(loaded.program)


@command.command()
def reference() -> None:
    """Print a Markdown page of all settings, with the values they accept and their defaults."""
    from graphtrain.config.reference import reference as settings_page

    click.echo(settings_page(), nl=False)


@command.command()
def schema() -> None:
    """Print the JSON schema of configuration files, for completion and checks in editors."""
    from graphtrain.config.settings import json_schema

    click.echo(json.dumps(json_schema(), indent=2))
