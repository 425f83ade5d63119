"""`graphtrain config`: what a configuration file resolves to, and the schema of such files."""

import json
from pathlib import Path

import click

from graphtrain.cli.options import config_argument, json_option, overrides_option, target_option


@click.group()
def command() -> None:
    """Show a resolved configuration, or the JSON schema for editors."""


@command.command()
@config_argument
@overrides_option
@target_option
@json_option
def show(config: Path, overrides: tuple[str, ...], target: str | None, as_json: bool) -> None:
    """Check CONFIG and print every setting, defaults included, as TOML that loads to the same."""
    from dataclasses import asdict

    from graphtrain.config import load_config, render

    loaded = load_config(config, overrides, target)
    click.echo(json.dumps(asdict(loaded), indent=2) if as_json else render(loaded), nl=as_json)


@command.command()
def schema() -> None:
    """Print the JSON schema of configuration files; editors complete and check with it."""
    from graphtrain.config.settings import json_schema

    click.echo(json.dumps(json_schema(), indent=2))
