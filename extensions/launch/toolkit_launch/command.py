"""`toolkit launch`: a file that starts a training command on a cluster."""

import os
import re
from pathlib import Path
from typing import Literal

from toolkit.config import AUTO, RunOptions
from toolkit.distributed.gpus import find_gpu
from toolkit.distributed.restarts import resuming
from toolkit.errors import UserError, option_text
from toolkit.extension import CommandLine, load_single
from toolkit.io.paths import is_url
from toolkit.planning.training_options import TrainingOptions
from toolkit_launch.formats import FORMATS
from toolkit_launch.job import Job


def setup(
    format: Literal["slurm", "kubeflow", "jobset", "skypilot", "ray", "docker"],
    training: CommandLine,
    out: str | None = None,
    name: str | None = None,
    gpu: str | None = None,
    shared_dir: str | None = None,
    claim: str | None = None,
    image: str | None = None,
    secrets: str | None = None,
    time: str | None = None,
    spot: bool = False,
) -> None:
    """Write a file that starts a training command on a cluster. Starts nothing.

    Put the command after two dashes:

    toolkit launch slurm --shared_dir /shared -- pretrain pythia-160m --devices 8 --num_nodes 2 --out_dir /shared/run

    The command is checked as toolkit plan checks it. Its --num_nodes and --devices are the size of the job. The file's
    command has --resume auto: started again, it continues from the latest checkpoint.

    Args:
        format: The system that starts the job.
        training: The training command.
        out: The file. Default: standard output.
        name: Name of the job. Default: the name of the training command.
        gpu: GPU, such as H100. The planned memory must fit, and SkyPilot requests it.
        shared_dir: Folder on storage that all nodes share. Containers see it under the same path.
        claim: Persistent volume claim of Kubernetes that is mounted as --shared_dir.
        image: Container image that has toolkit.
        secrets: Names of environment variables that the job needs, separated by commas, such as HF_TOKEN.
        time: Time limit of SLURM, after which the job is requeued. Default: 24:00:00.
        spot: Use machines that may be preempted, and continue on others.
    """
    given = {"image": image, "shared_dir": shared_dir, "claim": claim, "secrets": secrets, "time": time, "spot": spot}
    for option, value in given.items():
        if value and option not in FORMATS[format].options:
            raise UserError(f"--{option} {value}: has no effect with {format}; remove it")
        if not value and option in FORMATS[format].required:
            raise UserError(f"--{option}: must be given with {format}")
    if "claim" in FORMATS[format].options and (claim is None) != (shared_dir is None):
        raise UserError("--shared_dir PATH, --claim NAME: must be given together; add the other one")
    if time is not None and not re.fullmatch(r"[\d:-]+", time):
        raise UserError(f"--time {time}: must be a time of SLURM, such as 24:00:00 or 2-00:00:00")
    name = name or training.options.command.replace("_", "-")
    if not re.fullmatch(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?", name):
        raise UserError(f"--name {name}: must be up to 40 lowercase letters, digits and hyphens, such as my-run")
    if image is not None and not re.fullmatch(r"[\w./:@+-]+", image):
        raise UserError(f"--image {image}: must be the name of an image, such as registry/toolkit:1")
    names = [] if secrets is None else secrets.split(",")
    if not all(re.fullmatch(r"[A-Za-z_]\w*", secret) for secret in names):  # do not show it: it may be a value
        raise UserError("--secrets: must be names of environment variables, such as HF_TOKEN,WANDB_API_KEY")
    shared = training.options.shared
    has_gpus = shared.accelerator != "cpu"
    if gpu is not None and ":" in gpu:
        gpu, _, count = gpu.partition(":")
        raise UserError(f"--gpu {gpu}:{count}: use --gpu {gpu}, and --devices {count} after --")
    if has_gpus and gpu is None and format == "skypilot":
        raise UserError("--gpu: must be given with skypilot, such as --gpu H100")
    _check_training(shared, has_gpus, format, has_resume=any(re.match("--resume(=|$)", w) for w in training.words))
    _check_out_dir(training.options.out_dir, shared_dir, format)
    if format in ("kubeflow", "jobset", "skypilot", "docker"):  # the others start the command in this folder
        _check_paths(training.words)
    nodes, devices = (1 if value == AUTO else value for value in (shared.num_nodes, shared.devices))
    job = Job(
        name,
        ("toolkit", *resuming(training.words)),
        nodes,
        devices,
        has_gpus,
        f"{nodes} x {devices} {'GPUs' if has_gpus else 'processes on CPUs'}, {_planned_memory(training.options, gpu)}",
        gpu,
        image,
        time,
        shared_dir,
        claim,
        tuple(names),
        spot,
    )
    text = FORMATS[format].render(job)
    if out is None:
        print(text, end="")
        return
    try:
        Path(out).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--out {out}: {error.strerror}") from error


def _check_training(shared: RunOptions, has_gpus: bool, format: str, has_resume: bool) -> None:
    """Check that the command has the size of the job, and that the file can continue it."""
    if has_gpus and shared.devices == AUTO:
        raise UserError("--devices auto: the file needs the GPUs per node; add --devices 8 to the training command")
    if shared.dry_run or (shared.resume != AUTO and (has_resume or shared.resume)):
        flag = "dry_run true" if shared.dry_run else f"resume {option_text(shared.resume)}"
        raise UserError(f"--{flag}: not supported in a launch file, which continues by --resume auto; remove it")
    if shared.max_restarts and format in ("kubeflow", "jobset", "ray"):
        raise UserError(f"--max_restarts {shared.max_restarts}: not supported with {format}, which restarts; remove it")


def _check_out_dir(out_dir: str, shared_dir: str | None, format: str) -> None:
    """Check that a run that starts again, on any nodes, finds its checkpoints."""
    if shared_dir is not None and not re.fullmatch(r"/[\w./@+-]+", shared_dir):
        hint = "must be an absolute path without spaces, commas or colons, such as /shared"
        raise UserError(f"--shared_dir {shared_dir}: {hint}")
    if is_url(out_dir) and not out_dir.startswith(("file:", "memory:")):
        return
    if shared_dir is None:
        local = ", or give --shared_dir PATH and an --out_dir in it" * ("shared_dir" in FORMATS[format].options)
        raise UserError(f"--out_dir {out_dir}: may be lost with its machine; use a URL such as s3://bucket/run{local}")
    if not Path(os.path.normpath(out_dir)).is_relative_to(shared_dir):
        raise UserError(f"--out_dir {out_dir}: must be in --shared_dir {shared_dir}, such as {shared_dir}/run")


def _check_paths(words: list[str]) -> None:
    """Check that the command names no files of this folder, which the job lacks."""
    for before, word in zip(words, words[1:], strict=False):
        flag, _, value = word.partition("=") if "=" in word else (before, "", word)
        if not Path(value).is_absolute() and Path(value).exists():
            hint = "give a URL, or the absolute path in the image or in --shared_dir"
            raise UserError(f"{flag} {value}: a path of this machine, which the job does not have; {hint}")


def _planned_memory(options: TrainingOptions, gpu: str | None) -> str:
    """Return the planned memory per device as text, after the checks of `toolkit plan`."""
    for value in (options.initial_checkpoint_dir, *vars(options.objective).values()):
        if isinstance(value, str) and (is_url(value) or (value.startswith("/") and not Path(value).exists())):
            return f"memory unknown: {value} is not on this machine"
    if (planner := load_single("planner")) is None:
        return "memory unknown: no extension plans runs"
    card = None if gpu is None else find_gpu(gpu, options.shared.accelerator, "--gpu")[1]
    memory = planner.plan_options(options, card and card.memory / 1e9).memory
    if card is not None and memory.total > card.memory:
        raise UserError(
            f"--gpu {gpu}: has {card.memory / 1e9:.0f} GB, but the run needs about {memory}; see "
            f"`toolkit plan --device_memory_gb {card.memory / 1e9:.0f}` for changes that make it fit"
        )
    return f"about {memory.total / 1e9:,.1f} GB of memory each (toolkit plan)"
