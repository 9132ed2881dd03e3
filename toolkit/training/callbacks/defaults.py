"""The callbacks of a run, and the place of the user's among them."""

from __future__ import annotations

from toolkit.distributed import ranks
from toolkit.planning.speed import peak_flops
from toolkit.training.callbacks.base import Callback, Trainer
from toolkit.training.callbacks.best import EarlyStopping, KeepBest
from toolkit.training.callbacks.metrics import ThroughputMonitor
from toolkit.training.callbacks.replicas import ReplicaCheck
from toolkit.training.callbacks.samples import Sampler
from toolkit.training.model import ModelSpec
from toolkit.training.throughput import Throughput


def order_callbacks(
    trainer: Trainer,
    user_callbacks: list[Callback],
    outputs: list[Callback],
    *,
    spec: ModelSpec,
    flops: float | None,
    sampler: Sampler | None,
) -> list[Callback]:
    """Return all callbacks of a run: checks and throughput, the user's, the outputs, what validations decide.

    Args:
        trainer: With its model.
        user_callbacks: In the user's order.
        outputs: Of rank 0: metrics file, loggers, console.
        spec, flops, sampler: See :class:`toolkit.training.run_state.RunState`.
    """
    train, peak = trainer.args.train, peak_flops(trainer.fabric.device, trainer.config.precision)
    throughput = Throughput(flops, None if peak is None else peak * ranks.world_size())
    return [
        ReplicaCheck(spec, trainer.config.strategy.shards),
        ThroughputMonitor(throughput),
        *user_callbacks,
        *outputs,
        *([] if sampler is None else [sampler]),
        *([] if train.patience is None else [EarlyStopping(train.patience)]),
        *([KeepBest()] if train.keep_best else []),
    ]
