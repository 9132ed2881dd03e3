"""Build a run from its arguments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from lightning.fabric import Fabric

from toolkit.checkpoints.remote.run import RemoteRun
from toolkit.config import RunOptions
from toolkit.data.base import PreparedData
from toolkit.data.loader import Padding
from toolkit.distributed.device import count_devices, pick_accelerator
from toolkit.distributed.launch import Timeouts
from toolkit.distributed.private_lightning import FabricModule
from toolkit.distributed.world import WorldInfo, detect_world
from toolkit.errors import UserError
from toolkit.objectives.base import Objective
from toolkit.optim.update import Update
from toolkit.planning.resolve import DeviceSpec, ResolvedConfig, resolve
from toolkit.planning.run_args import RunArgs
from toolkit.training.callbacks import Callback, Sampler, overrides
from toolkit.training.callbacks.loading import load_callbacks
from toolkit.training.checkpointer import Checkpointer
from toolkit.training.data_reader import DataReader
from toolkit.training.garbage import GarbageCollection
from toolkit.training.saving import Saver
from toolkit.training.start_state import StartState
from toolkit.training.throughput import StepTimes


@dataclass
class Launch:
    """A run whose processes are launched and whose data is prepared.

    Args:
        launched_at: ``--train.max_time`` counts from here.
        remote: The run's folder, if it is on remote storage.
        sampler: Prints samples, with ``--eval.max_new_tokens``.
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
        return Timeouts.of(self.args.timeout)

    @property
    def is_finished(self) -> bool:
        return self.state.is_finished(self.args)


@dataclass
class Run(Launch):
    """A run with its model, and what the loop counts.

    Args:
        token_bytes: UTF-8 bytes of each token, where there is a tokenizer.
        optimizer: As Fabric has wrapped it.
        seconds_before: Seconds of earlier launches.
        ready_at: When this rank last left a collective: what it does until the next one delays all ranks.
        skipped_steps: Steps of this launch that the fp16 scaler skipped.
    """

    padding: Padding
    reader: DataReader
    token_bytes: np.ndarray | None
    model: FabricModule
    checkpointer: Checkpointer
    optimizer: Any
    update: Update = field(init=False)  # both need the callbacks, which need the rest
    saver: Saver = field(init=False)
    seconds_before: float = 0.0
    ready_at: float = 0.0
    saved_at: float = 0.0
    validated_at: float = 0.0
    skipped_steps: int = 0
    stop_reason: str | None = None
    step_times: StepTimes = field(default_factory=StepTimes)
    garbage: GarbageCollection = field(default_factory=GarbageCollection)

    @property
    def objective(self) -> Objective:
        return self.args.objective

    def advance(self, n_inputs: int) -> None:
        """Count a step of ``n_inputs`` input tokens over all ranks."""
        progress, total = self.state.progress, self.state.limits.total_samples
        progress.step += 1
        progress.tokens += n_inputs
        progress.samples += self.config.batch.global_batch_size
        if total is not None:
            progress.samples = min(progress.samples, total)  # the last batch of an epoch may be short

    def overlap(self) -> None:
        """Do host work while the device computes a step."""
        self.reader.copy_ahead()
        self.garbage.collect(is_due=False)


def resolve_run(args: RunArgs, callbacks: Sequence[Callback] = ()) -> tuple[ResolvedConfig, WorldInfo, list[Callback]]:
    """Return the configuration of a run, its processes, and its callbacks, ``--callbacks`` first."""
    device, world = detect_devices(args)
    config = resolve(args, DeviceSpec.of_this_machine(device, world.devices, world.num_nodes))
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


def detect_devices(args: RunOptions) -> tuple[str, WorldInfo]:
    """Return the kind of device of a run ("cpu", "cuda", "mps") and its processes."""
    device = pick_accelerator(args.accelerator)
    return device, detect_world(args.devices, args.num_nodes, count_devices(device))
