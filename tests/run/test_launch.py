"""Scripts for schedulers, and a real Slurm of two nodes on this machine."""

import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from places import CUBE, Place

TWO = ["--target", "cpu:2x4", *CUBE[2:]]
DAEMONS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scontrol")

needs_slurm = pytest.mark.skipif(
    not all(map(shutil.which, DAEMONS)) or os.geteuid() != 0,
    reason="needs root and apt-get install slurm-wlm munge",
)


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The configuration of a Slurm that runs until the tests end.

    It starts requeued jobs after 6 s, others after 121 s (cred_expire is 120 s by default). So
    KillWait must be less than MessageTimeout (10 s): a request to end a step that is not answered
    in that time is sent again after a minute, and would end the step of the same number of the
    requeued job.
    """
    path = tmp_path_factory.mktemp("slurm")
    for name in ("/run/munge", "/var/lib/munge", "/var/log/munge"):
        os.makedirs(name, exist_ok=True)
        shutil.chown(name, "munge", "munge")
    subprocess.run(["su", "-s", "/bin/sh", "munge", "-c", "/usr/sbin/munged"], capture_output=True)
    control, one, two = free_ports(3)
    configuration = path / "slurm.conf"
    nodes = "".join(
        f"NodeName={name} NodeHostname=localhost NodeAddr=127.0.0.1 Port={port} CPUs=4 "
        "RealMemory=8000\n"
        for name, port in (("n1", one), ("n2", two))
    )
    configuration.write_text(
        f"""ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={control}
SlurmUser=root
SlurmdParameters=config_overrides
AuthInfo=cred_expire=5
KillWait=5
SchedulerParameters=bf_interval=1,sched_interval=1
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SlurmdSpoolDir={path}/spool-%n
StateSaveLocation={path}/state
SlurmctldPidFile={path}/slurmctld.pid
SlurmdPidFile={path}/slurmd-%n.pid
{nodes}PartitionName=all Nodes=n1,n2 Default=YES State=UP
"""
    )
    os.environ["SLURM_CONF"] = str(configuration)
    for name in ("state", "spool-n1", "spool-n2"):
        (path / name).mkdir()
    for words in (["slurmctld"], ["slurmd", "-N", "n1"], ["slurmd", "-N", "n2"]):
        subprocess.run([words[0], "-f", str(configuration), *words[1:]], check=True)
    yield configuration
    for pid in path.glob("*.pid"):
        subprocess.run(["kill", pid.read_text().strip()])
    del os.environ["SLURM_CONF"]


@pytest.fixture
def cluster(slurm: Path, place: Place, monkeypatch: pytest.MonkeyPatch) -> Place:
    """A place whose jobs find each other; the nodes' names mean nothing to the resolver."""
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", f"127.0.0.1:{free_ports(1)[0]}")
    return place


def launched(place: Place, *words: str) -> str:
    """The number of the run job."""
    out, _ = place.command("launch", "slurm", "config.toml", *TWO, *words)
    number = re.search(r"run: +job (\d+)", out)
    assert number is not None
    return number[1]


def wait_until(done, place: Place) -> None:
    deadline = time.monotonic() + 240
    while not done():
        logs = "\n".join(log.read_text() for log in place.path.glob("run/launch/*.log"))
        assert time.monotonic() < deadline, logs
        time.sleep(0.5)


def states(place: Place) -> str:
    return place.command("launch", "status", "config.toml")[0]


def test_a_directory_with_a_space_is_one_word_to_sbatch(cold: Place):
    words = ["--set", 'run.directory="my run"', "--dry-run"]
    out, _ = cold.command("launch", "slurm", "config.toml", *words)
    assert re.search(r'^#SBATCH --output +"my run/launch/run-%j.log"$', out, re.M)


def test_what_names_no_jobs_is_said(cold: Place):
    jobs = cold.path / "run/launch/jobs.json"
    jobs.parent.mkdir(parents=True)
    jobs.write_text("[]")
    _, err = cold.command("launch", "status", "config.toml", status=2)
    assert "run/launch/jobs.json does not contain the ids of launched jobs" in err


@needs_slurm
def test_a_compile_job_and_a_run_job_train_as_one_process_does(cluster: Place):
    launched(cluster, "--workers", "2")
    wait_until(lambda: states(cluster).count(", completed") == 2, cluster)
    assert "step 16, loss " in states(cluster)
    cluster.command("run", "config.toml", *CUBE, "--set", "run.directory=alone")
    for mine, other in zip(cluster.curve(), cluster.curve("alone"), strict=True):
        assert mine == pytest.approx(other, rel=1e-5)


@needs_slurm
def test_a_run_that_is_asked_to_stop_is_queued_again_and_goes_on(cluster: Place):
    # At a rate so low that rounding, which differs between processes, does not grow.
    long = ["--set", "run.steps=200", "--set", "run.checkpoints.local_every=1000"]
    long += ["--set", "run.learning_rate.peak=1e-4"]
    number = launched(cluster, *long)
    wait_until(lambda: len(cluster.curve()) > 5, cluster)
    subprocess.run(["scancel", "--signal=TERM", number], check=True)
    wait_until(lambda: "run:     job " + number + ", completed" in states(cluster), cluster)
    (log,) = cluster.path.glob("run/launch/run-*.log")
    assert "stopped by SIGTERM after step" in log.read_text()
    assert "trained 200 steps (resumed from" in log.read_text()
    cluster.command("run", "config.toml", *CUBE, *long, "--set", "run.directory=alone")
    together, alone = cluster.curve(), cluster.curve("alone")
    assert [step for step, _, _ in together] == list(range(1, 201))
    assert [loss for _, loss, _ in together] == pytest.approx([one[1] for one in alone], rel=1e-4)


ENDING_RANK = """
import os, signal, sys, time
restart, rank = int(os.environ.get("SLURM_RESTART_COUNT", 0)), int(os.environ["SLURM_PROCID"])
print(f"start {restart} of rank {rank}", flush=True)
time.sleep(1 - rank)  # rank 1 ends first, as the others notice it later
if restart == 0 and rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
sys.exit([75, 75, 2][restart])
"""


@needs_slurm
def test_the_script_queues_a_job_again_after_a_killed_or_lost_rank_and_not_after_an_error(
    cold: Place, slurm: Path
):
    out, _ = cold.command("launch", "slurm", "config.toml", *TWO, "--dry-run")
    running = out[out.index("#!", out.index("# run/launch/run.sh")) :]
    (cold.path / "rank.py").write_text(ENDING_RANK)
    script, number = re.subn(r"\S+ -m graphtrain run .*", f"{sys.executable} rank.py", running)
    assert number == 1
    (cold.path / "run/launch").mkdir(parents=True)
    (cold.path / "run.sh").write_text(script)
    submitted = ["sbatch", "--parsable", "--chdir", str(cold.path), str(cold.path / "run.sh")]
    job = subprocess.run(submitted, check=True, capture_output=True, text=True).stdout.strip()
    wait_until(lambda: "JobState=FAILED" in job_of(job), cold)
    (log,) = cold.path.glob("run/launch/run-*.log")
    starts = re.findall(r"^start (\d) of rank 1$", log.read_text(), re.M)
    assert starts == ["0", "1", "2"] and "ExitCode=2:0" in job_of(job)


def job_of(number: str) -> str:
    return subprocess.run(
        ["scontrol", "show", "job", number], capture_output=True, text=True, check=True
    ).stdout


def test_the_scripts_can_be_read_without_slurm(place: Place):
    words = [*TWO, "--workers", "3", "--time", "60", "--sbatch", "qos=high", "--dry-run"]
    out, _ = place.command("launch", "slurm", "config.toml", *words)
    compiling, _, running = out.partition("# run/launch/run.sh")
    asked = dict(re.findall(r"#SBATCH --(\S+) +(\S+)", running))
    assert asked["nodes"] == "2" and asked["ntasks-per-node"] == "1" and asked["qos"] == "high"
    assert asked["signal"] == "TERM@300" and asked["time"] == "60"
    assert asked["cpus-per-task"] == "4" and int(asked["mem"].removesuffix("M")) >= 4096
    assert "exclusive" not in asked  # only a host whose accelerators are all used
    assert "case $status in 143) requeue;; 75|134|135|137|139) " in running
    assert re.search(r"#SBATCH --array +0-2\n", compiling)
    assert "graphtrain run config.toml --target cpu:2x4" in running
    assert not (place.path / "run").exists()


def test_a_job_of_all_gpus_of_a_host_asks_for_its_cores_and_memory(place: Place):
    words = ["--target", "h100:16", "--set", "program.batch.global_batch_size=16", "--dry-run"]
    out, _ = place.command("launch", "slurm", "config.toml", *words)
    asked = dict(re.findall(r"#SBATCH --(\S+) *(\S*)", out.partition("# run/launch/run.sh")[2]))
    assert asked["cpus-per-task"] == "64" and asked["gpus-per-node"] == "8" and "exclusive" in asked
    assert int(asked["mem"].removesuffix("M")) << 20 > 8 * 80e9
    assert "srun --kill-on-bad-exit=0 --wait=150 --cpus-per-task=64" in out


def test_an_option_that_sbatch_does_not_have_is_refused(place: Place):
    words = ["--sbatch", "qso=high", "--dry-run"]
    _, err = place.command("launch", "slurm", "config.toml", *words, status=2)
    assert "error: --sbatch qso=high: not an option of sbatch" in err


def test_a_slice_is_left_to_its_own_scheduler(place: Place):
    words = ["--target", "v5e:4x4", "--set", "program.batch.global_batch_size=16", "--dry-run"]
    _, err = place.command("launch", "slurm", "config.toml", *words, status=2)
    assert "the scheduler of the TPU slice determines its hosts" in err


def test_nothing_launched_has_no_status(place: Place):
    _, err = place.command("launch", "status", "config.toml", status=2)
    assert "run/launch/jobs.json does not exist: no Slurm job was launched" in err


def test_a_job_set_runs_one_pod_a_host_once_the_programs_are_there(place: Place):
    words = ["--target", "h100:16", "--set", "program.batch.global_batch_size=16"]
    words += ["--image", "registry.example/graphtrain:1", "--claim", "shared", "--workers", "4"]
    out, _ = place.command("launch", "kubernetes", "config.toml", *words)
    compiling, running = yaml.safe_load(out)["spec"]["replicatedJobs"]
    assert running["dependsOn"] == [{"name": "compile", "status": "Complete"}]
    assert compiling["template"]["spec"]["completions"] == 4
    pods = running["template"]["spec"]
    assert (pods["completionMode"], pods["completions"], pods["parallelism"]) == ("Indexed", 2, 2)
    (container,) = pods["template"]["spec"]["containers"]
    told = {one["name"]: one.get("value") for one in container["env"]}
    assert told["GRAPHTRAIN_COORDINATOR"] == "run-run-0-0.run:8476"
    assert told["GRAPHTRAIN_PROCESSES"] == "2"
    assert told["GRAPHTRAIN_TRUSTED_CACHES"] == str(place.cache)  # pods share no secret
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}
    assert container["resources"]["requests"]["cpu"] == "64"
    assert int(container["resources"]["requests"]["memory"].removesuffix("Mi")) << 20 > 8 * 80e9
    assert {"name": "shm", "mountPath": "/dev/shm"} in container["volumeMounts"]
    assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "8192Mi"}} in pods[
        "template"
    ]["spec"]["volumes"]
    (rule,) = pods["podFailurePolicy"]["rules"]
    assert rule["action"] == "FailJob"
    assert not {75, 143} & set(rule["onExitCodes"]["values"])  # these restart the JobSet
    assert container["command"][:5] == ["python", "-m", "graphtrain", "run", "config.toml"]
