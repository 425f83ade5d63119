"""graphtrain neuron-finish: bundles into programs, where neuronx-cc is."""

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
    """Compile the programs that BUNDLES hold into the cache.

    `graphtrain compile` writes a bundle for each graph whose compiler is not installed. A bundle
    whose compile.sh has been run is not compiled again.
    """
    from graphtrain.cache import Cache
    from graphtrain.finish import finish

    for directory in bundles:
        digest = finish(directory, Cache(cache))
        click.echo(f"{directory}: {digest}")
