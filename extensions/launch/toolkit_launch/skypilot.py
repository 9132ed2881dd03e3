"""A task for SkyPilot, which finds machines in a cloud and replaces those that are preempted."""

from toolkit.escape import to_yaml
from toolkit.version import __version__
from toolkit_launch.job import Job


def skypilot(job: Job) -> str:
    """Return the task. toolkit reads the nodes from SKYPILOT_*."""
    resources: dict[str, object] = {}
    if job.has_gpus and job.gpu is not None:
        resources["accelerators"] = f"{job.gpu.replace(' ', '')}:{job.devices}"  # such as RTX4090
    if job.image is not None:
        resources["image_id"] = f"docker:{job.image}"
    if job.spot:
        # 128 + SIGUSR1 or SIGTERM: a checkpoint was saved. SkyPilot detects lost machines itself.
        resources |= {"use_spot": True, "job_recovery": {"recover_on_exit_codes": [138, 143]}}
    setup = {} if job.image else {"setup": f"pip install 'fabric-toolkit-lm[remote]=={__version__}'"}
    task = {"name": job.name, "num_nodes": job.nodes, "resources": resources}
    task |= {"secrets": dict.fromkeys(job.secrets)} if job.secrets else {}
    secrets = "".join(f" --secret {name}" for name in job.secrets)
    header = job.header(f"Start: sky jobs launch{secrets} FILE")
    return header + to_yaml(task | setup | {"run": f"{job.shell()}\n"})
