"""Callbacks that damage a run: ``--callbacks helpers.faulty_callbacks.SkewGradient``."""

import os
import signal

import torch

from helpers.slow_writes import slow_fsync
from toolkit import Callback
from toolkit.distributed import ranks
from toolkit.distributed.names import canonical_name
from toolkit.models.block import Block
from toolkit.training import control_files
from toolkit.training.model_spec import unwrapped


class SkewGradient(Callback):
    """Doubles a gradient on rank 1 in one step."""

    def __init__(self, step: int = 2) -> None:
        self.step = step

    def on_before_optimizer_step(self, trainer) -> None:
        if trainer.progress.step + 1 == self.step:
            skew_gradient(trainer)


class Touch(Callback):
    """Writes an empty file in the run's folder on rank 0 after a step."""

    def __init__(self, name: str, step: int) -> None:
        self.name, self.step = name, step

    def on_train_start(self, trainer) -> None:
        control_files.LOOK_EVERY_S = 0.0

    def on_step_end(self, trainer, metrics) -> None:
        if trainer.progress.step == self.step and ranks.global_rank() == 0:
            (trainer.out_dir / self.name).touch(0o000)


class SlowDisk(Callback):
    """Makes fsync slow on rank 0 (for $SLOW_DISK seconds)."""

    def on_train_start(self, trainer) -> None:
        if ranks.global_rank() == 0:
            os.fsync = slow_fsync(float(os.environ["SLOW_DISK"]))


class SlowStart(Callback):
    """Makes fsync slow on rank 0 (for $SLOW_DISK seconds) from the start of the run on."""

    def __init__(self) -> None:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            os.fsync = slow_fsync(float(os.environ["SLOW_DISK"]))


class Leak(Callback):
    """Keeps a tensor of 256 KiB of each step."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []

    def on_step_end(self, trainer, metrics) -> None:
        self.tensors.append(torch.ones(1 << 16))


class KillAlone(Callback):
    """Kills the process of a run on one rank, as the operating system does when memory is full."""

    def on_train_start(self, trainer) -> None:
        if ranks.world_size() == 1:
            os.kill(os.getpid(), signal.SIGKILL)


class FailInBlock(Callback):
    """Raises in the forward pass of rank 1's first block, after two steps."""

    def on_train_start(self, trainer) -> None:
        def fail(*_):
            if trainer.progress.step == 2:
                raise ValueError("this block is broken")

        if ranks.global_rank() == 1:
            block = next(part for part in unwrapped(trainer.model).modules() if isinstance(part, Block))
            block.register_forward_pre_hook(fail)


def skew_gradient(trainer) -> None:
    """Double the gradient of the second block's first MLP layer on rank 1."""
    weights = {canonical_name(name): p for name, p in unwrapped(trainer.model).named_parameters()}
    if ranks.global_rank() == 1:
        weights["transformer.h.1.mlp.fc_1.weight"].grad.mul_(2)
