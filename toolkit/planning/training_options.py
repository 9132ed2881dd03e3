"""The options of each training command, as a dataclass, and the arguments of the run. Does not import torch.

The fields are the command-line flags, and the options of :func:`toolkit.train` and :func:`toolkit.finetune`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, is_dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import toolkit.data
from toolkit.checkpoints.find import find_checkpoint_dir
from toolkit.checkpoints.store import ADAPTERS, WEIGHTS
from toolkit.config import (
    AUTO,
    FINETUNE,
    Auto,
    EvalArgs,
    OptimizerArgs,
    Precision,
    RunOptions,
    TrainArgs,
    TrainingCommand,
)
from toolkit.config.checks import note
from toolkit.data.base import DataModule
from toolkit.errors import UserError, require_option
from toolkit.extension import load_registered
from toolkit.models.config import ModelOverrides
from toolkit.models.config_checks import HeadName
from toolkit.models.lora_config import LoRAConfig, LoRAOptions
from toolkit.objectives import NextToken, Objective
from toolkit.planning.own_tokenizer import use_frozen_vocabulary, use_own_tokenizer
from toolkit.planning.run_args import RunArgs, with_options
from toolkit.planning.start_checks import check_options


@dataclass(frozen=True)
class PretrainOptions:
    """Train a language model on text, from scratch or from a checkpoint.

    `toolkit pretrain list` prints the names of the models.

    Args:
        model_name: A named architecture. Default: mini-llama, which trains on any machine.
        model_config: Fields of the named architecture to override.
        data: Training data.
        train: Training options.
        eval: Validation options.
        optimizer: Optimizer options.
        objective: The training objective.
        out_dir: Folder for checkpoints and logs, or a URL such as s3://bucket/run.
        initial_checkpoint_dir: Checkpoint with the initial weights: a folder, or a name below checkpoints/.
        precision: auto: 32-true on CPU, bf16-mixed on CUDA.
        shared: See :class:`toolkit.config.RunOptions`.
        groups: Extension options by group.
    """

    is_flat: ClassVar = True  # the fields are options without a prefix
    command: ClassVar[TrainingCommand] = "pretrain"
    checkpoint_option: ClassVar = "initial_checkpoint_dir"

    model_name: str | None = None
    model_config: ModelOverrides = field(default_factory=ModelOverrides)
    data: DataModule = field(default_factory=lambda: toolkit.data.PythonStdlib())
    train: TrainArgs = TrainArgs(global_batch_size=64, learning_rate=4e-4, keep_last=3)
    eval: EvalArgs = EvalArgs()
    optimizer: OptimizerArgs = OptimizerArgs()
    objective: Objective = field(default_factory=NextToken)
    out_dir: str = "out/pretrain"
    initial_checkpoint_dir: str | None = None
    precision: Precision | Auto = AUTO
    shared: RunOptions = RunOptions()
    groups: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class FinetuneOptions:
    """The options that both finetuning commands have.

    Args:
        checkpoint_dir: Checkpoint of the initial model: a folder, or a name below checkpoints/.
        data: Training data.
        train: Training options.
        eval: Validation options.
        optimizer: Optimizer options.
        objective: The training objective.
        head: Train a score layer in place of the LM head: classification (labels or numbers, --data Classification), or
            reward or token_reward (--data Preference). Short for --objective Classification, Reward and TokenReward.
        out_dir: Folder for checkpoints and logs, or a URL such as s3://bucket/run.
        precision: auto: 32-true on CPU, bf16-mixed on CUDA.
    """

    is_flat: ClassVar = True
    checkpoint_option: ClassVar = "checkpoint_dir"

    checkpoint_dir: str
    data: DataModule = field(default_factory=lambda: toolkit.data.JSON(json_path=""))
    train: TrainArgs = TrainArgs(global_batch_size=FINETUNE.global_batch_size, learning_rate=AUTO, keep_last=2)
    eval: EvalArgs = EvalArgs(max_new_tokens=AUTO)
    optimizer: OptimizerArgs = OptimizerArgs()
    objective: Objective = field(default_factory=NextToken)
    head: HeadName | None = None
    out_dir: str = "out/finetune/full"
    precision: Precision | Auto = AUTO

    @property
    def initial_checkpoint_dir(self) -> str:
        return self.checkpoint_dir


@dataclass(frozen=True)
class FinetuneFullOptions(FinetuneOptions):
    """Finetune all weights of a checkpoint on instructions or text; 3 epochs by default.

    Args:
        shared: See :class:`toolkit.config.RunOptions`.
        groups: Extension options by group.
    """

    command: ClassVar[TrainingCommand] = "finetune_full"

    shared: RunOptions = RunOptions()
    groups: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class FinetuneLoRAOptions(FinetuneOptions):
    """Train low-rank adapters on the frozen weights of a checkpoint; 3 epochs by default.

    Args:
        checkpoint_dir: Checkpoint of the base model, which does not change: a folder, or a name below checkpoints/.
        precision: Precision of the base; adapters are fp32. auto: 32-true on CPU, bf16-true on CUDA.
        adapters: See :class:`toolkit.models.lora_config.LoRAOptions`.
        shared: See :class:`toolkit.config.RunOptions`.
        groups: Extension options by group.
    """

    command: ClassVar[TrainingCommand] = "finetune_lora"

    out_dir: str = "out/finetune/lora"
    adapters: LoRAOptions = LoRAOptions()
    shared: RunOptions = RunOptions()
    groups: Mapping[str, Any] = field(default_factory=dict)


TrainingOptions = PretrainOptions | FinetuneFullOptions | FinetuneLoRAOptions
OPTIONS: dict[TrainingCommand, type[TrainingOptions]] = {
    cls.command: cls for cls in (PretrainOptions, FinetuneFullOptions, FinetuneLoRAOptions)
}


def run_args(options: TrainingOptions, **objects: Any) -> RunArgs:
    """Build and check the arguments of a run: the first stage, before :func:`toolkit.planning.auto.resolve_auto`.

    ``objects`` are those from Python: ``module``, ``block_classes`` and ``optimizer_class``, see :class:`RunArgs`.
    """
    values = vars(options) | vars(options.shared) | {"initial_checkpoint_dir": options.initial_checkpoint_dir}
    if not isinstance(options, PretrainOptions):
        folder = find_checkpoint_dir(values.pop("checkpoint_dir"))
        if (folder / ADAPTERS).is_file() and not (folder / WEIGHTS).exists():
            raise UserError(
                f"checkpoint_dir {options.checkpoint_dir}: holds adapters, not a model; run `toolkit merge_lora "
                f"{options.checkpoint_dir}` first, or continue that run with --resume"
            )
        values["objective"] = choose_objective(options.objective, values.pop("head"))
    if isinstance(options, FinetuneLoRAOptions):
        adapters: LoRAOptions = values.pop("adapters")
        values |= {name: getattr(adapters, name) for name in ("quantize", "from_peft", "loraplus_lr_ratio")}
        values["lora"] = read_lora(options)
    del values["shared"]
    args = RunArgs(command=options.command, **values, **objects)
    if args.strategy == "fsdp2":
        args = with_options(args, {"strategy": "fsdp"})
    args = replace(args, requested=args)
    if args.train.learning_rate == AUTO:
        rates = args.objective.learning_rates if args.is_finetune else (TrainArgs.learning_rate,) * 2
        args = with_options(args, {"train.learning_rate": rates[args.lora is None]})
    args = replace(args, objective=args.objective.for_run(args))
    if not is_dataclass(args.objective):
        raise UserError(
            f"--objective {type(args.objective).__name__}: must be a dataclass; add @dataclass to the class"
        )
    check_options(args)
    return use_own_tokenizer(use_frozen_vocabulary(args))


def choose_objective(objective: Objective, head: HeadName | None) -> Objective:
    """Return the objective that trains the head."""
    if head is None or objective.head == head:
        return objective
    name = type(objective).__name__
    hint = f"trains {name}, not this head; remove one of them"
    require_option(isinstance(objective, NextToken), "head", head, f"--objective {name} {hint}")
    return load_registered("heads", head)()


def read_lora(options: FinetuneLoRAOptions) -> LoRAConfig:
    """Return the configuration of the adapters: from the flags, or from the peft folder."""
    flags, peft_dir = vars(options.adapters), options.adapters.from_peft
    if peft_dir is None:
        return LoRAConfig.from_options(flags)
    for name, default in LoRAConfig().to_options().items():
        if flags[name] != default:
            raise UserError(f"--{name} {flags[name]} has no effect with --from_peft {peft_dir}; remove one of them")
    from toolkit.checkpoints.folder import read_model_config  # these import torch
    from toolkit.checkpoints.hf.sums import require_intact
    from toolkit.checkpoints.importers import import_adapters

    base = find_checkpoint_dir(options.checkpoint_dir)
    if options.shared.verify_checkpoint:
        note(*require_intact(Path(peft_dir), f"--from_peft {peft_dir}"))
    return import_adapters(Path(peft_dir), base, read_model_config(base)).lora
