"""`toolkit pretrain`: train a language model on text."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Mapping
from typing import Any

from toolkit.config import AUTO, Auto, EvalArgs, OptimizerArgs, Precision, RunOptions, TrainArgs
from toolkit.data import DataModule, PythonStdlib
from toolkit.extension import NO_GROUPS, describe_extensions
from toolkit.models.config import ModelOverrides
from toolkit.objectives import NextToken, Objective


def setup(
    model_name: str | None = None,
    model_config: ModelOverrides = ModelOverrides(),
    data: DataModule = PythonStdlib(),
    train: TrainArgs = TrainArgs(global_batch_size=64, learning_rate=4e-4, keep_last=3),
    eval: EvalArgs = EvalArgs(),
    optimizer: OptimizerArgs = OptimizerArgs(),
    objective: Objective = NextToken(),
    out_dir: str = "out/pretrain",
    initial_checkpoint_dir: str | None = None,
    precision: Precision | Auto = AUTO,
    shared: RunOptions = RunOptions(),
    groups: Mapping[str, Any] = NO_GROUPS,
) -> None:
    """Train a language model on text, from scratch or from a checkpoint.

    `toolkit pretrain list` prints the names of the models.

    Args:
        model_name: A named architecture. Default: mini-llama, which trains on any machine.
        model_config: Overrides of single fields of the named architecture.
        data: Training data.
        train: Training options.
        eval: Validation options.
        optimizer: Optimizer options.
        objective: The training objective.
        out_dir: Folder for checkpoints and logs; also on remote storage, such as s3://bucket/run.
        initial_checkpoint_dir: Start from the weights of this checkpoint folder, or of a name below checkpoints/.
        precision: auto: 32-true on CPU, bf16-mixed on CUDA.
        shared: See :class:`toolkit.config.RunOptions`.
        groups: Options of extensions by group.
    """
    if model_name == "list":
        _print_names()
        return
    from toolkit.planning.options import check_start
    from toolkit.planning.run_args import run_args

    args = run_args(
        "pretrain", shared, model_name=model_name, model_config=model_config,
        initial_checkpoint_dir=initial_checkpoint_dir, data=data, train=train, eval=eval, optimizer=optimizer,
        objective=objective, out_dir=out_dir, precision=precision, groups=groups,
    )  # fmt: skip
    check_start(args)
    from toolkit.training.trainer import run_training  # imports torch

    run_training(args)


def _print_names() -> None:
    from toolkit.models.families import list_aliases, list_names_by_family

    width = max(40, shutil.get_terminal_size((100, 24)).columns)
    for family, names in list_names_by_family().items():
        lines = textwrap.wrap("  ".join(names), width - 12, break_long_words=False, break_on_hyphens=False)
        print("\n".join(f"{label:11} {line}" for label, line in zip([family, *[""] * len(lines)], lines, strict=False)))
    print(f"\nAlso {len(list_aliases())} model names of the same architectures: Llama-3.1-8B-Instruct, ...")
    print("Names are case-insensitive; an organization prefix is ignored.")
    for line in describe_extensions():
        print(f"Extension {line}")
