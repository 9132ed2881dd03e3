"""FSDP units (modules whose weights are all-gathered together) and their dtypes. Does not import Lightning.

Units depend only on the options and the model, which may be on the meta device. ``toolkit plan``, the run's message and
FSDP use the same units.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import NamedTuple

import torch
from torch import nn

from toolkit.config import AUTO, Dtype, FSDPArgs, Precision
from toolkit.distributed.device import DTYPES
from toolkit.errors import UserError, did_you_mean
from toolkit.models.gpt import GPT
from toolkit.models.head import Head

MIN_NUM_PARAMS = 100_000_000
"""Value of ``FSDPArgs.min_num_params`` for auto, as in torch."""

AUTOCAST_DTYPES = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
"""Dtypes of autocast by precision."""

HEAD, EMBEDDING, PER_LAYER = "lm_head", "transformer.wte", "transformer.wte_per_layer"
"""Names of GPT's head and embedding, and of the embedding of per-layer inputs, which only some models have."""

LOSS_WRAPPER_PREFIX = "module"
"""Name of a user-provided model in :class:`toolkit.models.loss_wrapper.LossWrapper`."""


class Unit(NamedTuple):
    """An FSDP unit, all-gathered in the forward of ``module``. The root unit has the name "".

    ``parameters`` excludes the parameters of units inside this one. ``is_block``: whether the unit is all-gathered in
    the dtype of the blocks: blocks, and other units without an embedding or head; not the root.
    """

    name: str
    module: nn.Module
    parameters: list[nn.Parameter]
    is_block: bool

    @property
    def size(self) -> int:
        return sum(p.numel() for p in self.parameters)


def plan_units(module: nn.Module, options: FSDPArgs, block_classes: tuple[type[nn.Module], ...]) -> list[Unit]:
    """Return the units in the order of the forward pass, the root first.

    With units by block, an untied head and embedding of GPT are units, and the embedding of per-layer inputs.
    """
    if options.auto_wrap == "block":
        names = {name for name, part in module.named_modules() if isinstance(part, block_classes) or name == PER_LAYER}
        if isinstance(module, GPT) and not module.config.tie_embeddings:
            names |= {HEAD, EMBEDDING}
    elif options.auto_wrap == "class":
        classes = options.wrap_classes or []
        names = _by_class(module, re.split(r",\s*", classes) if isinstance(classes, str) else classes)
    else:
        names = _by_size(module, _min_num_params(options))

    def is_block(part: nn.Module) -> bool:
        has_embedding = any(isinstance(inner, (nn.Embedding, Head)) for inner in part.modules())
        return part is not module and (isinstance(part, block_classes) or not has_embedding)

    parts = ((name, part) for name, part in module.named_modules() if name in names or not name)
    units = {name: Unit(name, part, [], is_block(part)) for name, part in parts}
    for name, parameter in module.named_parameters():
        owner = name
        while owner not in units:
            owner = owner.rpartition(".")[0]
        units[owner].parameters.append(parameter)
    return sorted(units.values(), key=lambda unit: unit.name == HEAD)


def _candidates(module: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that may be units, by name: not the model, containers, or modules that share weights."""
    parts = {
        name: part
        for name, part in module.named_modules()
        if type(part).forward is not nn.Module.forward and name not in ("", LOSS_WRAPPER_PREFIX)
    }
    if isinstance(module, GPT):
        return {name: part for name, part in parts.items() if getattr(part, "may_be_unit", False)}
    uses = Counter(id(p) for _, p in module.named_parameters(remove_duplicate=False))

    def has_own_weights(part: nn.Module) -> bool:
        inside = Counter(id(p) for _, p in part.named_parameters(remove_duplicate=False))
        return all(uses[parameter] == count for parameter, count in inside.items())

    return {name: part for name, part in parts.items() if has_own_weights(part)}


def _by_class(module: nn.Module, names: list[str]) -> set[str]:
    candidates = _candidates(module)
    valid_names = dict.fromkeys(type(part).__name__ for part in candidates.values())
    for name in names:
        if name not in valid_names:
            is_present = any(type(part).__name__ == name for part in module.modules())
            why = "this part cannot be a unit" if is_present else "the model has no part of this class"
            hint = did_you_mean(name, valid_names) or f"; use some of {', '.join(valid_names)}"
            raise UserError(f"--fsdp.wrap_classes {name}: {why}{hint}")
    return {name for name, part in candidates.items() if type(part).__name__ in names}


def _by_size(module: nn.Module, min_num_params: int) -> set[str]:
    """Return the modules with enough parameters outside inner units, as torch's policy does."""
    candidates, sizes = _candidates(module), Counter[str]()
    names: set[str] = set()
    for name, part in reversed(list(module.named_modules())):  # inner modules before outer ones
        sizes[name] += sum(p.numel() for p in part.parameters(recurse=False))
        if name in candidates and sizes[name] >= min_num_params:
            names.add(name)
        elif name:
            sizes[name.rpartition(".")[0]] += sizes[name]
    return names


def _min_num_params(options: FSDPArgs) -> int:
    return MIN_NUM_PARAMS if options.min_num_params == AUTO else options.min_num_params


def describe_units(units: list[Unit], options: FSDPArgs) -> str:
    """Return the wrap plan in words: ``2 x Block, 3,072 parameters each; root 4,096``."""
    counts = Counter((type(unit.module).__name__, unit.size) for unit in units[1:])
    parts = [
        f"{n} x {name}, {size:,} parameters each" if n > 1 else f"{name}, {size:,}"
        for (name, size), n in counts.most_common()
    ]
    if len(units) > 1:
        return "; ".join([*parts, f"root, {units[0].size:,}"])
    text = f"root, {units[0].size:,} parameters"
    if options.auto_wrap == "size":
        threshold = f"--fsdp.min_num_params {_min_num_params(options):,}"
        text += f"; {threshold} wraps nothing, so that all weights are gathered at once"
    return text


class UnitDtypes(NamedTuple):
    """Dtypes of an FSDP unit's all-gather and of its gradient reduction; None keeps the dtype of the weights."""

    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None


def block_dtypes(options: FSDPArgs, precision: Precision) -> UnitDtypes | None:
    """Return the dtypes of the block units; None where the model's dtypes are kept.

    Inputs are not cast: the residual stream keeps the same dtype as on one device.
    """
    mixed = AUTOCAST_DTYPES.get(precision)
    if mixed is None and options.param_dtype == options.reduce_dtype == "auto":
        return None

    def dtype(name: Dtype, otherwise: torch.dtype | None) -> torch.dtype | None:
        return otherwise if name == "auto" else DTYPES[name]

    reduce_dtype = dtype(options.reduce_dtype, None if mixed is None else torch.float32)
    return UnitDtypes(dtype(options.param_dtype, mixed), reduce_dtype)
