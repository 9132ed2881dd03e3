"""Files that start a training command on a cluster: one description of the job, one renderer per format."""

from collections.abc import Callable
from typing import NamedTuple

from toolkit_launch.docker import docker
from toolkit_launch.job import Job
from toolkit_launch.kubernetes import jobset, kubeflow
from toolkit_launch.ray import ray
from toolkit_launch.skypilot import skypilot
from toolkit_launch.slurm import slurm


class Format(NamedTuple):
    """A file format.

    Args:
        render: Returns the text of the file.
        options: The options of `toolkit launch` that have an effect.
        required: Those that must be given.
    """

    render: Callable[[Job], str]
    options: set[str]
    required: set[str] = set()


FORMATS = {
    "slurm": Format(slurm, {"image", "time", "shared_dir", "secrets"}),
    "kubeflow": Format(kubeflow, {"image", "shared_dir", "claim", "secrets"}, {"image"}),
    "jobset": Format(jobset, {"image", "shared_dir", "claim", "secrets"}, {"image"}),
    "skypilot": Format(skypilot, {"image", "spot", "secrets"}),
    "ray": Format(ray, {"shared_dir", "secrets"}),
    "docker": Format(docker, {"image", "shared_dir", "secrets"}, {"image"}),
}
