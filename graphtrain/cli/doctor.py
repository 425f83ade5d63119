"""graphtrain doctor: report what this machine can do and what is missing; measure its speed."""

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

import click

from graphtrain.cli.options import cache_option, json_option


@click.command("doctor")
@cache_option
@click.option(
    "--measure",
    is_flag=True,
    help="Measure products, memory, functions and collectives of this machine's CPU, in a "
    "minute or two, and store them in machine-profiles.json, which plans for cpu:N use.",
)
@click.option(
    "--even-if-busy",
    is_flag=True,
    help="With --measure: measure although other processes use the cores.",
)
@json_option
@click.pass_context
def command(
    context: click.Context, cache: Path, measure: bool, even_if_busy: bool, as_json: bool
) -> None:
    """Report what this machine can compile for and run on, or measure how fast it is.

    Exits with 2 if something that graphtrain requires is missing, or if --measure finds the machine
    busy.
    """
    if even_if_busy and not measure:
        raise click.UsageError("--even-if-busy needs --measure")
    if measure:
        if context.get_parameter_source("cache") is click.core.ParameterSource.COMMANDLINE:
            raise click.UsageError("--measure uses no cache; remove --cache")
        _measure(even_if_busy, as_json)
        return
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


def _measure(even_if_busy: bool, as_json: bool) -> None:
    """Measure this machine, store the profile, and print every number."""
    from graphtrain.api.measuring.machine import measure_and_store

    def observe(subject: str) -> None:
        click.echo(f"measuring {subject}", err=True)

    path, profile = measure_and_store(observe, even_if_busy=even_if_busy)
    if as_json:
        click.echo(json.dumps(asdict(profile), indent=2))
        return
    from graphtrain.api.measuring.report import lines
    from lowering.machine.machine_tables import VARIABLE

    for line in lines(profile):
        click.echo(line)
    named = os.environ.get(VARIABLE)
    users = f"with {VARIABLE}={named}" if named else "in this directory"
    click.echo(f"stored in {path}; plans for cpu:N {users} use it")
