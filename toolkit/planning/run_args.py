"""Options of a training command, including objects passed from Python. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.checkpoints.find import find_checkpoint_dir
from toolkit.checkpoints.remote.access import run_folder
from toolkit.config import (
    AUTO,
    FINETUNE,
    PRETRAIN,
    Auto,
    CommandDefaults,
    EvalArgs,
    OptimizerArgs,
    Precision,
    RunOptions,
    TrainArgs,
    TrainingCommand,
)
from toolkit.data.base import DataModule
from toolkit.data.tokens.rows import PythonData
from toolkit.distributed.mesh import Layout
from toolkit.models.config import ModelOverrides
from toolkit.models.lora_config import LoRAConfig
from toolkit.objectives import NextToken, Objective
from toolkit.planning.frozen import find_model

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from toolkit.models.quantize import Quantize


Changes = dict[str, Any]
"""New values by option, such as ``{"train.micro_batch_size": 8}``."""


@dataclass(frozen=True, kw_only=True)
class RunArgs(RunOptions):
    """The user's options of a run. :func:`toolkit.planning.auto.resolve_auto` resolves "auto".

    Args:
        command: The training command. It sets the defaults for run length, warm-up and optimizer options.
        initial_checkpoint_dir: Weights to start from, or the frozen base of adapters.
        lora: Train low-rank adapters; None trains all weights.
        quantize: 4-bit format of the frozen base model; None does not quantize.
        loraplus_lr_ratio: Learning rate of the adapters' B matrices, relative to A.
        from_peft: A peft folder with adapters to start from.
        module: A user-provided model with weights; replaces ``model_name``.
        block_classes: Block classes of ``module``.
        optimizer_class: User-provided optimizer class outside torch.optim; ``optimizer.name`` is its name.
        objective: The training objective.
        groups: Options of extensions by group, see :class:`toolkit.extension.Extension`.
        requested: The options before any "auto" is resolved.
    """

    command: TrainingCommand
    data: DataModule
    train: TrainArgs
    eval: EvalArgs
    optimizer: OptimizerArgs
    out_dir: str
    precision: Precision | Auto = AUTO
    model_name: str | None = None
    model_config: ModelOverrides = field(default_factory=ModelOverrides)
    initial_checkpoint_dir: str | None = None
    lora: LoRAConfig | None = None
    quantize: Quantize | None = None
    loraplus_lr_ratio: float = 1.0
    from_peft: str | None = None
    module: nn.Module | None = None
    block_classes: tuple[type[nn.Module], ...] = ()
    optimizer_class: type[Optimizer] | None = None
    objective: Objective = field(default_factory=NextToken)
    groups: Mapping[str, Any] = field(default_factory=dict)
    requested: RunArgs | None = field(default=None, compare=False, repr=False)

    @property
    def is_finetune(self) -> bool:
        return self.command != "pretrain"

    @property
    def defaults(self) -> CommandDefaults:
        return FINETUNE if self.is_finetune else PRETRAIN

    @property
    def is_repeatable(self) -> bool:
        """Whether the options alone reproduce the run, without a model, optimizer class or data from Python."""
        return self.module is None and self.optimizer_class is None and not isinstance(self.data, PythonData)

    @property
    def run_dir(self) -> Path:
        """The local folder of the run: ``out_dir``, or the staging folder if that is on remote storage."""
        return run_folder(self.out_dir, self.staging_dir)

    @property
    def model_parallel(self) -> Layout:
        """The sizes of the pipeline, context and tensor dimensions."""
        return Layout(
            pipeline=self.pipeline_parallel_size, context=self.context_parallel_size, tensor=self.tensor_parallel_size
        )

    @property
    def base_dir(self) -> Path | None:
        """The folder of ``initial_checkpoint_dir``."""
        return None if self.initial_checkpoint_dir is None else find_checkpoint_dir(self.initial_checkpoint_dir)

    @property
    def reference_dir(self) -> Path | None:
        """The checkpoint whose log-probabilities the run needs before training; None if it needs none.

        With adapters, the objective's reference is by default the base model, in the same step.
        """
        if not self.objective.has_reference or self.objective.frozen_option:
            return None
        return find_model(self.objective) or (self.base_dir if self.lora is None else None)


def with_options(args: RunArgs, changes: Changes) -> RunArgs:
    """Return a copy of ``args`` with the changes."""
    for option, value in changes.items():
        group, _, name = option.rpartition(".")
        args = replace(args, **({group: replace(getattr(args, group), **{name: value})} if group else {name: value}))
    return args
