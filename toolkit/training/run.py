"""From a command's arguments to the one :class:`~toolkit.training.trainer.Trainer`."""

from __future__ import annotations

from collections.abc import Sequence

from toolkit.distributed.device import count_devices, pick_accelerator, pick_precision
from toolkit.distributed.world import detect_world
from toolkit.planning.resolve import resolve_config
from toolkit.planning.run_args import RunArgs
from toolkit.training.callbacks import Callback
from toolkit.training.callbacks.loading import load_callbacks
from toolkit.training.trainer import Trainer
from toolkit.ui.loggers import check_loggers


def run_training(args: RunArgs, callbacks: Sequence[Callback] = ()) -> None:
    """Train as the arguments say, from a fresh start or from a checkpoint; every process of the run calls this.

    Args:
        args: What the user asked for.
        callbacks: Called after those of ``--callbacks``.

    Raises:
        UserError: a mistake in the arguments; nothing has been written. For others see :meth:`Trainer.fit`.
    """
    device = pick_accelerator(args.accelerator)
    world = detect_world(args.devices, args.num_nodes, count_devices(device))
    precision = pick_precision(args.precision, device, args.defaults.cuda_precision)
    config = resolve_config(args, device, world.devices, world.num_nodes, precision)
    check_loggers(config.args.logger_name, config.args.log)
    Trainer(config, world, [*load_callbacks(config.args.callbacks), *callbacks]).fit()
