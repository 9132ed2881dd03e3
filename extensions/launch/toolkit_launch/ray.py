"""A driver script for Ray Train, by extensions/ray."""

from pprint import pformat

from toolkit_launch.job import MAX_RESTARTS, Job

_SCRIPT = """\
{header}import os

import ray
from ray.train import FailureConfig, RunConfig
from toolkit_ray import train

ray.init(runtime_env={{"env_vars": {{name: os.environ[name] for name in {secrets}}}}})
train(
    {words},
    num_workers={workers},
    resources={resources},
    run_config=RunConfig(failure_config=FailureConfig(max_failures={restarts})),
)
"""


def ray(job: Job) -> str:
    """Return the script. Ray starts one worker per device."""
    names = "".join(f" {name}" for name in job.secrets)
    before = [f"Needs in its environment:{names}"] if names else []
    return _SCRIPT.format(
        header=job.header(*before, "Start on the cluster: python FILE"),
        secrets=[*job.secrets],
        words=pformat([*job.command[1:]], width=110, compact=True).replace("\n", "\n    "),
        workers=job.nodes * job.devices,
        resources={"GPU" if job.has_gpus else "CPU": 1},
        restarts=MAX_RESTARTS,
    )
