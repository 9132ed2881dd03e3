"""From a command's arguments to the one :class:`~toolkit.training.trainer.Trainer`."""

from __future__ import annotations

from collections.abc import Sequence

from toolkit.config import RunOptions
from toolkit.distributed.device import count_devices, pick_accelerator
from toolkit.distributed.world import WorldInfo, detect_world
from toolkit.errors import UserError
from toolkit.planning.resolve import DeviceSpec, resolve
from toolkit.planning.run_args import RunArgs
from toolkit.training.callbacks import Callback, overrides
from toolkit.training.callbacks.loading import load_callbacks
from toolkit.training.trainer import Trainer
from toolkit.ui.loggers import check_loggers


def run_training(args: RunArgs, callbacks: Sequence[Callback] = ()) -> None:
    """Train from scratch or from a checkpoint; every process of the run calls this.

    Args:
        args: What the user asked for.
        callbacks: Called after those of ``--callbacks``.
    """
    device, world = detect_devices(args)
    config = resolve(args, DeviceSpec.of_this_machine(device, world.devices, world.num_nodes))
    check_loggers(args.logger_name, args.log)
    all_callbacks = [*load_callbacks(args.callbacks), *callbacks]
    if args.optimizer.in_backward:
        _refuse_callbacks_before_the_step(all_callbacks)
    Trainer(config, world, all_callbacks).fit()


def _refuse_callbacks_before_the_step(callbacks: Sequence[Callback]) -> None:
    for callback in callbacks:
        if overrides(callback, "on_before_optimizer_step"):
            raise UserError(
                f"--optimizer.in_backward true: {type(callback).__qualname__}.on_before_optimizer_step would see no "
                "gradients; leave one of them out"
            )


def detect_devices(args: RunOptions) -> tuple[str, WorldInfo]:
    """Return the kind of device of a run ("cpu", "cuda", "mps") and its processes."""
    device = pick_accelerator(args.accelerator)
    return device, detect_world(args.devices, args.num_nodes, count_devices(device))
