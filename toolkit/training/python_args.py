"""Convert models, datasets, optimizers and options from Python into run arguments."""

import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from toolkit.checkpoints.store import FINAL
from toolkit.config import AUTO, TrainingCommand, none_if_auto
from toolkit.config.command import as_mapping, parse_object
from toolkit.data.base import DataModule
from toolkit.data.tokens.iterable import IN_ORDER, is_iterable, is_loader, iterable_rows
from toolkit.data.tokens.rows import InMemoryDataset, PythonData
from toolkit.distributed import ranks
from toolkit.distributed.signals import restore_handlers_on_exit
from toolkit.errors import PeerShutdownError, UserError, require_option
from toolkit.extension import is_built_in
from toolkit.io.paths import require_local
from toolkit.io.streams import open_missing_streams
from toolkit.models.block import Block
from toolkit.models.config import ModelConfig, ModelOverrides
from toolkit.models.gpt import GPT
from toolkit.models.loss_wrapper import LossWrapper, find_blocks
from toolkit.planning.run_args import RunArgs
from toolkit.planning.start_checks import check_start
from toolkit.planning.training_options import OPTIONS, PretrainOptions, TrainingOptions, run_args
from toolkit.training.checkpoint_meta import read_meta
from toolkit.training.launch import detect_devices
from toolkit.training.run import Callback
from toolkit.ui.loggers import read_metrics

Blocks = tuple[type[nn.Module], ...]
BlockNames = Iterable[type[nn.Module] | str] | None
"""Block classes as the user gives them."""


@dataclass(frozen=True)
class TrainResult:
    """Result of a run, the same on every rank. With ``dry_run``, step is 0 and there is no checkpoint.

    Args:
        out_dir: Run folder; with remote storage, the local staging folder.
        checkpoint: Folder of the final checkpoint, ``out_dir/final``.
        step: Number of completed optimizer steps.
        tokens: Input tokens so far, over all ranks.
        metrics: The last row of metrics.csv: loss, val_loss with validation data, ...
    """

    out_dir: Path
    checkpoint: Path
    step: int
    tokens: int
    metrics: dict[str, float]


@contextmanager
def names_arguments() -> Iterator[None]:
    """Context that rewrites flags in error messages as Python argument names, without dashes."""
    try:
        yield
    except UserError as error:
        text = str(error).replace("--resume auto", 'resume="auto"').replace("see --help", "see help(toolkit.train)")
        error.args = (re.sub(r"(?<![\w-])--(?=[a-z])(?!help\b)", "", text),)
        raise


def read_run_args(
    command: TrainingCommand,
    options: dict[str, Any],
    model: Any = None,
    dataset: Any = None,
    val_dataset: Any = None,
    optimizer: Any = None,
    block_classes: BlockNames = None,
    num_workers: int = 0,
    allow_duplicate_data: bool = False,
) -> RunArgs:
    """Convert Python arguments to RunArgs.

    Args:
        command: The training command.
        options: The command's options by name; groups are dictionaries or objects.

    For the other arguments see :func:`toolkit.train`.
    """
    if not isinstance(strategy := options.get("strategy", AUTO), str):
        raise UserError(f"strategy {type(strategy).__name__}: give a name, such as 'fsdp', and options as fsdp={{...}}")
    chosen, optimizer_class = _read_optimizer(optimizer)
    cls = OPTIONS[command]
    ready: TrainingOptions = cls(**parse_object(cls, options | {"optimizer": chosen}))
    module: nn.Module | None = None
    blocks: Blocks = ()
    if isinstance(ready, PretrainOptions):
        ready, module, blocks = _read_model(model, block_classes, ready)
    data = _read_data(dataset, val_dataset, num_workers, allow_duplicate_data, options.get("data"), ready, module)
    for name, value in vars(data).items() if is_built_in(type(data)) else ():
        if name not in data.takes_urls:
            require_local(f"data.{name}", value)
    return run_args(replace(ready, data=data), module=module, block_classes=blocks, optimizer_class=optimizer_class)


def run_from_python(
    args: RunArgs, callbacks: Iterable[Callback], run: Callable[[RunArgs, list[Callback]], None]
) -> TrainResult:
    """Call ``run`` to train from a Python script; return the result on all ranks."""
    open_missing_streams()
    callbacks = list(callbacks)
    for callback in callbacks:
        if not isinstance(callback, Callback):
            name = getattr(callback, "__name__", type(callback).__name__)
            raise UserError(f"callbacks {name}: must be objects of a class of toolkit.Callback")
    check_start(args, has_callbacks=bool(callbacks))
    hint = "only the command line starts a run again; start the script with torchrun --max_restarts"
    require_option(args.max_restarts == 0, "max_restarts", args.max_restarts, hint)
    _require_script(args)
    try:
        with restore_handlers_on_exit():
            run(args, callbacks)
        if args.dry_run:
            return TrainResult(args.run_dir, args.run_dir / FINAL, 0, 0, {})
        return ranks.result_of_rank0(lambda: read_result(args.run_dir))
    except PeerShutdownError as error:
        raise SystemExit(error.exit_code) from None  # a traceback here would hide the reason that rank 0 prints


def read_result(out_dir: Path) -> TrainResult:
    checkpoint = out_dir / FINAL
    meta, rows = read_meta(checkpoint), read_metrics(out_dir / "logs" / "metrics.csv")
    last = {name: value for name, value in (rows[-1] if rows else {}).items() if value == value}  # NaN is an empty cell
    metrics = {name: value for name, value in last.items() if name not in ("step", "tokens")}
    return TrainResult(out_dir, checkpoint, meta["step"], meta["tokens"], metrics)


def _require_script(args: RunArgs) -> None:
    """Raise UserError if more processes are needed but there is no script file for them to run."""
    _, world = detect_devices(args)
    if world.starts_processes and not Path(getattr(sys.modules["__main__"], "__file__", None) or "").is_file():
        raise UserError(
            f"devices {world.devices}: the other processes need a script file, which a notebook, an interactive "
            "prompt, stdin and python -c lack; run a script file, or use devices=1"
        )


def _read_model(
    model: Any, block_classes: BlockNames, options: PretrainOptions
) -> tuple[PretrainOptions, nn.Module | None, Blocks]:
    """Return the options with the model, or a user-provided module and its block classes."""
    if model is not None and options.model_name is not None:
        raise UserError(f"model_name {options.model_name}: a model is also given; remove one of them")
    if isinstance(model, nn.Module):
        no_effect = {
            "initial_checkpoint_dir": options.initial_checkpoint_dir is not None,
            "model_config": options.model_config != ModelOverrides(),
            "train.tie_embeddings": options.train.tie_embeddings is not None,
        }
        for name in (name for name, is_set in no_effect.items() if is_set):
            raise UserError(f"{name}: has no effect on a user-provided module; change the module instead")
        if any(p.is_meta for p in model.parameters()):
            raise UserError("model: has weights on the meta device, without values; build it on the CPU")
        if isinstance(model, GPT):
            return options, model, (Block,)
        blocks = find_blocks(model, block_classes)
        if (compiler := options.shared.compiler) not in (AUTO, "none") and not blocks:
            raise UserError(f"compiler {compiler}: compiles blocks, but found none in the module; set block_classes")
        return options, LossWrapper(model), blocks
    if block_classes is not None:
        raise UserError("block_classes: has no effect on toolkit's models, whose blocks are known; remove it")
    if model is None or isinstance(model, str):
        return replace(options, model_name=model or options.model_name), None, ()
    if not isinstance(model, ModelConfig):
        raise UserError(f"model {type(model).__name__}: must be a model's name, a ModelConfig or a torch.nn.Module")
    if options.initial_checkpoint_dir is not None:
        raise UserError("initial_checkpoint_dir: defines the architecture; remove it or the ModelConfig")
    overrides = ModelOverrides(**model.override(options.model_config).to_dict())
    return replace(options, model_config=overrides), None, ()


def _read_data(
    dataset: Any,
    val_dataset: Any,
    num_workers: int,
    allow_duplicates: bool,
    data: DataModule | None,
    options: TrainingOptions,
    module: nn.Module | None,
) -> DataModule:
    train = options.train
    if allow_duplicates and not is_loader(dataset):
        raise UserError("allow_duplicate_data True: has no effect without a DataLoader; remove it")
    if dataset is not None and data is not None:
        raise UserError("data: a dataset is also given; remove one of them")
    if dataset is None or isinstance(dataset, DataModule):
        if val_dataset is not None or num_workers:
            name = "num_workers" if num_workers else "val_dataset"
            raise UserError(f"{name}: has no effect with a DataModule; set it on the DataModule")
        if isinstance(module, LossWrapper) and train.max_seq_length == AUTO:
            raise UserError("train.max_seq_length: must be set, because the model's context length is unknown")
        return options.data if dataset is None else dataset
    rows: Any
    max_length = none_if_auto(train.max_seq_length)
    if is_iterable(dataset):
        if num_workers:
            raise UserError(f"num_workers {num_workers}: {IN_ORDER}")
        rows = iterable_rows(dataset, max_length, allow_duplicates)
    else:
        rows = InMemoryDataset("dataset", dataset, max_length)
    ready = PythonData(rows, val_dataset, max_length, num_workers)
    other_limits = (train.max_steps, train.epochs, train.max_time)
    if ready.train.is_ragged and (train.max_tokens is not None or other_limits == (None, None, None)):
        raise UserError(
            f"train.max_tokens {train.max_tokens}: the rows of the dataset differ in length, and the LR schedule needs "
            "the number of steps; give train.max_steps or train.epochs"
        )
    return ready


def _read_optimizer(value: Any) -> tuple[dict[str, Any], type[Optimizer] | None]:
    """Return the options of ``--optimizer``, and the class if it is not from torch.optim."""
    if value is None:
        return {}, None
    if inspect.isclass(value) or isinstance(value, str):
        value = {"name": value}
    if isinstance(value, Optimizer):
        raise UserError(
            f"optimizer {type(value).__name__}: give the class; the run builds the optimizer from the sharded weights"
        )
    values = dict(as_mapping("optimizer", value))
    cls = values.get("name")
    if not inspect.isclass(cls):
        return values, None
    if not issubclass(cls, Optimizer):
        raise UserError(f"optimizer {cls.__name__}: must be a class derived from torch.optim.Optimizer")
    name = cls.__name__
    if getattr(torch.optim, name, None) is cls:
        return values | {"name": name}, None
    return values | {"name": f"{cls.__module__}.{cls.__qualname__}"}, cls
