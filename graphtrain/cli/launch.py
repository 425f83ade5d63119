"""graphtrain launch: compile jobs and run jobs on a cluster."""

import shlex
from collections.abc import Sequence
from pathlib import Path

import click

from graphtrain.cli.options import (
    arguments,
    cache_option,
    config_argument,
    overrides_option,
    target_option,
)


@click.group("launch")
def command() -> None:
    """Compile and run on a cluster."""


workers_option = click.option(
    "--workers",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Compile jobs that share the cache; each graph is compiled by one.",
)


@command.command("slurm")
@config_argument
@target_option
@overrides_option
@cache_option
@workers_option
@click.option("--partition", help="Of both jobs.")
@click.option("--account", help="Of both jobs.")
@click.option("--time", "limit", help="Time limit of both jobs, as sbatch takes it.")
@click.option(
    "--sbatch",
    "further",
    metavar="NAME=VALUE",
    multiple=True,
    help="A further option of sbatch for both jobs, as in --sbatch qos=high. May be repeated.",
)
@click.option(
    "--warning",
    type=click.IntRange(1),
    default=300,
    show_default=True,
    help="Seconds before the time limit at which the run saves and asks to be queued again.",
)
@click.option("--dry-run", is_flag=True, help="Print the scripts; submit nothing.")
def slurm(
    config: Path,
    target: str | None,
    overrides: Sequence[str],
    cache: Path,
    workers: int,
    partition: str | None,
    account: str | None,
    limit: str | None,
    further: Sequence[str],
    warning: int,
    dry_run: bool,
) -> None:
    """Submit a job that compiles CONFIG, and one that runs it once that is done.

    The run takes one task on each host. Before its time limit, and when it is preempted, it saves,
    is queued again, and goes on from there.
    """
    from graphtrain.launch import slurm as scheduler

    job = _job(config, target, overrides, cache, workers)
    named = {"partition": partition, "account": account, "time": limit}
    options = {name: value for name, value in named.items() if value} | dict(map(_pair, further))
    made = scheduler.scripts(job, options, warning=warning)
    if dry_run:
        click.echo(f"# {job.directory}/compile.sh\n{made.compile}")
        click.echo(f"# {job.directory}/run.sh, after the first has succeeded\n{made.run}")
        return
    numbers = scheduler.submit(job, made)
    click.echo(f"compile: job {numbers['compile']}")
    click.echo(f"run:     job {numbers['run']}, once that has succeeded")
    asked = ["graphtrain", "launch", "status", *arguments(config, None, overrides)]
    click.echo(f"{shlex.join(asked)}; logs are in {job.directory}")


@command.command("kubernetes")
@config_argument
@target_option
@overrides_option
@cache_option
@workers_option
@click.option("--image", required=True, help="Container image with graphtrain.")
@click.option("--claim", required=True, help="Volume claim that all pods share.")
@click.option("--namespace", help="Of the JobSet.")
def kubernetes(
    config: Path,
    target: str | None,
    overrides: Sequence[str],
    cache: Path,
    workers: int,
    image: str,
    claim: str,
    namespace: str | None,
) -> None:
    """Print a JobSet that compiles CONFIG and then runs it, for kubectl apply -f -."""
    from graphtrain.launch.kubernetes import job_set

    job = _job(config, target, overrides, cache, workers)
    click.echo(job_set(job, image=image, claim=claim, namespace=namespace), nl=False)


@command.command("status")
@config_argument
@overrides_option
def status(config: Path, overrides: Sequence[str]) -> None:
    """Say how the jobs of CONFIG do, and how far its run is."""
    from graphtrain.config import load_config
    from graphtrain.launch.slurm import status
    from graphtrain.run.metrics import read_journal

    directory = Path(load_config(config, overrides, None).run.directory)
    for name, (number, state) in status(directory / "launch").items():
        click.echo(f"{name + ':':<9}job {number}, {state}")
    steps = [one for one in read_journal(directory) if "loss" in one]
    if steps:
        click.echo(f"step {steps[-1]['step']}, loss {steps[-1]['loss']:.4f}")


def _job(config: Path, target: str | None, overrides: Sequence[str], cache: Path, workers: int):
    from graphtrain.config import load_config
    from graphtrain.launch.job import job

    settings = load_config(config, overrides, target)
    return job(settings, arguments(config, target, overrides, cache), workers)


def _pair(text: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    return name.lstrip("-"), value
