"""Options of a training command, including objects passed from Python. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from toolkit.checkpoints.find import find_checkpoint_dir
from toolkit.checkpoints.remote.run import run_folder
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
from toolkit.config.classes import class_path
from toolkit.data.base import DataModule
from toolkit.data.mixture import Mixture
from toolkit.data.tokens.rows import PythonData
from toolkit.distributed.mesh import Layout
from toolkit.extension import registered, split_names
from toolkit.models.config import ModelOverrides
from toolkit.models.families import extension_of
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


def hyperparameters(args: RunArgs) -> dict[str, Any]:
    """Return a run's options in the format of ``toolkit SUB --config``. Data from Python is named by class."""
    values: dict[str, Any] = {"checkpoint_dir": args.initial_checkpoint_dir}
    if not args.is_finetune:
        values = {name: getattr(args, name) for name in ("model_name", "model_config", "initial_checkpoint_dir")}
    if args.lora is not None:
        lora = args.lora if args.from_peft is None else LoRAConfig()  # --from_peft defines the values
        values |= lora.to_options() | {n: getattr(args, n) for n in ("loraplus_lr_ratio", "from_peft", "quantize")}
    shared = [f.name for f in fields(RunOptions) if f.name != "dry_run"]
    names = ["data", "train", "eval", "optimizer", "out_dir", "precision", *shared]
    values |= {name: getattr(args, name) for name in names} | {"resume": False}
    values |= {name: group for name, group in args.groups.items() if group != type(group)()}
    plain = {k: asdict(v) if is_dataclass(v) and not isinstance(v, type) else v for k, v in values.items()}
    if "model_config" in plain:
        plain["model_config"] = {k: v for k, v in plain["model_config"].items() if v is not None}
    options = {} if isinstance(args.data, PythonData) else plain["data"]
    plain["data"] = {"class_path": class_path(type(args.data), DataModule), "init_args": options}
    if objective := objective_entry(args.objective):
        plain["objective"] = objective
    return plain | ({"extensions": extensions} if (extensions := used_extensions(args)) else {})


def objective_entry(objective: Objective) -> dict[str, Any]:
    """Return an objective's YAML entry, class_path and init_args; empty for next-token prediction."""
    if objective == NextToken():
        return {}
    options = {f.name: getattr(objective, f.name) for f in fields(cast("Any", objective)) if f.init}
    return {"class_path": class_path(type(objective), Objective), "init_args": options}


def data_modules(data: DataModule) -> list[DataModule]:
    """Return the data module and, for a mixture, its source modules."""
    return [data, *(data.modules.values() if isinstance(data, Mixture) else ())]


def keep_old_ends(data: DataModule) -> None:
    """Set ``add_bos`` to None where it is auto: the rule of a run that an older version began."""
    for module in data_modules(data):
        if getattr(module, "add_bos", None) == AUTO:
            module.add_bos = None  # type: ignore[attr-defined]


def callback_entries(value: str | list[Any] | None) -> list[Any]:
    """Return the entries of ``--callbacks``: class paths, and mappings with ``class_path`` and ``init_args``."""
    return [path.strip() for path in value.split(",")] if isinstance(value, str) else value or []


def callback_paths(args: RunArgs) -> list[str]:
    """Return the class paths and extension names in ``--callbacks``."""
    return [entry if isinstance(entry, str) else entry.get("class_path") for entry in callback_entries(args.callbacks)]


def used_extensions(args: RunArgs) -> list[str]:
    """Return the extensions that a run uses, see :func:`toolkit.extension.extensions`."""
    used = {
        "data": [type(module).__name__ for module in data_modules(args.data)],
        "compilers": [args.compiler],
        "strategies": [args.strategy],
        "loggers": split_names(args.logger_name),
        "callbacks": callback_paths(args),
        "optimizers": [args.optimizer.name],
        "objectives": [type(args.objective).__name__],
        "option_groups": [name for name, group in args.groups.items() if group != type(group)()],
    }
    origins = [entry.origin for kind, names in used.items() for n, entry in registered(kind).items() if n in names]
    if args.base_dir is None and args.module is None and (origin := extension_of(args.model_name)) is not None:
        origins.append(origin)
    return list(dict.fromkeys(origins))
