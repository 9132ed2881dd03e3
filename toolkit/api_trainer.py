"""``toolkit.Trainer``: the arguments of :func:`toolkit.train` one by one, also under the names of OpenLanguageModel."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from typing import Any

from torch.optim import Optimizer
from torch.utils.data import DataLoader

from toolkit.api import TrainResult, train
from toolkit.commands import pretrain
from toolkit.config import AUTO, PRETRAIN, FSDPArgs, TrainArgs, none_if_auto
from toolkit.config.command import CommandOptions, as_mapping
from toolkit.config.elsewhere import elsewhere
from toolkit.distributed import script
from toolkit.distributed.world import count_processes
from toolkit.errors import UserError, did_you_mean

_OBJECTS = ("optimizer", "block_classes", "num_workers", "allow_duplicate_data", "callbacks", "data", "extensions")
_RENAMED = {
    "batch_size": "train.micro_batch_size",
    "context_length": "train.max_seq_length",
    "warmup_steps": "train.lr_warmup_steps",
    "weight_decay": "optimizer.weight_decay",
    **{name: f"fsdp.{name}" for name in ("sharding_strategy", "min_num_params", "cpu_offload", "limit_all_gathers")},
    **{name: f"ddp.{name}" for name in ("find_unused_parameters", "bucket_cap_mb", "gradient_as_bucket_view")},
    "static_graph": "ddp.static_graph",
}
"""Names with the same meaning as an option of another name; also every option of the group ``train`` by itself."""
_NAMES = _RENAMED | {field.name: f"train.{field.name}" for field in fields(TrainArgs)}
_TRANSLATED = (
    "device", "grad_accum_steps", "grad_clip_norm", "dataloader", "use_amp", "mixed_precision_policy",
    "auto_wrap_policy", "transformer_layer_cls", "backward_prefetch",
)  # fmt: skip


class Trainer:
    """One run on one device, with ddp or with FSDP: the arguments of :func:`toolkit.train`, checked when it is made.

    Options of the group ``train`` may be given by themselves, as ``max_steps=100``, and the arguments of
    OpenLanguageModel's trainers where they mean the same: dataloader, device, context_length, grad_accum_steps,
    weight_decay, grad_clip_norm, sharding_strategy and others.

    Args:
        model: See :func:`toolkit.train`.
        dataset: See :func:`toolkit.train`. With ``grad_accum_steps``, a DataLoader's batch size is the micro-batch's.
        val_dataset: Held-out rows.
        preset: "balanced", "memory" or "speed", see ``--preset``.
        strategy: "auto", "single", "ddp" or "fsdp".
        options: As described above, and every other argument of :func:`toolkit.train`.

    Raises:
        UserError: an unknown name, with the nearest known one, or an argument that is given twice.
    """

    def __init__(
        self,
        model: Any = None,
        dataset: Any = None,
        *more: Any,
        val_dataset: Any = None,
        preset: str | None = None,
        strategy: str = "auto",
        **options: Any,
    ) -> None:
        if inspect.isclass(dataset) and issubclass(dataset, Optimizer):  # Trainer(model, optimizer class, loader)
            options["optimizer"] = dataset
            dataset, more = (more[0], more[1:]) if more else (None, ())
        if more:
            raise UserError(f"Trainer(model, dataset): {len(more)} further positional arguments; name them")
        if "dataloader" in options:
            if dataset is not None:
                raise UserError("dataloader: a dataset is given, too; leave one of them out")
            dataset = options.pop("dataloader")
        self._arguments = {"model": model, "dataset": dataset, "val_dataset": val_dataset}
        self._options = {"strategy": strategy, "preset": preset or "balanced"} | options
        self.result: TrainResult | None = None
        _translate(self._options, dataset)

    def fit(self, **limits: Any) -> TrainResult:
        """Train, and return how the run ended; ``limits`` are further options, such as ``max_steps=100``.

        Raises:
            See :func:`toolkit.train`.
        """
        for name in limits.keys() & self._options.keys():
            raise UserError(f"{name}: is given to Trainer, too; leave one of them out")
        options = _translate(self._options | limits, self._arguments["dataset"])
        self.result = train(**self._arguments, **options)
        return self.result

    train = fit


def _translate(given: dict[str, Any], dataset: Any) -> dict[str, Any]:
    """Return the arguments for :func:`toolkit.train`."""
    parameters = CommandOptions(pretrain.setup).parameters
    known = [*parameters, *_OBJECTS, *_NAMES, *_TRANSLATED]
    options = {name: value for name, value in given.items() if name in parameters or name in _OBJECTS}
    for name, value in given.items():
        if name not in known:
            hint = elsewhere(name, CommandOptions(pretrain.setup).options(), lambda option: option.rpartition(".")[2])
            raise UserError(f"{name}: no such argument{hint or did_you_mean(name, known) or '; see toolkit.Trainer'}")
        if name in _NAMES:
            _put(options, _NAMES[name], value, name)
    _translate_device(options, given)
    _translate_wrapping(options, given)
    if "grad_clip_norm" in given:
        _put(options, "train.max_norm", given["grad_clip_norm"] or 0, "grad_clip_norm")
    if "use_amp" in given:  # auto: bf16-mixed on CUDA
        _put(options, "precision", "auto" if given["use_amp"] else "32-true", "use_amp")
    if policy := given.get("mixed_precision_policy"):
        precisions = {"bf16": "bf16-mixed", "fp16": "16-mixed"}
        _put(options, "precision", precisions.get(policy, policy), "mixed_precision_policy")
    if "grad_accum_steps" in given:
        _translate_accumulation(options, given["grad_accum_steps"], dataset)
    return options


def _put(options: dict[str, Any], option: str, value: Any, name: str) -> None:
    """Set an option by its dotted name; ``name`` is the one that was given."""
    group, _, inner = option.rpartition(".")
    values = options
    if group == "optimizer" and not isinstance(options.get(group), dict):
        options[group] = {"name": options[group]} if options.get(group) is not None else {}
    if group:
        values = options[group] = dict(as_mapping(group, options.get(group, {})))
    if inner in values:
        raise UserError(f"{name}: {option} is given, too; leave one of them out")
    values[inner] = value


def _translate_device(options: dict[str, Any], given: dict[str, Any]) -> None:
    """``device`` is "auto", a kind of device, or "cuda:N", which every rank has of its own."""
    if (device := given.get("device")) is None:
        return
    kind, _, index = re.sub(":auto$", "", str(device)).partition(":")
    if index and index != str(rank := script.get_local_rank()):
        raise UserError(f"device {device}: each process takes the device of its local rank, here {rank}; use {kind}")
    _put(options, "accelerator", kind, "device")


def _translate_wrapping(options: dict[str, Any], given: dict[str, Any]) -> None:
    if "backward_prefetch" in given:
        names = {"BACKWARD_PRE": "pre", "BACKWARD_POST": "post", None: "none"}
        value = given["backward_prefetch"]
        _put(options, "fsdp.backward_prefetch", names.get(value, value), "backward_prefetch")
    if "transformer_layer_cls" in given:
        _put(options, "block_classes", [given["transformer_layer_cls"]], "transformer_layer_cls")
    if "auto_wrap_policy" in given:
        value = {"transformer": "block"}.get(given["auto_wrap_policy"], given["auto_wrap_policy"])
        _put(options, "fsdp.auto_wrap", value or FSDPArgs.auto_wrap, "auto_wrap_policy")


def _translate_accumulation(options: dict[str, Any], steps: int, dataset: Any) -> None:
    """Set the global batch size to the micro-batch size x devices x ``steps``."""
    group = dict(as_mapping("train", options.get("train", {})))
    if "micro_batch_size" not in group and isinstance(dataset, DataLoader) and dataset.batch_size is not None:
        _put(options, "train.micro_batch_size", dataset.batch_size, "dataset")
    micro = none_if_auto(options.get("train", {}).get("micro_batch_size", AUTO))
    if micro is None:  # it defines the number of steps
        micro = PRETRAIN.micro_batch_size
        options["train"] = {**as_mapping("train", options.get("train", {})), "micro_batch_size": micro}
    devices, nodes = (options.get(name, AUTO) for name in ("devices", "num_nodes"))
    world_size = count_processes(devices, nodes, options.get("accelerator", AUTO))
    _put(options, "train.global_batch_size", micro * world_size * steps, "grad_accum_steps")
