"""Train on the workers of a Ray cluster with Ray Train, which places, watches and restarts them."""

import copy
import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any

import ray.train
from ray.train.backend import Backend
from ray.train.torch import TorchConfig, TorchTrainer
from ray.train.v2.api.report_config import CheckpointUploadMode as Upload

import toolkit
from toolkit.cli.parser import parse
from toolkit.commands import TRAINING
from toolkit.errors import UserError
from toolkit.io.paths import is_url
from toolkit.planning.training_options import run_args
from toolkit.training.engine import run_training
from toolkit.training.python_args import read_run_args, run_from_python
from toolkit.training.run import late
from toolkit.training.trainer_names import PYTHON_OBJECTS


def train(
    options: Sequence[str] | Mapping[str, Any],
    num_workers: int = 1,
    resources: Mapping[str, float] | None = None,
    run_config: ray.train.RunConfig | None = None,
) -> ray.train.Result:
    """Train on the workers of the Ray cluster, one process per worker. A restarted run resumes exactly.

    Args:
        options: A training command as words, ``["pretrain", "pico-llama", "--train.max_steps", "100"]``, or the
            arguments of :func:`toolkit.train`; with ``checkpoint_dir`` of :func:`toolkit.finetune`. All nodes
            must reach ``out_dir``. ``resume`` is "auto" by default.
        num_workers: Number of processes, over all nodes.
        resources: What Ray reserves per worker, such as ``{"GPU": 1, "CPU": 8}``. Default: one CPU.
        run_config: Such as ``RunConfig(failure_config=FailureConfig(max_failures=3))``; its storage is ``out_dir``.

    Returns:
        Ray's result: ``metrics`` is the last row of metrics.csv, ``checkpoint`` is ``out_dir/final``.

    Raises:
        UserError: invalid options; no worker has been started.
        ray.train.TrainingFailedError: more failures than ``run_config`` allows.
    """
    out_dir = str(_read(options)[0].out_dir)
    place = out_dir.rstrip("/") if is_url(out_dir) else os.path.abspath(out_dir)
    run_config = copy.copy(run_config or ray.train.RunConfig())
    run_config.storage_path, _, run_config.name = place.rpartition("/")
    per_worker = dict(resources or {"CPU": 1})
    return TorchTrainer(
        _train_in_worker,
        train_loop_config={"options": options, "cwd": os.getcwd(), "place": place},
        torch_config=VariablesConfig(),
        scaling_config=ray.train.ScalingConfig(None, num_workers, "GPU" in per_worker, resources_per_worker=per_worker),
        run_config=run_config,
    ).fit()


def _read(options: Sequence[str] | Mapping[str, Any]) -> tuple[Any, Sequence[toolkit.Callback]]:
    """Return the arguments of a run, and its callbacks."""
    if not isinstance(options, Mapping):
        name, *words = options
        if name not in TRAINING:
            raise UserError(f"options {name}: must start with a training command: {', '.join(TRAINING)}")
        words += [] if any(word.split("=")[0] == "--resume" for word in words) else ["--resume", "auto"]
        return run_args(**parse(name, words) or {}), ()
    values = {"resume": "auto", "callbacks": ()} | dict(options)
    callbacks = values.pop("callbacks")
    objects = {name: values.pop(name) for name in PYTHON_OBJECTS if name in values}
    command: Any = "finetune_lora" if values.pop("lora", False) else "finetune_full"
    return read_run_args(command if "checkpoint_dir" in values else "pretrain", values, **objects), callbacks


def _train_in_worker(config: dict[str, Any]) -> None:
    if os.path.isdir(config["cwd"]):  # for relative paths: Ray starts workers in another folder
        os.chdir(config["cwd"])
    args, callbacks = _read(config["options"])
    result = run_from_python(args, [*callbacks, Report()], run_training)
    # Only final/: Ray lists a checkpoint until the end, and toolkit deletes old ones (--train.keep_last).
    final = ray.train.Checkpoint(f"{config['place']}/{result.checkpoint.name}")
    ray.train.report({"step": result.step, **result.metrics}, final, checkpoint_upload_mode=Upload.NO_UPLOAD)


class Report(toolkit.Callback):
    """Reports the latest metrics to Ray at each checkpoint. Not at each step: Ray takes one report in two seconds."""

    row: Mapping[str, float] = {}

    @late
    def on_log(self, trainer: Any, metrics: dict[str, float]) -> None:
        self.row = metrics

    def on_checkpoint_saved(self, trainer: Any, folder: Any) -> None:
        ray.train.report(dict(self.row))


class VariablesBackend(Backend):  # Ray's creates a process group; toolkit's has gloo and NCCL
    share_cuda_visible_devices = True  # toolkit picks the device by LOCAL_RANK

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        worker_group.execute(_set_variables, *worker_group.execute_single(0, _free_address))


class VariablesConfig(TorchConfig):
    backend_cls = property(lambda self: VariablesBackend)


def _free_address() -> tuple[str, int]:
    with socket.create_server(("", 0)) as server:
        return ray.util.get_node_ip_address(), server.getsockname()[1]


def _set_variables(address: str, port: int) -> None:
    world = ray.train.get_context()
    os.environ |= {"MASTER_ADDR": address, "MASTER_PORT": str(port), "RANK": str(world.get_world_rank())}
    for name in ("world_size", "local_rank", "local_world_size", "node_rank"):
        os.environ[name.upper()] = str(getattr(world, f"get_{name}")())
