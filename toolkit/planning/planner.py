"""What an extension's planner does: choose values of "auto" by estimates of memory and speed, and report them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, Protocol

import torch
from torch import nn

from toolkit.errors import UserError
from toolkit.extension import load_single
from toolkit.models.flops import count_parameters
from toolkit.models.gpt import GPT
from toolkit.planning.resolve import DeviceSpec, ResolvedConfig
from toolkit.planning.run_args import RunArgs
from toolkit.planning.training_options import TrainingOptions

SMALL_FRACTION = 0.01
"""Of a device's memory: fp32 weights that are smaller fit with all that training needs, without an estimate."""
OUT_OF_MEMORY = " (see troubleshooting: out of memory)"


class Planner(Protocol):
    """The functions of a planner, of a module or an object. The extension that is loaded last has the planner.

    Without a planner, fixed rules choose: micro-batches of the command's default size, unsharded gradients, and on a
    GPU torch.compile if all rows have the same length.
    """

    def resolve_by_memory(self, args: RunArgs, devices: DeviceSpec) -> ResolvedConfig:
        """Resolve a run with ``--preset``, or whose micro-batch size is "auto" on GPUs of known memory."""

    def choose_accumulate(self, config: ResolvedConfig) -> Literal["unsharded", "sharded"]:
        """Return FSDP's gradient accumulation mode: sharded if unsharded gradients do not fit."""

    def choose_compiler(self, config: ResolvedConfig) -> tuple[str, str] | None:
        """Return the compiler and the reason, for a run on a GPU that can compile; None if that is unknown."""

    def require_memory(self, config: ResolvedConfig, model: GPT) -> None:
        """Raise a UserError if weights, gradients and optimizer state do not fit. ``model`` is on the meta device."""

    def out_of_memory(self, args: RunArgs, devices: DeviceSpec, is_auto: bool) -> UserError:
        """Return the error of a run that is out of memory, with changes that help.

        Args:
            args: The resolved options, with the micro-batch that did not fit.
            devices: The devices of the run.
            is_auto: Whether the micro-batch was "auto". The changes then set it, because "auto" would raise it again.
        """

    def report_dry_run(self, launch: Any, reader: Any) -> None:
        """Print what ``--dry_run`` shows, of a :class:`toolkit.training.launch.Launch` and its data reader."""

    def plan_run(self, args: RunArgs, devices: DeviceSpec) -> Any:
        """Plan a run. The plan has ``model`` and ``memory``: ``total`` bytes per device, described by ``str``."""

    def plan_options(self, options: TrainingOptions, device_memory_gb: float | None) -> Any:
        """Plan the run that has these options, on devices with this memory; None: this machine's."""


def is_small(model: nn.Module, devices: DeviceSpec) -> bool:
    """Whether a model is so small that its memory needs no estimate, which takes longer than a small run's start."""
    return 4 * count_parameters(model).total < SMALL_FRACTION * devices.memory


def require_memory(config: ResolvedConfig, model: GPT) -> None:
    """Check that weights, gradients and optimizer state fit in device memory, if there is a planner.

    Otherwise the run would initialize weights for minutes until the operating system kills it without a message.
    """
    is_known = config.frozen is None and is_small(model, config.devices)
    if not is_known and (planner := load_single("planner")) is not None:
        planner.require_memory(config, model)


@contextmanager
def oom_advice(config: ResolvedConfig) -> Iterator[None]:
    """Convert an out-of-memory error to a UserError with suggested changes."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        is_full = isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)
        if not is_full:
            raise
        planner = load_single("planner") if config.args.module is None else None
        if planner is not None:
            is_auto = "train.micro_batch_size" in config.reasons
            raise planner.out_of_memory(config.args, config.devices, is_auto) from error
        raise UserError(
            f"--train.micro_batch_size {config.batch.micro_batch_size}: out of memory on {config.device}; use "
            "--train.activation_checkpointing full, a smaller micro-batch, shorter sequences or more "
            f"devices{OUT_OF_MEMORY}"
        ) from error
