"""graphtrain watch: a local page with the curves of runs."""

from collections.abc import Sequence
from pathlib import Path

import click

from graphtrain.cli.options import LocalPath, cache_option, listen_options
from graphtrain.cli.terminal import say


@click.command("watch")
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=LocalPath(exists=True))
@listen_options(8008, "The page asks for no password.")
@cache_option
def command(runs: Sequence[Path], host: str, port: int, cache: Path) -> None:
    """Show runs on a local page, also while they train: curves, plan, checkpoints, goodput.

    RUN is the directory of a run, or its configuration, whose run may start later. Files are only
    read, from where they were read before, while a page is open. --cache names the compiled
    programs, with whose memory and time the measured ones are compared. Ctrl-C or SIGTERM ends it.
    """
    from graphtrain.api.live_page import watch

    watch(*runs, host=host, port=port, cache=cache, log=say)
