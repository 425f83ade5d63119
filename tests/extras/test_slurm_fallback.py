"""A Slurm job that may start on fewer hosts: the range of nodes, and the hosts that srun gets."""

import subprocess

import pytest

from graphtrain.config import load_config
from graphtrain.launch.job import make_job
from graphtrain.launch.slurm import make_scripts

CONFIG = """
[program]
target = "h100:32"
mesh = { data = "rest", fsdp = 8 }
model = { layers = 2, embed = 64, heads = 4, mlp = 96, vocab = 256 }
batch = { global_batch_size = 256, seq_len = 32, microbatches = 2 }

[run]
directory = "run"
steps = 10
data = { train = "data/train" }
fallback = [3, 2]
"""


@pytest.mark.parametrize(("allocated", "started"), [(5, 4), (4, 4), (3, 3), (2, 2)])
def test_a_slurm_job_may_have_the_hosts_of_the_fallback(allocated: int, started: int):
    job = make_job(load_config(CONFIG), ["config.toml"], "cache", 1)
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
