"""Slurm: a compile job, and a run job that starts after it has succeeded.

simple_slurm writes the scripts and checks the names of the options; sbatch submits them.
"""

from __future__ import annotations

import contextlib
import io
import json
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graphtrain.errors import LaunchError
from graphtrain.files import validate
from graphtrain.launch.job import Job
from lowering.errors import PeerLost
from lowering.machine.extras import optional_import
from sharding_rules.documents import read_json

_JOBS = "jobs.json"
_STATUS_SIGTERM = 143  # exit status of a graphtrain run that saved a checkpoint on SIGTERM
# Exit statuses of srun when a rank has ended by SIGABRT, SIGBUS, SIGKILL or SIGSEGV.
_STATUSES_CRASHED = (134, 135, 137, 139)
# Seconds from the end of the first rank until srun ends the others, if they have not ended
# themselves: longer than the watchdog takes to name a lost rank.
_WAIT_FOR_RANKS = 150
# Requeues after a rank was lost or stalled; a run that never gets further must end some time.
_MAX_REQUEUES = 100


@dataclass(frozen=True)
class Scripts:
    """Job scripts for sbatch."""

    compile: str
    run: str


def make_scripts(job: Job, options: Mapping[str, str], *, warning: int = 300) -> Scripts:
    """Return the scripts of the compile job and of the run job.

    Args:
        job: The run and its compilation.
        options: Additional sbatch options for both jobs, by name.
        warning: Seconds before the time limit at which Slurm sends SIGTERM, so that the run saves
            a checkpoint.

    Raises:
        LaunchError: an sbatch option does not exist.
        MissingExtra: simple_slurm is not installed.
    """
    compile_options = {
        "job-name": f"{job.name}-compile",
        "output": str(job.job_directory / "compile-%j.log"),
        "ntasks": "1",
        **({"array": f"0-{job.workers - 1}"} if job.workers > 1 else {}),
    }
    run_options = {
        "job-name": job.name,
        "output": str(job.job_directory / "run-%j.log"),
        "open-mode": "append",
        "nodes": "-".join(map(str, [*job.fallback[-1:], job.hosts])),
        "ntasks-per-node": "1",
        "signal": f"TERM@{warning}",
        "cpus-per-task": str(job.cores_per_host),
        "mem": f"{-(-job.memory_per_host >> 20)}M",
        **({"gpus-per-node": str(job.gpus_per_host)} if job.gpus_per_host else {}),
        **({"exclusive": ""} if job.is_exclusive else {}),
    }
    cd_command = f"cd {shlex.quote(str(Path.cwd()))}"
    compile_command = shlex.join(job.command(sys.executable, "compile"))
    # srun does not take over the job's number of cores for each task by itself (since 22.05).
    cores = f"--cpus-per-task={options.get('cpus-per-task', job.cores_per_host)}"
    # If srun ended the other ranks at once, by SIGTERM, they would neither name the lost rank nor
    # end with the status of an error: srun reports the highest status, and 143 requeues the job.
    ending = ("--kill-on-bad-exit=0", f"--wait={_WAIT_FOR_RANKS}")
    run_command = shlex.join([*ending, cores, *job.command(sys.executable, "run")])
    return Scripts(
        compile=_script(compile_options | dict(options), [cd_command, f"exec {compile_command}"]),
        run=_script(
            # Slurm requeues a job by itself only on preemption. A run that saved before its time
            # limit, or that lost a rank, requeues itself and resumes from its checkpoint.
            run_options | {"requeue": ""} | dict(options),
            [
                cd_command,
                *_start(job, run_command),
                "status=$?",
                'requeue() { scontrol requeue "$SLURM_JOB_ID"; }',
                f"case $status in {_STATUS_SIGTERM}) requeue;; "
                f"{'|'.join(map(str, (PeerLost.exit_status, *_STATUSES_CRASHED)))}) "
                f'[ "${{SLURM_RESTART_COUNT:-0}}" -ge {_MAX_REQUEUES} ] || requeue;; esac',
                'exit "$status"',
            ],
        ),
    )


def _start(job: Job, run_command: str) -> list[str]:
    """Return the lines that start a run, on as many of its possible hosts as there are."""
    if not job.fallback:
        return [f"srun {run_command}"]
    counts = " ".join(map(str, (job.hosts, *job.fallback)))
    return [
        f'for hosts in {counts}; do [ "$SLURM_JOB_NUM_NODES" -lt "$hosts" ] || break; done',
        f'srun --nodes="$hosts" --ntasks="$hosts" {run_command}',
    ]


def _script(options: Mapping[str, str], commands: list[str]) -> str:
    for name, value in options.items():
        if not f"{name}{value}".isprintable():  # a line break would end the #SBATCH line
            raise LaunchError(f"--sbatch {name}={value!r}: a control character is not allowed")
    with optional_import("a Slurm script"):
        from simple_slurm import Slurm

    script = Slurm()
    script.set_shell("/bin/bash")
    for name, value in options.items():
        stderr = io.StringIO()
        try:
            with contextlib.redirect_stderr(stderr):
                quoted = f'"{value}"' if " " in value else value  # quoting of #SBATCH lines
                script.add_arguments(name.replace("-", "_"), quoted)
        except SystemExit:
            reason = stderr.getvalue().strip().rpartition("error: ")[2]
            raise LaunchError(
                f"--sbatch {name}={value}: not an option of sbatch ({reason})"
            ) from None
    for command in commands:
        script.add_cmd(command)
    return script.script(convert=False)


def submit(job: Job, scripts: Scripts) -> dict[str, Any]:
    """Submit both jobs and write their ids to the job directory.

    Returns:
        The job ids, under "compile" and "run".

    Raises:
        LaunchError: sbatch is not installed on this machine, or rejects a script.
    """
    job.job_directory.mkdir(parents=True, exist_ok=True)
    for name, text in (("compile", scripts.compile), ("run", scripts.run)):
        (job.job_directory / f"{name}.sh").write_text(text)
    compile_id = _sbatch(job.job_directory / "compile.sh")
    run_id = _sbatch(
        job.job_directory / "run.sh",
        f"--dependency=afterok:{compile_id}",
        "--kill-on-invalid-dep=yes",
    )
    job_ids = {"compile": compile_id, "run": run_id}
    (job.job_directory / _JOBS).write_text(json.dumps(job_ids) + "\n")
    return job_ids


def status(directory: Path) -> dict[str, tuple[int, str]]:
    """Return the id and state of each job that was submitted from a directory, by name.

    Raises:
        LaunchError: no job was submitted, or Slurm is not installed on this machine.
    """
    path = directory / _JOBS
    if not path.exists():
        raise LaunchError(
            f"{path} does not exist: no Slurm job was launched for this run; submit one with "
            "graphtrain launch slurm"
        )
    try:
        job_ids = validate(dict[str, int], read_json(path))
    except (OSError, ValueError) as error:
        raise LaunchError(f"{path} does not contain the ids of launched jobs: {error}") from None
    return {name: (job_id, _state(job_id)) for name, job_id in job_ids.items()}


def _state(job_id: int) -> str:
    """Return the state of a job from squeue, else from scontrol, which keeps it for minutes."""
    squeue = _slurm("squeue", "--noheader", "--jobs", str(job_id), "--format", "%T %r")
    states = sorted(set(squeue.stdout.split("\n")) - {""})
    if squeue.returncode == 0 and states:
        return ", ".join(state.replace(" None", "").lower() for state in states)
    scontrol = _slurm("scontrol", "show", "job", str(job_id))
    if scontrol.returncode:
        return "ended; Slurm no longer has its state"
    final_states = {
        word.removeprefix("JobState=").lower()
        for word in scontrol.stdout.split()
        if word.startswith("JobState=")
    }
    return ", ".join(sorted(final_states))


def _sbatch(script: Path, *options: str) -> int:
    result = _slurm("sbatch", "--parsable", *options, str(script))
    if result.returncode:
        raise LaunchError(f"sbatch rejected {script}: {result.stderr.strip()}")
    return int(result.stdout.strip().partition(";")[0])


def _slurm(*command: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        raise LaunchError(
            f"{command[0]} is not installed on this machine; run this where Slurm's commands are, "
            "or use --dry-run"
        ) from None
