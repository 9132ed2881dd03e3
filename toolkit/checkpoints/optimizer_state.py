"""An optimizer's state back from a checkpoint: name by name and in place, so that only one set of it is in memory.

torch's ``set_optimizer_state_dict`` holds two: it fills an empty optimizer by a step, and replaces what that has made.
The step also advances the numbers that an optimizer keeps in its groups.
"""

from __future__ import annotations

import copy
import warnings
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from toolkit.checkpoints.scratch import SMALL
from toolkit.checkpoints.sharded import ShardReader
from toolkit.checkpoints.weights import canonical_name
from toolkit.distributed import ranks
from toolkit.distributed.fsdp import local_parts
from toolkit.distributed.memory import give_back_freed_memory
from toolkit.errors import UserError

BETWEEN = "|"  # in the names of tensors in shards: parameter|key
# The learning rate is the schedule's, how a step is computed the device's.
_NEVER_RESTORED = {"params", "lr", "fused", "foreach", "capturable"}


class _Stored(NamedTuple):
    """A tensor that was not read yet."""

    shape: torch.Size
    dtype: torch.dtype
    read: Callable[[int, int], Tensor]
    """Returns elements ``start`` to ``stop`` of the flattened tensor."""


@dataclass(frozen=True)
class _Part:
    """What this rank holds of a parameter, and which group of the optimizer it is in."""

    names: list[str]
    """Canonical ones: more than one where it is tied."""
    parameter: nn.Parameter
    group: int
    shape: torch.Size
    """Of the complete parameter."""
    start: int
    """The first element that this rank holds, of the flattened parameter."""

    @property
    def is_sharded(self) -> bool:
        return self.parameter.numel() != self.shape.numel()


def group_values(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return ``param_groups``, with names for parameters; ``param_groups_by_rank`` without them, where ranks differ.

    Collective.
    """
    names = {id(p): canonical_name(name) for name, p in module.named_parameters()}
    mine = [{k: _on_cpu(v) for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    groups = [
        {"params": [names[id(p)] for p in group["params"]], **values}
        for group, values in zip(optimizer.param_groups, mine, strict=True)
    ]
    by_rank = ranks.all_gather_object(mine)
    differ = any(_plain(values) != _plain(by_rank[0]) for values in by_rank)
    return {"param_groups": groups} | ({"param_groups_by_rank": by_rank} if differ else {})


def load_optimizer(
    module: nn.Module, optimizer: torch.optim.Optimizer, saved: Any, file: Path, folder: Path, may_be_empty: bool
) -> None:
    """Give an optimizer the state that was saved; every rank takes its part of it.

    What only configuration decides stays as it is: the learning rate, and all options of torch's own optimizers.

    Args:
        module: As the strategy has wrapped it.
        optimizer: New.
        saved: The entry ``optimizer`` of the state file, by any function of :mod:`toolkit.checkpoints.states`.
        file: That file, for messages.
        folder: The optimizer's shards, where ``saved`` has none of its tensors.
        may_be_empty: Whether the optimizer may have done no step.

    Raises:
        UserError: an entry is missing, unknown, of another shape or type, or a shard is damaged.
    """
    where, entries = _read_entries(saved, file, folder)
    parts = _find_parts(module, optimizer)
    by_name = {name: part for part in parts for name in part.names}
    entries = {canonical_name(name): entry for name, entry in entries.items()}  # torch keeps a layer named "module"
    if unknown := sorted(entries.keys() - by_name.keys()):
        raise UserError(f"{where}: optimizer state of {unknown[0]!r:.100}: the optimizer has no such parameter")
    is_torchs = type(optimizer).__module__.startswith("torch.optim")
    _load_groups(optimizer, saved, by_name, file, is_torchs)
    without, missing = set(_list_of_names(saved.get("without_state", []), file)), []
    for part in parts:
        state = _create_state(optimizer, part)
        entry = next((entries[name] for name in part.names if name in entries), None)
        if entry is None:
            if state:
                missing.append(part)
            continue
        try:
            _fill(state, entry, part, is_torchs)
        except _Mismatch as error:
            raise UserError(f"{where}: optimizer state of {part.names[0]}: {error}") from None
        if part.parameter.numel():  # FSDP keeps none of a parameter of which a rank has nothing
            optimizer.state[part.parameter] = state
        if part.parameter.numel() >= SMALL:
            give_back_freed_memory()
    if missing and (entries or not may_be_empty):
        lost = [part for part in missing if not without.intersection(part.names)]
        if lost or not entries:
            more = f", and of {len(missing) - 1} more" if len(missing) > 1 else ""
            name = (lost or missing)[0].names[0]
            raise UserError(f"{where}: optimizer state of {name}: is missing{more}; resume from another checkpoint")


class _Mismatch(Exception):
    """What is wrong with a parameter's entry."""


def _read_entries(saved: Any, file: Path, folder: Path) -> tuple[Path, dict[str, dict[str, Any]]]:
    """Return where the tensors are, and {parameter: {key: tensor to read, or number}}."""
    if not isinstance(saved, dict):
        raise UserError(f"{file}: optimizer: is {_kind(saved)}, not a dictionary; resume from another checkpoint")
    kinds = [name for name in ("adapters", "state", "values") if name in saved]
    if not kinds:
        raise UserError(f"{file}: optimizer: has no entry 'state'; resume from another checkpoint")
    if kinds[0] == "values":
        return folder, {} if saved["values"] is None else _shard_entries(saved["values"], file, folder)
    entries = saved[kinds[0]]
    for name, entry in entries.items() if isinstance(entries, dict) else [("state", entries)]:
        if not (isinstance(name, str) and isinstance(entry, dict) and all(isinstance(key, str) for key in entry)):
            raise UserError(f"{file}: optimizer state of {name!r:.100}: is {_kind(entry)}, not names and values")
    # torch's names keep what stands before those of a user's own module
    by_name = {canonical_name(name): entry for name, entry in entries.items()}
    return file, {name: {key: _stored(value) for key, value in entry.items()} for name, entry in by_name.items()}


def _shard_entries(values: Any, file: Path, folder: Path) -> dict[str, dict[str, Any]]:
    if not (isinstance(values, dict) and all(isinstance(name, str) for name in values)):
        raise UserError(f"{file}: optimizer: values: is {_kind(values)}, not names and numbers")
    reader = ShardReader(folder)
    flat: dict[str, Any] = dict(values)
    for name, (shape, dtype) in reader.tensors.items():
        flat[name] = _Stored(shape, dtype, lambda start, stop, name=name: reader.read(name, start, stop))
    entries: dict[str, dict[str, Any]] = {}
    for name, value in flat.items():
        parameter, _, key = name.rpartition(BETWEEN)
        entries.setdefault(canonical_name(parameter), {})[key] = value
    return entries


def _stored(value: Any) -> Any:
    if not isinstance(value, Tensor) or value.layout != torch.strided:
        return value
    return _Stored(value.shape, value.dtype, lambda start, stop: value.reshape(-1)[start:stop])


def _find_parts(module: nn.Module, optimizer: torch.optim.Optimizer) -> list[_Part]:
    """In the same order on every rank."""
    groups = {id(p): i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(canonical_name(name))
    sharded, parts = local_parts(module), []
    for parameter in module.parameters():
        if id(parameter) in groups:
            shape, start = sharded.get(id(parameter), (parameter.shape, 0))
            parts.append(_Part(names[id(parameter)], parameter, groups[id(parameter)], shape, start))
    return parts


def _load_groups(
    optimizer: torch.optim.Optimizer, saved: dict[str, Any], parts: dict[str, _Part], file: Path, is_torchs: bool
) -> None:
    """Restore the numbers that an optimizer keeps in its groups."""
    groups = saved.get("param_groups", [])
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        raise UserError(f"{file}: optimizer: param_groups: is {_kind(groups)}, not a list of dictionaries")
    if not groups:
        return  # a checkpoint of an earlier version
    if len(groups) != len(optimizer.param_groups):
        raise UserError(f"{file}: optimizer: has {len(groups)} param_groups, this run {len(optimizer.param_groups)}")
    for i, group in enumerate(groups):
        names = _list_of_names(group.get("params"), file)
        if {parts[name].group if name in parts else None for name in names} != {i}:
            raise UserError(f"{file}: optimizer: param_groups: group {i} has other parameters than in this run")
    if is_torchs:
        return  # options alone, and those are the run's
    by_rank = saved.get("param_groups_by_rank")
    if isinstance(by_rank, list) and len(by_rank) == ranks.world_size():
        groups = by_rank[ranks.global_rank()]
        if not isinstance(groups, list) or [type(group) for group in groups] != [dict] * len(optimizer.param_groups):
            raise UserError(f"{file}: optimizer: param_groups_by_rank: is not a list of dictionaries for each rank")
    for group, values in zip(optimizer.param_groups, groups, strict=True):
        for key in values.keys() - _NEVER_RESTORED:
            if not isinstance(key, str) or (key in group and not _is_alike(values[key], group[key])):
                kinds = f"is {_kind(values[key])}, not {_kind(group.get(key))}"
                raise UserError(f"{file}: optimizer: param_groups: {key!r:.100}: {kinds}")
            device = group["params"][0].device
            group[key] = values[key].to(device).clone() if isinstance(values[key], Tensor) else values[key]


def _create_state(optimizer: torch.optim.Optimizer, part: _Part) -> dict[str, Any]:
    """Return what the optimizer's first step makes for a parameter, by a step of rate zero on a copy of it."""
    twin = nn.Parameter(part.parameter.detach().clone())
    twin.grad = torch.zeros_like(twin)
    group = {k: copy.deepcopy(v) for k, v in optimizer.param_groups[part.group].items() if k != "params"}
    if "lr" in group:
        group["lr"] = group["lr"] * 0.0
    real = optimizer.param_groups, optimizer.state
    optimizer.param_groups, optimizer.state = [{"params": [twin], **group}], defaultdict(dict)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer.step()
        return dict(optimizer.state.get(twin, {}))
    finally:
        optimizer.param_groups, optimizer.state = real


def _fill(state: dict[str, Any], entry: dict[str, Any], part: _Part, is_torchs: bool) -> None:
    """Put what was saved into a new state.

    torch's optimizers make the same state whatever the values are; others may add to it later, or keep one zero for a
    parameter of zeros (Prodigy).
    """
    if lost := sorted(state.keys() - entry.keys()):
        raise _Mismatch(f"{lost[0]} is missing")
    if is_torchs and (unknown := sorted(entry.keys() - state.keys())):
        raise _Mismatch(f"{unknown[0]!r:.100} is nothing that {part.names[0]} has in this optimizer")
    for key, value in entry.items():
        made = state.get(key)
        if isinstance(value, _Stored) and (made is None or isinstance(made, Tensor)):
            state[key] = _take(key, value, made, part, is_torchs)
        elif not isinstance(value, _Stored) and _is_alike(value, made) and not isinstance(made, Tensor):
            state[key] = value
        else:
            raise _Mismatch(f"{key!r:.100} is {_kind(value)}, not {_kind(made)}")


def _take(key: str, stored: _Stored, made: Tensor | None, part: _Part, is_torchs: bool) -> Tensor:
    """Read this rank's part of a tensor into the one that was made for it."""
    is_scalar, is_like = stored.shape == (), stored.shape in (part.shape, (part.shape.numel(),))
    in_part = part.is_sharded and not is_scalar
    shape, start = (part.parameter.shape, part.start) if in_part else (stored.shape, 0)
    fits, is_same = is_like or not in_part, made is None
    if made is not None:
        is_same = made.shape == shape or (is_like and made.numel() == part.parameter.numel())
        fits &= is_same or (not is_torchs and (is_scalar or is_like))
    if not fits:
        raise _Mismatch(f"{key} has shape {tuple(stored.shape)}; the parameter has {tuple(part.shape)}")
    if made is not None and made.dtype != stored.dtype:
        raise _Mismatch(f"{key} is of type {stored.dtype}, not {made.dtype}")
    if made is None or not is_same:
        made = torch.empty(shape, dtype=stored.dtype, device=part.parameter.device)
    return made.copy_(stored.read(start, start + made.numel()).view(made.shape))


def _is_alike(value: Any, other: Any) -> bool:
    """Whether values are of one kind; nothing is known of None."""
    if isinstance(value, tuple | list) and isinstance(other, tuple | list):
        return len(value) == len(other) and all(map(_is_alike, value, other))
    return other is None or value is None or _kind(value) == _kind(other)


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, int | float) or (isinstance(value, Tensor) and value.dim() == 0):
        return "a number"
    if isinstance(value, _Stored | Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return {str: "a string", dict: "a dictionary", list: "a list", tuple: "a list"}.get(type(value), f"{value!r:.50}")


def _list_of_names(value: Any, file: Path) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise UserError(f"{file}: optimizer: params: is {_kind(value)}, not a list of names")
    return [canonical_name(name) for name in value]


def _on_cpu(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, Tensor) else value


def _plain(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v.tolist() if isinstance(v, Tensor) else v for k, v in group.items()} for group in groups]
