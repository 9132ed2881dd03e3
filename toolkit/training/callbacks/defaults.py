"""The callbacks of a run, and the place of the user's among them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from toolkit.distributed import ranks
from toolkit.planning.speed import peak_flops
from toolkit.training.callbacks.base import Callback
from toolkit.training.callbacks.best import EarlyStopping, KeepBest
from toolkit.training.callbacks.metrics import ThroughputMonitor
from toolkit.training.callbacks.replicas import ReplicaCheck
from toolkit.training.throughput import Throughput

if TYPE_CHECKING:
    from toolkit.training.trainer import Trainer


def order_callbacks(trainer: Trainer, outputs: list[Callback]) -> list[Callback]:
    """Return all callbacks of a run: checks and throughput, the user's, the outputs, what validations decide.

    Args:
        trainer: With its model and its state.
        outputs: Of rank 0: metrics file, loggers, console.
    """
    train, peak = trainer.args.train, peak_flops(trainer.fabric.device, trainer.config.precision)
    throughput = Throughput(trainer.state.flops, None if peak is None else peak * ranks.world_size())
    return [
        ReplicaCheck(trainer.config.strategy.shards),
        ThroughputMonitor(throughput),
        *trainer.user_callbacks,
        *outputs,
        *([] if trainer.state.sampler is None else [trainer.state.sampler]),
        *([] if train.patience is None else [EarlyStopping(train.patience)]),
        *([KeepBest()] if train.keep_best else []),
    ]
