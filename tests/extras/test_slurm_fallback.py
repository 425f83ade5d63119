"""A Slurm job that may start on fewer hosts: the range of nodes, and the hosts that srun gets."""

import subprocess
from pathlib import Path

import pytest
from fallback_config import config

from graphtrain.launch.job import make_job
from graphtrain.launch.slurm import make_scripts


@pytest.mark.parametrize(("allocated", "started"), [(5, 4), (4, 4), (3, 3), (2, 2)])
def test_a_slurm_job_may_have_the_hosts_of_the_fallback(allocated: int, started: int):
    job = make_job(config(), ["config.toml"], Path("cache"), 1)
    script = make_scripts(job, {}).run
    assert "--nodes               2-4\n" in script
    chosen = script[script.index("for hosts") : script.index("status=$?")]
    assert hosts_of(chosen, allocated) == started


def hosts_of(script: str, allocated: int) -> int:
    """The number of hosts on which srun starts the run, with so many allocated."""
    stand_in = 'srun() { echo "$1 $2"; }\n'
    answer = subprocess.run(
        ["bash", "-c", stand_in + script],
        env={"SLURM_JOB_NUM_NODES": str(allocated)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    (hosts,) = {word.rpartition("=")[2] for word in answer}
    return int(hosts)
