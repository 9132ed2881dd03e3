"""What becomes a unit of FSDP: the modules whose weights are gathered together. Does not import Lightning.

The wrap plan is a function of the options and the model (on the meta device, too), so that ``toolkit plan``, the run's
message and FSDP have the same one.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import NamedTuple

from torch import nn

from toolkit.config import AUTO, FSDPArgs
from toolkit.errors import UserError, did_you_mean
from toolkit.models.attention import CausalSelfAttention
from toolkit.models.gpt import GPT, Block
from toolkit.models.latent_attention import LatentAttention
from toolkit.models.mlp import GptNeoxMLP, LLaMAMLP
from toolkit.models.moe import Experts, LLaMAMoE

MIN_NUM_PARAMS = 100_000_000
"""``FSDPArgs.min_num_params`` auto, as in torch."""

GPT_UNITS = (Block, CausalSelfAttention, LatentAttention, LLaMAMLP, GptNeoxMLP, LLaMAMoE, Experts)
"""The parts of GPT that may be units: weights of others are used outside the forward of their module, as the head's are
in the loss, or are gathered in fp32, as the embedding."""


LOSS_WRAPPER_PREFIX = "module"
"""Name of a user-provided model in :class:`toolkit.models.loss_wrapper.LossWrapper`."""


class Unit(NamedTuple):
    """A unit, or the root unit with the name "".

    Args:
        name: Of the module.
        module: Its forward gathers the unit.
        parameters: Without those of units inside it.
    """

    name: str
    module: nn.Module
    parameters: list[nn.Parameter]

    @property
    def size(self) -> int:
        return sum(p.numel() for p in self.parameters)

    def is_inside(self, other: Unit) -> bool:
        return self.name.startswith(f"{other.name}.")


def plan_units(module: nn.Module, options: FSDPArgs, block_classes: tuple[type[nn.Module], ...]) -> list[Unit]:
    """Return the units in the order of the modules, the root first."""
    if options.auto_wrap == "block":
        chosen = {name for name, part in module.named_modules() if isinstance(part, block_classes)}
    elif options.auto_wrap == "class":
        names = options.wrap_classes or []
        chosen = _of_classes(module, re.split(r",\s*", names) if isinstance(names, str) else names)
    else:
        least = MIN_NUM_PARAMS if options.min_num_params == AUTO else options.min_num_params
        chosen = _of_size(module, least)
    units = {name: Unit(name, part, []) for name, part in module.named_modules() if name in chosen or not name}
    for name, parameter in module.named_parameters():
        owner = name
        while owner not in units:
            owner = owner.rpartition(".")[0]
        units[owner].parameters.append(parameter)
    return list(units.values())


def _candidates(module: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that may be units, by name: not the model, containers, or what shares weights with others."""
    runs = {name: part for name, part in module.named_modules() if type(part).forward is not nn.Module.forward}
    parts = {name: part for name, part in runs.items() if name not in ("", LOSS_WRAPPER_PREFIX)}
    if isinstance(module, GPT):
        return {name: part for name, part in parts.items() if isinstance(part, GPT_UNITS)}
    uses = Counter(id(p) for _, p in module.named_parameters(remove_duplicate=False))

    def has_own_weights(part: nn.Module) -> bool:
        inside = Counter(id(p) for _, p in part.named_parameters(remove_duplicate=False))
        return all(uses[parameter] == count for parameter, count in inside.items())

    return {name: part for name, part in parts.items() if has_own_weights(part)}


def _of_classes(module: nn.Module, names: list[str]) -> set[str]:
    candidates = _candidates(module)
    known = dict.fromkeys(type(part).__name__ for part in candidates.values())
    present = {type(part).__name__ for part in module.modules()}
    for name in names:
        if name not in known:
            why = "this part cannot be a unit" if name in present else "the model has no part of this class"
            hint = did_you_mean(name, known) or f"; use some of {', '.join(known)}"
            raise UserError(f"--fsdp.wrap_classes {name}: {why}{hint}")
    return {name for name, part in candidates.items() if type(part).__name__ in names}


def _of_size(module: nn.Module, least: int) -> set[str]:
    """Return the modules with ``least`` parameters besides those of units inside them, as torch's policy does."""
    candidates, rest = _candidates(module), Counter[str]()
    chosen: set[str] = set()
    sizes = {name: sum(p.numel() for p in part.parameters(recurse=False)) for name, part in module.named_modules()}
    for name in reversed(sizes):  # inner modules before outer ones
        rest[name] += sizes[name]
        if name in candidates and rest[name] >= least:
            chosen.add(name)
        elif name:
            rest[name.rpartition(".")[0]] += rest[name]
    return chosen


def describe_units(units: list[Unit], options: FSDPArgs) -> str:
    """Return the wrap plan in words: ``2 x Block, 3,072 parameters each; root 4,096``."""
    counts = Counter((type(unit.module).__name__, unit.size) for unit in units[1:])
    parts = [f"{n} x {name}, {size:,} parameters each" for (name, size), n in counts.items()]
    if len(units) > 1:
        return "; ".join([*parts, f"root, {units[0].size:,}"])
    text = f"root, {units[0].size:,} parameters"
    if options.auto_wrap == "size":
        least = MIN_NUM_PARAMS if options.min_num_params == AUTO else options.min_num_params
        text += f"; --fsdp.min_num_params {least:,} wraps nothing, so that all weights are gathered at once"
    return text
