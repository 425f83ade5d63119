"""graphtrain launch: submit jobs that compile and train on a cluster."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from graphtrain.api.checks.purpose import LAUNCH, LAUNCH_ELSEWHERE
from graphtrain.cli.checked import check
from graphtrain.cli.options import (
    arguments,
    cache_option,
    config_argument,
    overrides_option,
    target_option,
)
from graphtrain.cli.usage import Group

if TYPE_CHECKING:
    from graphtrain.api.checks.checked import CheckedConfig
    from graphtrain.launch.job import Job


@click.group("launch", cls=Group)
def command() -> None:
    """Compile and train on a cluster with Slurm or Kubernetes."""


workers_option = click.option(
    "--workers",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Number of compile jobs, which share the cache; each graph is compiled by one of them.",
)


@command.command("slurm")
@config_argument
@target_option
@overrides_option
@cache_option
@workers_option
@click.option("--partition", help="Slurm partition of both jobs. [default: that of the cluster]")
@click.option("--account", help="Slurm account of both jobs. [default: that of the user]")
@click.option(
    "--time",
    "limit",
    help="Time limit of both jobs in the format of sbatch, for example 4:00:00. "
    "[default: the partition's]",
)
@click.option(
    "--sbatch",
    "further",
    metavar="NAME=VALUE",
    multiple=True,
    help="Additional sbatch option for both jobs, for example --sbatch qos=high. May be repeated.",
)
@click.option(
    "--warning",
    type=click.IntRange(1),
    default=300,
    show_default=True,
    help="Seconds before the time limit at which the run saves a checkpoint and is requeued.",
)
@click.option("--dry-run", is_flag=True, help="Print the job scripts without submitting them.")
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
    """Submit a job that compiles CONFIG, and a job that trains after the first has succeeded.

    The run has one task on each host. Before its time limit, and when it is preempted, it saves a
    checkpoint and is requeued; it then resumes from that checkpoint.
    """
    checked = check(config, overrides, target, LAUNCH_ELSEWHERE if dry_run else LAUNCH)
    from graphtrain.launch import slurm as scheduler

    job = _job(checked, config, cache, workers)
    named_options = {"partition": partition, "account": account, "time": limit}
    options = {name: value for name, value in named_options.items() if value} | dict(
        map(_parse_name_value, further)
    )
    scripts = scheduler.make_scripts(job, options, warning=warning)
    if dry_run:
        click.echo(f"# {job.job_directory}/compile.sh\n{scripts.compile}")
        click.echo(
            f"# {job.job_directory}/run.sh, starts after compile.sh has succeeded\n{scripts.run}"
        )
        return
    job_ids = scheduler.submit(job, scripts)
    click.echo(f"compile: job {job_ids['compile']}")
    click.echo(f"run:     job {job_ids['run']}, starts after the compile job has succeeded")
    status_command = ["graphtrain", "launch", "status", *arguments(config, None, overrides)]
    click.echo(f"status:  {shlex.join(status_command)}\nlogs:    {job.job_directory}")


@command.command("kubernetes")
@config_argument
@target_option
@overrides_option
@cache_option
@workers_option
@click.option("--image", required=True, help="Container image in which graphtrain is installed.")
@click.option("--claim", required=True, help="Persistent volume claim that all pods share.")
@click.option("--namespace", help="Namespace of the JobSet. [default: that of kubectl]")
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
    """Print a JobSet that compiles CONFIG and then trains, for kubectl apply -f -."""
    checked = check(config, overrides, target, LAUNCH_ELSEWHERE)
    from graphtrain.launch.kubernetes import job_set

    job = _job(checked, config, cache, workers)
    click.echo(job_set(job, image=image, claim=claim, namespace=namespace), nl=False)


@command.command("status")
@config_argument
@overrides_option
def status(config: Path, overrides: Sequence[str]) -> None:
    """Show the state of the Slurm jobs of CONFIG, and the last step and loss of its run."""
    from graphtrain.config import load_config
    from graphtrain.launch.slurm import status
    from graphtrain.run.metrics import read_journal

    directory = Path(load_config(config, overrides, None).run.directory)
    for name, (job_id, state) in status(directory / "launch").items():
        click.echo(f"{name + ':':<9}job {job_id}, {state}")
    steps = [one for one in read_journal(directory) if one.get("loss") is not None]
    if steps:
        click.echo(f"step {steps[-1]['step']}, loss {steps[-1]['loss']:.4f}")


def _job(checked: "CheckedConfig", config: Path, cache: Path, workers: int) -> "Job":
    from graphtrain.launch.job import make_job

    words = arguments(config, checked.target, checked.overrides, cache)
    return make_job(checked.config, words, cache, workers)


def _parse_name_value(text: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    return name.lstrip("-"), value
