"""Restore optimizer state from a checkpoint in place, one parameter at a time, with one copy in memory.

torch's ``set_optimizer_state_dict`` holds two copies: it runs an optimizer step to initialize the state, and then
replaces it. That step also advances counters in the optimizer's param_groups.
"""

import copy
import warnings
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from toolkit.checkpoints.run.sharded import ShardReader, is_sharded
from toolkit.checkpoints.scratch import trim_after
from toolkit.checkpoints.weights import load_weights
from toolkit.data.base import State
from toolkit.distributed import ranks
from toolkit.distributed.model_parts import Cut, cuts_of
from toolkit.distributed.names import canonical_name
from toolkit.distributed.shards import is_shared_state, shard_of
from toolkit.errors import UserError, one_line
from toolkit.optim.bf16 import MASTER
from toolkit.optim.evaluation_weights import AVERAGE, TRAINED, begin_training
from toolkit.optim.groups import GROUP_KEY, group_keys
from toolkit.private_torch import local_parts, local_shard, tree_map_only

Entries = dict[str, State]
"""States of an optimizer by parameter name."""
SEPARATOR = "|"  # in names of sharded tensors: parameter|key
# The schedule sets lr; the others depend on the device.
_FIX = (
    "; resume with the --optimizer options and the model of the saved run, or load only the weights with "
    "--initial_checkpoint_dir"
)
_NOT_SAVED = {"params", GROUP_KEY}
_NEVER_RESTORED = {"params", "lr", "fused", "foreach", "capturable"}


class _LazyTensor(NamedTuple):
    """A saved tensor that has not been read yet."""

    shape: torch.Size
    dtype: torch.dtype
    read: Callable[[int, int], Tensor]
    """Returns elements ``start`` to ``stop`` of the flattened tensor."""


@dataclass(frozen=True)
class _LocalParameter:
    """This rank's shard of a parameter."""

    names: list[str]
    """Canonical names; several if the parameter is tied."""
    parameter: nn.Parameter
    group: int
    """Index of its param_group in the optimizer."""
    shape: torch.Size
    """Shape of the unsharded parameter."""
    start: int
    """Offset of this rank's first element in the flattened parameter; of a divided one, in its local tensor."""
    cut: Cut | None = None
    """This rank's part of a parameter that tensor parallelism divides."""

    @property
    def local(self) -> Tensor:
        """This rank's elements."""
        return local_shard(self.parameter)

    @property
    def is_sharded(self) -> bool:
        return self.local.numel() != self.shape.numel()

    def read(self, stored: _LazyTensor) -> Tensor:
        """Read this rank's elements of a saved tensor with the parameter's shape, flattened."""
        count = self.local.numel()
        if self.cut is None or not count:
            return stored.read(self.start, self.start + count)
        row, rows = self.shape[1:].numel(), self.local.size(0)
        ranges = self.cut.rows(self.start // (count // rows), rows)
        values = torch.cat([stored.read(first * row, (first + length) * row) for first, _, length in ranges])
        return values.view(rows, row)[:, self.cut.columns].flatten() if self.cut.dim else values


def group_values(module: nn.Module, optimizer: Optimizer) -> State:
    """Return ``param_groups`` with parameter names, and ``param_groups_by_rank`` if values differ between ranks.

    Collective.
    """
    names = {id(shard_of(p)): canonical_name(name) for name, p in module.named_parameters()}
    local = {
        key: ([names[id(p)] for p in group["params"]], {k: _on_cpu(v) for k, v in group.items() if k not in _NOT_SAVED})
        for key, group in zip(group_keys(optimizer), optimizer.param_groups, strict=True)
    }
    everywhere = ranks.all_gather_object(local)
    groups, by_rank = [], [list[State]() for _ in everywhere]
    for key in sorted(set().union(*everywhere), reverse=True):  # a pipeline stage may lack groups, and parts of others
        found = [part[key] for part in everywhere if key in part]
        groups.append({"params": list(dict.fromkeys(chain(*(names for names, _ in found)))), **found[0][1]})
        for values, part in zip(by_rank, everywhere, strict=True):
            values.append(part.get(key, found[0])[1])
    first, *others = tree_map_only(Tensor, Tensor.tolist, by_rank)
    differ = any(values != first for values in others)
    return {"param_groups": groups} | ({"param_groups_by_rank": by_rank} if differ else {})


def load_optimizer(
    module: nn.Module,
    optimizer: Optimizer,
    saved: Any,
    file: Path,
    folder: Path,
    may_be_empty: bool,
    weights: Path | None = None,
) -> None:
    """Restore optimizer state. Each rank loads its own shards.

    The learning rate, and all options of torch's own optimizers, come from the configuration and are not restored.

    Args:
        module: The wrapped module.
        optimizer: A new optimizer.
        saved: The ``optimizer`` entry of the state file; see :mod:`toolkit.checkpoints.run.state_dicts`.
        file: The state file, for messages.
        folder: Folder of optimizer shards, used if ``saved`` contains no tensors.
        may_be_empty: Whether the checkpoint may predate the first optimizer step.
        weights: Weight file or folder of shards, for an optimizer with fp32 masters.
    """
    parts = _local_parameters(module, optimizer)
    by_name = {name: part for part in parts for name in part.names}
    everywhere = ranks.all_gather_object((list(by_name), group_keys(optimizer)))
    all_names = set().union(*(names for names, _ in everywhere))  # pipeline stages have different parameters
    n_groups = len(set().union(*(keys for _, keys in everywhere)))
    is_torch_optimizer = type(optimizer).__module__.startswith(("torch.optim", "toolkit."))
    try:
        where, entries = _read_entries(saved, file, folder)
        _load_groups(optimizer, saved, by_name, all_names - by_name.keys(), n_groups, file, is_torch_optimizer)
        begin_training(optimizer)  # the groups of a schedule-free one say that it was saved in evaluation
        without = {canonical_name(name) for name in saved.get("without_state", [])}
    except (AttributeError, KeyError, TypeError) as error:
        raise UserError(f"{file}: optimizer: malformed ({one_line(error)}); resume from another checkpoint") from error
    if unknown := sorted(entries.keys() - all_names):
        raise UserError(f"{where}: optimizer state of {unknown[0]!r:.100}: the optimizer has no such parameter{_FIX}")
    masters: dict[str, _LazyTensor] | None = None
    missing: list[_LocalParameter] = []
    for part in parts:
        state = _create_state(optimizer, part)
        entry = next((entries[name] for name in part.names if name in entries), None)
        if entry is None:
            if state:
                missing.append(part)
            continue
        if entry.keys() <= {TRAINED, AVERAGE}:  # it has had no gradient
            state = {}
        if MASTER in state:
            assert weights is not None
            masters = _saved_weights(weights) if masters is None else masters
            saved_masters = [masters[name] for name in part.names if name in masters]
            entry = {**entry, **({MASTER: saved_masters[0]} if saved_masters else {})}
        try:
            _fill(state, entry, part, is_torch_optimizer)
        except _MismatchError as error:
            raise UserError(f"{where}: optimizer state of {part.names[0]}: {error}{_FIX}") from None
        optimizer.state[part.parameter] = state
        trim_after(part.parameter.numel())
    if missing and (entries or not may_be_empty):
        unexpected = [part for part in missing if not without.intersection(part.names)]
        if unexpected or not entries:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            name = (unexpected or missing)[0].names[0]
            raise UserError(f"{where}: missing optimizer state of {name}{more}; resume from another checkpoint")


class _MismatchError(Exception):
    """A parameter's saved state does not match."""


def _read_entries(saved: Any, file: Path, folder: Path) -> tuple[Path, Entries]:
    """Return the path of the tensors, for messages, and {parameter: {key: lazy tensor or number}}.

    torch keeps a prefix such as "module." before the names of a user-defined module.
    """
    where, entries = file, saved.get("adapters", saved.get("state"))
    if entries is None:
        where, values = folder, saved["values"]
        entries = {} if values is None else nest(values | _shard_tensors(folder))
    return where, {canonical_name(name): {k: _lazy(v) for k, v in entry.items()} for name, entry in entries.items()}


def nest(values: State) -> Entries:
    """Convert {"parameter|key": tensor or number} to {parameter: {key: tensor or number}}."""
    entries: Entries = {}
    for name, value in values.items():
        parameter, _, key = name.rpartition(SEPARATOR)
        entries.setdefault(parameter, {})[key] = value
    return entries


def _shard_tensors(folder: Path) -> dict[str, _LazyTensor]:
    reader = ShardReader(folder)
    return {name: _LazyTensor(*kind, partial(reader.read, name)) for name, kind in reader.tensors.items()}


def _saved_weights(path: Path) -> dict[str, _LazyTensor]:
    if is_sharded(path):
        return {canonical_name(name): tensor for name, tensor in _shard_tensors(path).items()}
    return {name: _lazy(tensor) for name, tensor in load_weights(path.parent).items()}


def _lazy(value: Any) -> Any:
    if not isinstance(value, Tensor) or value.layout != torch.strided:
        return value
    return _LazyTensor(value.shape, value.dtype, lambda start, stop: value.reshape(-1)[start:stop])


def _local_parameters(module: nn.Module, optimizer: Optimizer) -> list[_LocalParameter]:
    """Return the optimizer's parameters, in the same order on every rank."""
    groups = {id(p): i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(canonical_name(name))
    sharded, cuts, parts = local_parts(module), cuts_of(module), []
    for parameter in module.parameters():
        trained = shard_of(parameter)
        if id(trained) in groups:
            shape, start = sharded.get(id(parameter), (parameter.shape, 0))
            cut = cuts.get(names[id(parameter)][0])
            shape = shape if cut is None else cut.shape
            parts.append(_LocalParameter(names[id(parameter)], trained, groups[id(trained)], shape, start, cut))
    return parts


def _load_groups(
    optimizer: Optimizer,
    saved: State,
    parts: dict[str, _LocalParameter],
    elsewhere: set[str],
    n_groups: int,
    file: Path,
    is_torch_optimizer: bool,
) -> None:
    """Restore the values that an optimizer keeps in its param_groups.

    ``elsewhere`` has the names of parameters that only other ranks have; ``n_groups`` counts the groups of all ranks.
    """
    groups = saved.get("param_groups")
    if not groups:
        return  # a checkpoint of an earlier version
    if len(groups) != n_groups:
        raise UserError(f"{file}: optimizer: has {len(groups)} param_groups, this run {n_groups}{_FIX}")
    saved_index: dict[int | None, int] = {}
    for i, group in enumerate(groups):
        names = set(map(canonical_name, group["params"])) - elsewhere
        local = {parts[name].group if name in parts else None for name in names}
        if len(local) > 1 or None in local or local & saved_index.keys():
            raise UserError(
                f"{file}: optimizer: param_groups: group {i} does not match the parameters of this run{_FIX}"
            )
        saved_index |= dict.fromkeys(local, i)
    if is_torch_optimizer:
        return  # their groups hold options only, which come from the configuration
    by_rank = saved.get("param_groups_by_rank", [])
    if len(by_rank) == ranks.world_size():
        groups = by_rank[ranks.global_rank()]
    for i, group in enumerate(optimizer.param_groups):
        device, values = group["params"][0].device, groups[saved_index[i]]
        for key in values.keys() - _NEVER_RESTORED:
            value = values[key]
            group[key] = value.to(device).clone() if isinstance(value, Tensor) else value


def _create_state(optimizer: Optimizer, part: _LocalParameter) -> State:
    """Return a parameter's initial optimizer state, created by a step with lr 0 on a copy of the parameter."""
    twin = nn.Parameter(part.parameter.detach().clone())
    twin.grad = torch.zeros_like(twin)
    group = {k: copy.deepcopy(v) for k, v in optimizer.param_groups[part.group].items() if k != "params"}
    if "lr" in group:
        group["lr"] = group["lr"] * 0.0
    original = optimizer.param_groups, optimizer.state
    optimizer.param_groups, optimizer.state = [{"params": [twin], **group}], defaultdict(dict)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer.step()
        return dict(optimizer.state.get(twin, {}))
    finally:
        optimizer.param_groups, optimizer.state = original


def _fill(state: State, entry: State, part: _LocalParameter, is_torch_optimizer: bool) -> None:
    """Copy the saved values into a new state.

    torch's optimizers always create the same state; others may add entries later, or store a scalar zero for a
    parameter of zeros (Prodigy).
    """
    if missing := sorted(state.keys() - entry.keys()):
        raise _MismatchError(f"{missing[0]} is missing")
    if is_torch_optimizer and (unknown := sorted(entry.keys() - state.keys() - {AVERAGE, TRAINED})):
        raise _MismatchError(f"{unknown[0]!r:.100} is unknown to this optimizer")
    for key, value in entry.items():
        target = state.get(key)
        if isinstance(value, _LazyTensor) and (target is None or isinstance(target, Tensor)):
            state[key] = _load_tensor(key, value, target, part, is_torch_optimizer)
        elif isinstance(value, _LazyTensor | Tensor) or isinstance(target, Tensor):
            raise _MismatchError(f"{key!r:.100} is {_describe(value)}, not {_describe(target)}")
        else:
            # SOAP has lists of matrices
            state[key] = tree_map_only(Tensor, lambda tensor: tensor.to(part.parameter.device), value)


def _describe(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, _LazyTensor | Tensor) else f"{value!r:.50}"


def _load_tensor(
    key: str, stored: _LazyTensor, target: Tensor | None, part: _LocalParameter, is_torch_optimizer: bool
) -> Tensor:
    """Read this rank's shard of a saved tensor into ``target``, or into a new tensor."""
    if target is not None and (shard := local_shard(target)) is not target:  # a DTensor, which shares memory with it
        _load_tensor(key, stored, shard, part, is_torch_optimizer)
        return target
    if target is not None and is_torch_optimizer and (first := _first_element(stored, target, part)) is not None:
        return target.copy_(stored.read(first, first + target.numel()).view(target.shape))
    is_scalar, has_param_shape = stored.shape == (), stored.shape in (part.shape, (part.shape.numel(),))
    is_sharded = part.is_sharded and not is_scalar and (target is None or not is_shared_state(key, target))
    shape = part.local.shape if is_sharded else stored.shape
    fits, is_same = has_param_shape or not is_sharded, target is None
    if target is not None:
        is_same = target.shape == shape or (has_param_shape and target.numel() == part.local.numel())
        fits &= is_same or (not is_torch_optimizer and (is_scalar or has_param_shape))
    if not fits:
        raise _MismatchError(f"{key} has shape {tuple(stored.shape)}; the parameter has {tuple(part.shape)}")
    if target is not None and target.dtype != stored.dtype:
        raise _MismatchError(f"{key} has dtype {stored.dtype}, not {target.dtype}")
    if target is None or not is_same:
        target = torch.empty(shape, dtype=stored.dtype, device=part.parameter.device)
    values = part.read(stored) if is_sharded else stored.read(0, target.numel())
    return target.copy_(values.view(target.shape))


def _first_element(stored: _LazyTensor, target: Tensor, part: _LocalParameter) -> int | None:
    """Return where ``target`` starts in a saved tensor that has fewer elements than the parameter.

    Such a tensor is equal on all ranks, or has values for each row of a shard. None if it is neither.
    """
    n_stored, n_param = stored.shape.numel(), part.shape.numel()
    if n_stored >= n_param or target.dtype != stored.dtype:
        return None
    if target.shape == stored.shape:
        return 0
    is_by_rows = target.numel() * n_param == n_stored * part.local.numel()
    return part.start * n_stored // n_param if is_by_rows and (part.is_sharded or target.ndim == 1) else None


def _on_cpu(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, Tensor) else value
