"""`toolkit pretrain`: train a language model on text."""

from __future__ import annotations

import shutil
import textwrap
from typing import Any, Literal

from toolkit.config import (
    PRETRAIN,
    Accelerator,
    DDPArgs,
    Devices,
    EvalArgs,
    FSDPArgs,
    LogArgs,
    OptimizerArgs,
    Precision,
    Strategy,
    TrainArgs,
)
from toolkit.data import DataModule, PythonStdlib
from toolkit.models.config import ModelOverrides


def setup(
    model_name: str | None = None,
    model_config: ModelOverrides = ModelOverrides(),
    data: DataModule = PythonStdlib(),
    train: TrainArgs = TrainArgs(),
    eval: EvalArgs = EvalArgs(),
    log: LogArgs = LogArgs(),
    optimizer: OptimizerArgs = OptimizerArgs(),
    out_dir: str = PRETRAIN.out_dir,
    resume: bool | str = False,
    verify_checkpoint: bool = True,
    initial_checkpoint_dir: str | None = None,
    tokenizer_dir: str | None = None,
    accelerator: Accelerator = "auto",
    devices: Devices = "auto",
    num_nodes: int | None = None,
    strategy: Strategy = "auto",
    fsdp: FSDPArgs = FSDPArgs(),
    ddp: DDPArgs = DDPArgs(),
    precision: Precision | None = None,
    compiler: Literal["none", "torch"] = "none",
    deterministic: bool = False,
    logger_name: str = "csv",
    callbacks: str | list[Any] | None = None,
    timeout: float | None = None,
    seed: int = 42,
) -> None:
    """Train a language model on text, from scratch or from a checkpoint.

    `toolkit pretrain list` prints the names of the models.

    Args:
        model_name: A named architecture. Default: mini-llama, which trains on any machine.
        model_config: Overrides of single fields of the named architecture.
        data: Training data.
        train: Training options.
        eval: Validation options.
        log: Names for loggers: project, run, group.
        optimizer: Optimizer options.
        out_dir: Folder for checkpoints and logs.
        resume: Resume from a checkpoint: true (the newest in out_dir), auto (the newest intact one, if any), or a path.
        verify_checkpoint: Verify checksums before loading; false accepts edited files.
        initial_checkpoint_dir: Start from the weights of this checkpoint folder, or of a name below checkpoints/.
        tokenizer_dir: A folder with a tokenizer.json. Default: the data module trains one if it can.
        accelerator: Device type.
        devices: Devices per node. auto: all GPUs, one process on a CPU, or as set by torchrun or SLURM.
        num_nodes: Number of nodes. Default: 1, or as set by torchrun or SLURM.
        strategy: Distributed strategy. auto: fsdp on several devices, single on one.
        fsdp: FSDP options.
        ddp: DDP options.
        precision: Default: 32-true on CPU, bf16-mixed on CUDA.
        compiler: Compile the blocks with torch.compile.
        deterministic: Use deterministic algorithms only: slower on CUDA, no change on CPU.
        logger_name: Loggers besides logs/metrics.csv: tensorboard, wandb, mlflow, or several separated by commas; csv
            adds none.
        callbacks: Class paths of callbacks, separated by commas, such as my_module.MyCallback; in YAML also a list of
            class_path and init_args. See tutorials/extend.md.
        timeout: Minutes before an unresponsive process aborts the run. Default: 30 until the first step, then 5.
        seed: Random seed of initial weights and data order.
    """
    arguments = dict(locals())
    if model_name == "list":
        _print_names()
        return
    from toolkit.planning.run_args import RunArgs
    from toolkit.training.run import run_training

    run_training(RunArgs(defaults=PRETRAIN, **arguments))


def _print_names() -> None:
    """Print the names of all configurations, family by family."""
    from toolkit.models.families import list_aliases, list_names_by_family

    width = max(40, shutil.get_terminal_size((100, 24)).columns)
    for family, names in list_names_by_family().items():
        lines = textwrap.wrap("  ".join(names), width - 12, break_long_words=False, break_on_hyphens=False)
        print("\n".join(f"{label:12}{line}" for label, line in zip([family, *[""] * len(lines)], lines, strict=False)))
    print(f"\nAlso {len(list_aliases())} model names of the same architectures: Llama-3.1-8B-Instruct, ...")
    print("Names are case-insensitive; an organization prefix is ignored.")
