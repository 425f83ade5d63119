"""Kubernetes JobSet: a compile job, then a run job with one pod per host.

Source: JobSet v1alpha2 (jobset.sigs.k8s.io), dependsOn since 0.8; indexed Jobs, batch/v1.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from graphtrain.cache.authentication import TRUSTED_CACHES
from graphtrain.launch.job import Job

_PORT = 8476
_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"


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
    if job.gpus_per_host:
        container["resources"] = {"limits": {"nvidia.com/gpu": job.gpus_per_host}}
    manifest = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name, **({"namespace": namespace} if namespace else {})},
        "spec": {
            "network": {"enableDNSHostnames": True},
            # An evicted run resumes from its checkpoint.
            "failurePolicy": {"maxRestarts": 100},
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


def _pods(job: Job, verb: str, image: str, claim: str, *, count: int) -> dict[str, Any]:
    """Return the specification of an indexed Job of `count` pods that run the command `verb`."""
    working_directory = Path.cwd()
    container = {
        "name": "graphtrain",
        "image": image,
        "command": job.command("python", verb),
        # A pod has no home, and so no secret that would prove who compiled a program.
        "env": [{"name": TRUSTED_CACHES, "value": str(working_directory / job.cache)}],
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
