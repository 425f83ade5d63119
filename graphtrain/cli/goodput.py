"""graphtrain goodput: how much of a run's wall time was training that was kept."""

import json
from pathlib import Path

import click

from graphtrain.cli.options import LocalPath, json_option, page_option, write_file


@click.command("goodput")
@click.argument("run", type=LocalPath(exists=True))
@json_option
@page_option("with a picture of the starts")
def command(run: Path, as_json: bool, page: Path | None) -> None:
    """Show where the wall time of RUN went, over all of its starts.

    RUN is the directory of a run, or its configuration. The buckets add up to the wall time. It
    can be called while the run trains.
    """
    from graphtrain.api.runs import goodput
    from graphtrain.run.goodput.text import goodput_json, goodput_text

    result = goodput(run)
    if page is not None:
        from graphtrain.run.goodput.page import PAGE_MARK, goodput_page

        write_file(page, goodput_page(result), mark=PAGE_MARK)
    click.echo(json.dumps(goodput_json(result), indent=2) if as_json else goodput_text(result))
