"""`toolkit pretrain`: train a language model on text."""

from __future__ import annotations

import shutil
import textwrap
from typing import Literal

from toolkit.args import (
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
    timeout: float | None = None,
    seed: int = 42,
) -> None:
    """Train a language model on text, from scratch or from a checkpoint.

    `toolkit pretrain list` prints the names of the models.

    Args:
        model_name: A named architecture; mini-llama, which any machine can train, when not given.
        model_config: Single fields of the architecture, set over those of the named one.
        data: What to train on.
        train: How to train.
        eval: When to validate.
        log: Names under which a logger files the run.
        optimizer: Which optimizer.
        out_dir: Where checkpoints and logs go.
        resume: Go on from a checkpoint: true (the newest in out_dir), auto (the newest intact one, if there is any), or
            a path.
        verify_checkpoint: Compare files with their checksums before they are used; false also reads edited files.
        initial_checkpoint_dir: Start from the weights of this checkpoint, or of a name below checkpoints/.
        tokenizer_dir: A folder with a tokenizer.json; without it the data module trains its own where it can.
        accelerator: Where to compute.
        devices: Devices per node; auto takes all GPUs, or one process on a CPU, or what torchrun or SLURM say.
        num_nodes: Machines; one, or what torchrun or SLURM say, when not given.
        strategy: How devices share the work; auto shards the model over them (fsdp), or takes the one there is.
        fsdp: How to shard.
        ddp: How to keep whole copies equal.
        precision: 32-true on a CPU and bf16-mixed on CUDA when not given.
        compiler: Compile the blocks with torch.compile.
        deterministic: Take only algorithms that give the same bits every time: slower on CUDA; a CPU's always do.
        logger_name: Where metrics go besides logs/metrics.csv: tensorboard, wandb, mlflow, or several with commas
            between them; csv is that file alone.
        timeout: Minutes to wait for a process that does not answer; 30 until the first step is done, then 5.
        seed: Chooses initial weights and the order of the data.
    """
    arguments = dict(locals())
    if model_name == "list":
        _print_names()
        return
    from toolkit.training.run import RunArgs, run_training

    run_training(RunArgs(defaults=PRETRAIN, **arguments))


def _print_names() -> None:
    """Print the names of all configurations, family by family."""
    from toolkit.models.families import list_aliases, list_names_by_family

    width = max(40, shutil.get_terminal_size((100, 24)).columns)
    for family, names in list_names_by_family().items():
        lines = textwrap.wrap("  ".join(names), width - 12, break_long_words=False, break_on_hyphens=False)
        print("\n".join(f"{label:12}{line}" for label, line in zip([family, *[""] * len(lines)], lines, strict=False)))
    print(f"\nAlso {len(list_aliases())} names of models of the same architectures: Llama-3.1-8B-Instruct, ...")
    print("Upper or lower case, and an organisation in front, do not matter.")
