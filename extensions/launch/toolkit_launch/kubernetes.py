"""Kubernetes: a JobSet, or Kubeflow's TrainJob and its runtime, whose template is a JobSet's."""

from typing import Any

from toolkit.escape import kubernetes_word, to_yaml
from toolkit_launch.job import GRACE_S, MAX_RESTARTS, PORT, Job

_NODE = "node"  # of the replicated job and its container; Kubeflow requires the name
_FINAL_EXIT_CODES = [2, 3]  # a user error, a guard

Values = dict[str, Any]


def jobset(job: Job) -> str:
    """Return a JobSet. The node rank is the pod's completion index, which Kubernetes sets in the environment."""
    address = {"MASTER_ADDR": f"{job.name}-{_NODE}-0-0.{job.name}", "MASTER_PORT": str(PORT)}
    container = _container(
        job, {"command": [*map(kubernetes_word, job.command)]} | ({"resources": _gpus(job)} if job.has_gpus else {})
    )
    container["env"] += [{"name": name, "value": value} for name, value in address.items()]
    pods = {"completionMode": "Indexed", "parallelism": job.nodes, "completions": job.nodes}
    spec = {"network": {"enableDNSHostnames": True}} | _job_set(job, {}, pods, container)
    return _header(job) + to_yaml(_object("jobset.x-k8s.io/v1alpha2", "JobSet", job, spec))


def kubeflow(job: Job) -> str:
    """Return the TrainJob, and the ClusterTrainingRuntime that it refers to. Kubeflow sets PET_* in the pods."""
    api = "trainer.kubeflow.org"
    labels = {"metadata": {"labels": {f"{api}/trainjob-ancestor-step": "trainer"}}}
    template = {"spec": _job_set(job, labels, {}, _container(job, {}))}
    runtime = {"mlPolicy": {"numNodes": job.nodes, "torch": {}}, "template": template}
    trainer: Values = {
        "numNodes": job.nodes,
        "numProcPerNode": job.devices,
        "command": [*map(kubernetes_word, job.command)],
    }
    if job.has_gpus:
        trainer["resourcesPerNode"] = _gpus(job)
    reference = {"apiGroup": api, "kind": "ClusterTrainingRuntime", "name": job.name}
    return _header(job) + to_yaml(
        _object(f"{api}/v1alpha1", "ClusterTrainingRuntime", job, runtime),
        _object(f"{api}/v1alpha1", "TrainJob", job, {"runtimeRef": reference, "trainer": trainer}),
    )


def _object(api: str, kind: str, job: Job, spec: Values) -> Values:
    return {"apiVersion": api, "kind": kind, "metadata": {"name": job.name}, "spec": spec}


def _container(job: Job, work: Values) -> Values:
    """Return the container. ``work``: command and resources, which Kubeflow has elsewhere."""
    mounts = {"shm": "/dev/shm"} | ({"shared": job.shared_dir} if job.claim else {})
    return {
        "name": _NODE,
        "image": job.image,
        **work,
        "env": [{"name": name, "valueFrom": {"secretKeyRef": {"name": job.name, "key": name}}} for name in job.secrets],
        "volumeMounts": [{"name": name, "mountPath": path} for name, path in mounts.items()],
    }


def _gpus(job: Job) -> Values:
    gpus = {"nvidia.com/gpu": str(job.devices)}
    return {"requests": gpus, "limits": gpus}


def _job_set(job: Job, template: Values, pods: Values, container: Values) -> Values:
    """Return the JobSet's spec: if a pod fails, all are started again, except for exit codes that would recur.

    ``template`` and ``pods`` are further fields of the job's template and of its spec.
    """
    # 64 MB, the default of /dev/shm, are too little for data loading workers and NCCL
    volumes: list[Values] = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    if job.claim is not None:
        volumes.append({"name": "shared", "persistentVolumeClaim": {"claimName": job.claim}})
    exit_codes = {"containerName": _NODE, "operator": "In", "values": _FINAL_EXIT_CODES}
    pod = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": GRACE_S,
        "containers": [container],
        "volumes": volumes,
    }
    spec = {
        **pods,
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": exit_codes}]},
        "template": {"spec": pod},
    }
    final = {"name": "finalExitCode", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    return {
        "failurePolicy": {"maxRestarts": MAX_RESTARTS, "rules": [final]},
        "replicatedJobs": [{"name": _NODE, "template": template | {"spec": spec}}],
    }


def _header(job: Job) -> str:
    values = "".join(f' --from-literal={name}="${name}"' for name in job.secrets)
    secret = [f"Before: kubectl create secret generic {job.name}{values}"] if values else []
    logs = f"Watch: kubectl logs -f -l jobset.sigs.k8s.io/jobset-name={job.name} --max-log-requests {job.nodes}"
    return job.header(*secret, "Start: kubectl apply -f FILE", logs)
