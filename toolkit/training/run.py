"""Define the state of a run, and resolve its configuration and devices."""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from lightning.fabric import Fabric

from toolkit.checkpoints.remote.run import RemoteRun
from toolkit.config import AUTO, RunOptions
from toolkit.data.base import PreparedData
from toolkit.data.batch import Padding
from toolkit.distributed.device import count_devices, pick_accelerator
from toolkit.distributed.launch import Timeouts
from toolkit.distributed.private_lightning import FabricModule
from toolkit.distributed.world import WorldInfo, detect_world
from toolkit.errors import GuardError, UserError
from toolkit.objectives.base import Objective
from toolkit.optim.update import Update
from toolkit.planning.options import is_launched
from toolkit.planning.plan import device_spec_of
from toolkit.planning.resolve import DeviceSpec, ResolvedConfig, resolve
from toolkit.planning.run_args import RunArgs
from toolkit.training.callbacks import Callback, Sampler, overrides
from toolkit.training.callbacks.loading import load_callbacks
from toolkit.training.checkpointer import Checkpointer
from toolkit.training.control_files import ControlFiles
from toolkit.training.data_reader import DataReader
from toolkit.training.garbage import GarbageCollection
from toolkit.training.saving import Saver
from toolkit.training.start_state import StartState
from toolkit.training.step import StepResult
from toolkit.training.throughput import StepTimes


@dataclass
class Launch:
    """A run after process launch and data preparation.

    Args:
        launched_at: Start of ``--train.max_time``, in seconds of time.perf_counter().
        remote: The run's remote folder; None without remote storage.
        sampler: Prints samples if ``--eval.max_new_tokens`` is set.
    """

    config: ResolvedConfig
    world: WorldInfo
    launched_at: float
    remote: RemoteRun | None
    display: Any
    fabric: Fabric
    data: PreparedData
    state: StartState
    sampler: Sampler | None

    @property
    def args(self) -> RunArgs:
        return self.config.args

    @property
    def out_dir(self) -> Path:
        return self.args.run_dir

    @property
    def timeouts(self) -> Timeouts:
        return Timeouts.from_minutes(self.args.timeout)

    @property
    def is_finished(self) -> bool:
        return self.state.is_finished(self.args)


@dataclass
class Run(Launch):
    """A run with model, optimizer and the counters of the training loop.

    Args:
        token_bytes: Number of UTF-8 bytes per token; None without a tokenizer.
        optimizer: The optimizer as Fabric wraps it.
        seconds_before: Total seconds of earlier launches.
        ready_at: Time when this rank last left a collective. Its work until the next collective delays all ranks.
        skipped_steps: Steps in this launch without an update, because of the fp16 GradScaler or a spike.
    """

    padding: Padding
    reader: DataReader
    token_bytes: np.ndarray | None
    model: FabricModule
    checkpointer: Checkpointer
    optimizer: Any
    update: Update = field(init=False)  # update and saver need the callbacks, which need the other fields
    saver: Saver = field(init=False)
    seconds_before: float = 0.0
    ready_at: float = 0.0
    saved_at: float = 0.0
    validated_at: float = 0.0
    skipped_steps: int = 0
    skipped_in_a_row: int = 0
    stop_reason: str | None = None
    step_times: StepTimes = field(default_factory=StepTimes)
    garbage: GarbageCollection = field(default_factory=GarbageCollection)

    def __post_init__(self) -> None:
        self.control_files = ControlFiles(self.out_dir)

    @property
    def objective(self) -> Objective:
        return self.args.objective

    def advance(self, n_inputs: int) -> None:
        """Advance the progress by one step of ``n_inputs`` input tokens (all ranks)."""
        progress, total = self.state.progress, self.state.limits.total_samples
        progress.step += 1
        progress.tokens += n_inputs
        progress.samples += self.config.batch.global_batch_size
        if total is not None:
            progress.samples = min(progress.samples, total)  # the last batch of an epoch may be short

    def count_skipped(self, result: StepResult) -> None:
        """Count skipped steps. Raises GuardError after more than ``--train.max_skipped`` in a row."""
        self.skipped_steps += result.skipped
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if result.skipped else 0
        if self.skipped_in_a_row <= self.args.train.max_skipped:
            return
        step, times = f"step {self.state.progress.step + 1}", f"in {self.skipped_in_a_row} steps"
        if math.isfinite(result.grad_norm):
            raise GuardError(
                f"{step}: skipped as a spike of the loss or the gradient norm, as all {times} (--train.max_skipped); "
                "lower --train.learning_rate, or raise --train.skip_spikes (see troubleshooting: diverging)"
            )
        raise GuardError(
            f"{step}: no fp16 loss scale gave a finite gradient {times}; lower --train.learning_rate, or use "
            "--precision bf16-mixed or 32-true (see troubleshooting: diverging)"
        )

    def overlap(self) -> None:
        """Do host work while the device computes a step."""
        self.reader.start_copy()
        self.garbage.collect(is_full=False)


def resolve_run(args: RunArgs, callbacks: Sequence[Callback] = ()) -> tuple[ResolvedConfig, WorldInfo, list[Callback]]:
    """Return the resolved configuration, the processes, and the callbacks (``--callbacks`` first)."""
    device, world = detect_devices(args)
    devices = DeviceSpec.of_this_machine(device, world.devices, world.num_nodes)
    config = resolve(args, device_spec_of(args) if is_alone(args) else devices)
    all_callbacks = [*load_callbacks(args.callbacks), *callbacks]
    if args.optimizer.in_backward:
        _refuse_callbacks_before_the_step(all_callbacks)
    return config, world, all_callbacks


def _refuse_callbacks_before_the_step(callbacks: Sequence[Callback]) -> None:
    for callback in callbacks:
        if overrides(callback, "on_before_optimizer_step"):
            raise UserError(
                f"--optimizer.in_backward true: {type(callback).__qualname__}.on_before_optimizer_step would see no "
                "gradients; remove one of them"
            )


def is_alone(args: RunOptions) -> bool:
    """Whether this process reads the first rank's rows alone: a dry run of several nodes without a launcher."""
    return args.dry_run and args.num_nodes not in (AUTO, 1) and "NODE_RANK" not in os.environ and not is_launched()


def detect_devices(args: RunOptions) -> tuple[str, WorldInfo]:
    """Return the run's device type ("cpu", "cuda" or "mps") and its processes."""
    device = pick_accelerator(args.accelerator)
    if is_alone(args):
        return device, WorldInfo(1, 1, 0, 0, "toolkit", starts_processes=False)
    return device, detect_world(args.devices, args.num_nodes, count_devices(device))
