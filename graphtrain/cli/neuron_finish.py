"""graphtrain neuron-finish: compile bundles, on a machine with neuronx-cc."""

import sys
from collections.abc import Sequence
from pathlib import Path

import click

from graphtrain.cli.options import cache_option


@click.command("neuron-finish")
@click.argument(
    "bundles", nargs=-1, required=True, type=click.Path(file_okay=False, path_type=Path)
)
@cache_option
def command(bundles: Sequence[Path], cache: Path) -> None:
    """Compile BUNDLES into the cache.

    `graphtrain compile` writes a bundle for each graph whose compiler is not installed. A bundle
    whose compile.sh was run already is not compiled again. Exits with 2 if a bundle failed; the
    others are stored all the same.
    """
    from graphtrain.cache import Cache
    from graphtrain.compile.neuron_bundles import compile_bundle
    from graphtrain.errors import GraphtrainError
    from lowering.errors import LoweringError

    failed = False
    for directory in bundles:
        try:
            click.echo(f"{directory}: {compile_bundle(directory, Cache(cache))}")
        except (GraphtrainError, LoweringError) as error:
            click.echo(f"error: {directory}: {error}", err=True)
            failed = True
    if failed:
        sys.exit(2)
