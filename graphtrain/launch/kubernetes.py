"""Kubernetes JobSet: a compile job, then a run job with one pod per host.

Source: JobSet v1alpha2 (jobset.sigs.k8s.io), dependsOn since 0.8; indexed Jobs, batch/v1.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import yaml

from graphtrain.cache.authentication import TRUSTED_CACHES
from graphtrain.launch.job import Job
from lowering.machine.machine_tables import VARIABLE

_PORT = 8476
_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"

# Statuses that a restart does not mend: an error of the user, a missing program, a broken device.
# Any other, such as that of a lost rank (75), of SIGTERM (143) or of a node, restarts the JobSet.
_FAILURE_POLICY = {
    "rules": [
        {
            "action": "FailJob",
            "onExitCodes": {
                "containerName": "graphtrain",
                "operator": "In",
                "values": [2, 3, 76],
            },
        }
    ]
}


def job_set(job: Job, *, image: str, claim: str, namespace: str | None = None) -> str:
    """Return the manifest as YAML.

    Args:
        job: The run and its compilation.
        image: Container image in which graphtrain is installed.
        claim: Persistent volume claim that all pods share. It is mounted at the current directory
            and contains the configuration, the cache, the data and the run directory.
        namespace: Namespace of the JobSet; None for that of kubectl.
    """
    name = re.sub(r"[^a-z0-9-]+", "-", job.name.lower()).strip("-") or "run"
    coordinator = f"{name}-run-0-0.{name}"  # pod 0 of job 0, in the JobSet's headless service
    env = [
        {"name": "GRAPHTRAIN_COORDINATOR", "value": f"{coordinator}:{_PORT}"},
        {"name": "GRAPHTRAIN_PROCESSES", "value": str(job.hosts)},
        {"name": "GRAPHTRAIN_RANK", "valueFrom": {"fieldRef": {"fieldPath": _INDEX}}},
    ]
    compile_spec = _pods(job, "compile", image, claim, count=job.workers)
    run_spec = _pods(job, "run", image, claim, count=job.hosts)
    container = run_spec["template"]["spec"]["containers"][0]
    if job.hosts > 1:
        container["env"] += env
        container["ports"] = [{"containerPort": _PORT}]
    container["resources"] = _resources(job)
    if job.shared_memory_per_host:
        # The default of a container is 64 MB. It counts as memory of the pod.
        limit = f"{job.shared_memory_per_host >> 20}Mi"
        run_spec["template"]["spec"]["volumes"].append(
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": limit}}
        )
        container["volumeMounts"].append({"name": "shm", "mountPath": "/dev/shm"})
    run_spec["podFailurePolicy"] = _FAILURE_POLICY
    manifest = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name, **({"namespace": namespace} if namespace else {})},
        "spec": {
            "network": {"enableDNSHostnames": True},
            # A run that was evicted, or that lost a rank, resumes from its checkpoint.
            "failurePolicy": {
                "maxRestarts": 100,
                "rules": [
                    {"action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]},
                ],
            },
            "replicatedJobs": [
                {"name": "compile", "replicas": 1, "template": {"spec": compile_spec}},
                {
                    "name": "run",
                    "replicas": 1,
                    "dependsOn": [{"name": "compile", "status": "Complete"}],
                    "template": {"spec": run_spec},
                },
            ],
        },
    }
    return yaml.safe_dump(manifest, sort_keys=False)


def _resources(job: Job) -> dict[str, Any]:
    """Return what a pod of the run requests, and the limits that Kubernetes requires."""
    memory = f"{-(-job.memory_per_host >> 20)}Mi"
    gpus = {"nvidia.com/gpu": job.gpus_per_host} if job.gpus_per_host else {}
    return {
        "requests": {"cpu": str(job.cores_per_host), "memory": memory, **gpus},
        **({"limits": gpus} if gpus else {}),
    }


def _pods(job: Job, verb: str, image: str, claim: str, *, count: int) -> dict[str, Any]:
    """Return the specification of an indexed Job of `count` pods that run the command `verb`."""
    working_directory = Path.cwd()
    machines_file = filter(None, [os.environ.get(VARIABLE)])  # else targets.toml in this directory
    container = {
        "name": "graphtrain",
        "image": image,
        "command": job.command("python", verb),
        # A pod has no home, and so no secret that would prove who compiled a program.
        "env": [
            {"name": TRUSTED_CACHES, "value": str(working_directory / job.cache)},
            *({"name": VARIABLE, "value": os.path.abspath(file)} for file in machines_file),
        ],
        "workingDir": str(working_directory),
        "volumeMounts": [{"name": "shared", "mountPath": str(working_directory)}],
    }
    return {
        "parallelism": count,
        "completions": count,
        "completionMode": "Indexed",
        "backoffLimit": 0,  # the JobSet restarts all pods together
        "template": {
            "spec": {
                "restartPolicy": "Never",
                "terminationGracePeriodSeconds": 300,
                "containers": [container],
                "volumes": [{"name": "shared", "persistentVolumeClaim": {"claimName": claim}}],
            }
        },
    }
