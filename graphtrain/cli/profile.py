"""graphtrain profile: predicted against measured time of the operations of a step."""

import json
from collections.abc import Sequence
from pathlib import Path

import click

from graphtrain.cli.options import (
    LocalPath,
    json_option,
    overrides_option,
    page_option,
    target_option,
    write_file,
)


@click.command("profile")
@click.argument("run", type=LocalPath(exists=True))
@click.option(
    "--steps",
    metavar="FIRST:LAST",
    help="Steps of the profile, if the run has several. [default: the last ones]",
)
@target_option
@overrides_option
@json_option
@page_option("with all rows")
def command(
    run: Path,
    steps: str | None,
    target: str | None,
    overrides: Sequence[str],
    as_json: bool,
    page: Path | None,
) -> None:
    """Compare the measured time of each collective and kernel of RUN with its plan.

    RUN is the directory of a run, or its configuration. The run has traced the steps: with
    run.profile, for example "100:105", or because SIGUSR2 was sent to its processes.
    """
    from graphtrain.api.runs import profile
    from graphtrain.run.profiles.text import PAGE_MARK, profile_json, profile_page, profile_text

    result = profile(run, steps=steps, target=target, set=overrides)
    if page is not None:
        write_file(page, profile_page(result), mark=PAGE_MARK)
    click.echo(json.dumps(profile_json(result), indent=2) if as_json else profile_text(result))
