"""What a run will be, from the arguments alone: nothing is started, built or written."""

from __future__ import annotations

from dataclasses import asdict, dataclass, is_dataclass
from typing import Any

import torch
from torch import nn

import toolkit.data
from toolkit.config import (
    Accelerator,
    CommandDefaults,
    DDPArgs,
    Devices,
    EvalArgs,
    FSDPArgs,
    LogArgs,
    OptimizerArgs,
    Precision,
    Strategy,
    TrainArgs,
    fill,
)
from toolkit.data.base import DataModule
from toolkit.data.tokens.in_memory import InMemoryData
from toolkit.models.config import ModelOverrides
from toolkit.models.lora_config import LoRAConfig


@dataclass
class RunArgs:
    """What a training command hands over: the user's options, and the defaults of the command."""

    defaults: CommandDefaults
    model_name: str | None
    model_config: ModelOverrides
    data: DataModule
    train: TrainArgs
    eval: EvalArgs
    log: LogArgs
    optimizer: OptimizerArgs
    fsdp: FSDPArgs
    ddp: DDPArgs
    out_dir: str
    resume: bool | str
    initial_checkpoint_dir: str | None
    tokenizer_dir: str | None
    accelerator: Accelerator
    devices: Devices
    num_nodes: int | None
    strategy: Strategy
    precision: Precision | None
    compiler: str
    logger_name: str
    timeout: float | None
    seed: int
    deterministic: bool = False
    module: nn.Module | None = None
    """A user-provided model with its weights; then there is no ``model_name``."""
    block_classes: tuple[type[nn.Module], ...] = ()
    """The blocks of that model."""
    optimizer_class: type[torch.optim.Optimizer] | None = None
    """A class that torch.optim does not have; ``optimizer.name`` is its name."""
    lora: LoRAConfig | None = None
    """Train adapters beside the weights of ``initial_checkpoint_dir``, which are frozen."""
    quantize: str | None = None
    """How those weights are quantised."""
    from_peft: str | None = None
    """A folder of peft's with adapters to begin with."""
    callbacks: str | list[Any] | None = None
    """Class paths, see :func:`toolkit.training.callbacks.loading.load_callbacks`."""
    given: dict[str, Any] | None = None
    """The command's own arguments, where their names are not these fields'."""
    verify_checkpoint: bool = True
    """Compare what the run starts from with its checksums."""


def is_repeatable(args: RunArgs) -> bool:
    """Whether the options say all of the run: no object from Python takes part."""
    ready = args.module is not None or isinstance(args.data, InMemoryData) or args.optimizer_class is not None
    return not ready


def hyperparameters(args: RunArgs) -> dict[str, Any]:
    """The options of this run as ``toolkit SUB --config`` takes them, defaults filled in; of ready data the class."""
    left_out = ("defaults", "module", "block_classes", "optimizer_class", "lora", "quantize", "from_peft", "given")
    values = {k: v for k, v in vars(args).items() if k not in left_out}
    if args.given is not None:
        values = {name: values.get(name, value) for name, value in args.given.items()}
    values |= {"resume": False}
    values["optimizer"] = fill(args.optimizer, args.defaults.optimizer)
    plain = {k: asdict(v) if is_dataclass(v) else v for k, v in values.items()}
    if "model_config" in plain:
        plain["model_config"] = {k: v for k, v in plain["model_config"].items() if v is not None}
    kind = type(args.data)
    own = getattr(toolkit.data, kind.__name__, None) is kind
    path = kind.__name__ if own else f"{kind.__module__}.{kind.__qualname__}"
    plain["data"] = {"class_path": path, "init_args": {} if isinstance(args.data, InMemoryData) else plain["data"]}
    return plain
