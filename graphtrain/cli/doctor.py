"""graphtrain doctor: report what this machine can do and what is missing, with remedies."""

import json
import sys
from dataclasses import asdict
from pathlib import Path

import click

from graphtrain.cli.options import cache_option, json_option


@click.command("doctor")
@cache_option
@json_option
def command(cache: Path, as_json: bool) -> None:
    """Report what this machine can compile for and run on.

    Exits with 2 if something that graphtrain requires is missing.
    """
    from graphtrain.api.doctor import run_checks

    findings = run_checks(cache)
    if as_json:
        click.echo(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        for finding in findings:
            mark = "ok     " if finding.ok else "missing"
            remedy = f"; run: {finding.remedy}" if finding.remedy else ""
            click.echo(f"{mark}  {finding.subject}: {finding.state}{remedy}")
    if not all(finding.ok for finding in findings):
        sys.exit(2)
