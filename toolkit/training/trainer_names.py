"""Convert arguments of ``toolkit.Trainer``, also by other trainers' names, to :func:`toolkit.train`'s."""

import inspect
from dataclasses import fields
from typing import Any

from torch.optim import Optimizer
from torch.utils import data as torch_data

from toolkit.config import AUTO, PRETRAIN, DDPArgs, FSDPArgs, TrainArgs, none_if_auto
from toolkit.config.command import CommandOptions, as_mapping
from toolkit.config.dialects import dialects
from toolkit.config.other_tools import suggest_option
from toolkit.data.base import DataModule
from toolkit.distributed import script
from toolkit.distributed.world import count_processes
from toolkit.errors import UserError, did_you_mean
from toolkit.planning.training_options import PretrainOptions


class DataLoader(torch_data.DataLoader):
    """torch's DataLoader with OpenLanguageModel's ``distributed``: a DistributedSampler of torchrun's ranks."""

    def __init__(self, dataset: Any, batch_size: int = 1, *, distributed: bool = False, **options: Any) -> None:
        if isinstance(dataset, DataModule):
            raise UserError(f"DataLoader {type(dataset).__name__}: give it to the Trainer itself, with batch_size=...")
        if distributed and not isinstance(dataset, torch_data.IterableDataset):
            shuffle, size, rank = options.pop("shuffle", True), script.get_world_size(), script.get_rank()
            options["sampler"] = torch_data.DistributedSampler(dataset, size, rank, shuffle)
        super().__init__(dataset, batch_size, **options)


PYTHON_OBJECTS = (
    "model", "dataset", "val_dataset", "optimizer", "block_classes", "num_workers", "allow_duplicate_data",
)  # fmt: skip
"""Arguments of :func:`toolkit.train` that are not options of the command."""
_GROUPS: dict[str, Any] = {"train": TrainArgs, "ddp": DDPArgs, "fsdp": FSDPArgs}
_OPTIONS = {
    **{field.name: f"{name}.{field.name}" for name, group in _GROUPS.items() for field in fields(group)},
    "batch_size": "train.micro_batch_size",
}
"""Options that are arguments by their last name."""


def trainer_options(positional: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a Trainer by name.

    Args:
        positional: The dataset; or an optimizer class and the dataset, as in Trainer(model, optimizer class, loader).
        options: The other arguments by name.
    """
    dataset, *more = positional
    if inspect.isclass(dataset) and issubclass(dataset, Optimizer):
        options = options | {"optimizer": dataset}
        dataset, more = (more[0], more[1:]) if more else (None, [])
    if more:
        raise UserError(f"Trainer(model, dataset): {len(more)} more positional arguments; pass them by name")
    loader = options.pop("dataloader", None)
    if loader is not None and dataset is not None:
        raise UserError("dataloader: a dataset is also given; remove one of them")
    return options | {"dataset": dataset if loader is None else loader}


def translate(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of :func:`toolkit.train` for those of a Trainer.

    Raises:
        UserError: an argument is unknown or set twice.
    """
    command = CommandOptions(PretrainOptions)
    names = (*command.parameters, *PYTHON_OBJECTS, "callbacks", "data", "extensions")
    options = {name: value for name, value in arguments.items() if name in names}
    foreign = {name: convert for dialect in dialects() for name, convert in dialect.arguments.items()}
    for name, value in arguments.items():
        if name in foreign:
            for option, converted in foreign[name](value).items():
                _set(options, option, converted, name)
        elif name in _OPTIONS:
            _set(options, _OPTIONS[name], value, name)
        elif name not in options and name != "grad_accum_steps":
            hint = suggest_option(name, command.options(), lambda option: option.rpartition(".")[2])
            hint = hint or did_you_mean(name, [*names, *_OPTIONS, *foreign, "grad_accum_steps"])
            raise UserError(f"{name}: no such argument{hint or '; see toolkit.Trainer'}")
    accumulation = arguments.get("grad_accum_steps")
    is_ported = "batch_size" in arguments or isinstance(arguments["dataset"], torch_data.DataLoader)
    if accumulation is None and is_ported and "global_batch_size" not in as_mapping("train", options.get("train", {})):
        accumulation = 1  # OpenLanguageModel's default
    if accumulation is not None:
        _set_global_batch_size(options, accumulation, arguments["dataset"])
    return options


def _set(options: dict[str, Any], option: str, value: Any, name: str) -> None:
    """Set an option by its dotted name. ``name`` is the user's argument, for error messages."""
    group, _, inner = option.rpartition(".")
    values = options
    if group == "optimizer" and not isinstance(options.get(group), dict):
        options[group] = {"name": options[group]} if options.get(group) is not None else {}
    if group:
        values = options[group] = dict(as_mapping(group, options.get(group, {})))
    if inner in values:
        raise UserError(f"{name}: {option} is also given; remove one of them")
    values[inner] = value


def _set_global_batch_size(options: dict[str, Any], accumulation: int, dataset: Any) -> None:
    """Set the global batch size to micro-batch size x processes x ``accumulation``."""
    train = dict(as_mapping("train", options.get("train", {})))
    if "micro_batch_size" not in train and isinstance(dataset, torch_data.DataLoader):
        train["micro_batch_size"] = dataset.batch_size
    micro = none_if_auto(train.get("micro_batch_size") or AUTO) or PRETRAIN.micro_batch_size
    options["train"] = train | {"micro_batch_size": micro}
    processes = count_processes(*(options.get(name, AUTO) for name in ("devices", "num_nodes", "accelerator")))
    _set(options, "train.global_batch_size", micro * processes * accumulation, "grad_accum_steps")
