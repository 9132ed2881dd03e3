"""State dicts of model and optimizer, keyed by parameter name, for every strategy.

Fabric's sharded load corrupts the optimizer under HYBRID_SHARD, and its single-device load matches optimizer state by
position; torch's functions match by name under all layouts. :mod:`toolkit.checkpoints.run.optimizer_state` restores the
optimizer. ``module`` is always the wrapped module. All functions are collective.
"""

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
)
from torch.optim import Optimizer

from toolkit.checkpoints.mismatch import find_mismatches
from toolkit.checkpoints.run.optimizer_state import SEPARATOR, Entries, group_values
from toolkit.checkpoints.run.sharded import load_sharded
from toolkit.checkpoints.weights import Tensors
from toolkit.data.base import State
from toolkit.distributed import ranks
from toolkit.distributed.model_parts import Cut, cuts_of
from toolkit.distributed.names import canonical_name
from toolkit.distributed.shards import is_sharded, shard_of, sharded_values
from toolkit.errors import join_first
from toolkit.models.lora_config import is_adapter
from toolkit.optim.bf16 import MASTER
from toolkit.private_torch import first_row, local_shard, tree_map_only


def full_state(
    module: nn.Module, optimizer: Optimizer, tied: dict[str, str], offload: bool = True
) -> tuple[Tensors, State]:
    """Return the weights by canonical name, and the optimizer state by parameter name.

    fp32 masters of the optimizer replace the weights and are removed from its state. Tied weights are listed under all
    their names, as one tensor. On CUDA with ``offload`` only rank 0 gets the tensors, in CPU memory.
    """
    is_staged = ranks.layout().pipeline > 1  # every stage needs its tensors, to send them to rank 0
    options = StateDictOptions(full_state_dict=True, cpu_offload=offload and _on_cuda(module) and not is_staged)
    weights = _full_weights(module, tied, options)
    state: State = {}
    if not _has_no_state(optimizer):
        state = _optimizer_state(module, optimizer, options)
    weights, state = _with_masters(weights, state, tied)
    if is_staged:
        weights, state = gather_stages(_untied(weights, tied)), gather_stages(state)
    return _with_aliases(weights, tied), {"state": state, **_group_state(module, optimizer, state)}


def full_weights(module: nn.Module, tied: dict[str, str]) -> Tensors:
    """Return the weights as :func:`full_state` with ``offload``, without masters. Not for pipeline parallelism."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=_on_cuda(module))
    return _with_aliases(_full_weights(module, tied, options), tied)


def _full_weights(module: nn.Module, tied: dict[str, str], options: StateDictOptions) -> Tensors:
    if not (cuts := cuts_of(module)):
        return _without_warnings(get_model_state_dict, module, options=options)
    named = {canonical_name(name): value for name, value in module.state_dict().items()}
    return {name: _gather(value, options, cuts.get(name)) for name, value in _untied(named, tied).items()}


def require_complete(saved: Mapping[str, torch.Size], expected: Mapping[str, torch.Size]) -> None:
    """Check that a checkpoint has exactly the names and shapes of the undivided model's state dict.

    Raises:
        RuntimeError: names the differences. Another layout could not load the checkpoint.
    """
    if wrong := find_mismatches(saved, expected):
        raise RuntimeError(f"the checkpoint would not load: {join_first(wrong)}; this is a bug of toolkit")


def gather_stages(state: State) -> State:
    """Return the states of all pipeline stages by name, on rank 0 in CPU memory. Other ranks get their own stage's."""
    if not ranks.is_first("replicate", "shard", "context", "tensor"):
        return state
    group = ranks.group("pipeline")
    stages: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(stages, tree_map_only(Tensor, lambda tensor: tensor.detach().to("meta"), state), group=group)
    if dist.get_rank(group) > 0:
        rank0 = dist.get_global_rank(group, 0)
        tree_map_only(Tensor, lambda tensor: dist.send(tensor.detach().cpu().contiguous(), rank0, group=group), state)
        return state
    for i, stage in enumerate(stages[1:], 1):
        received = tree_map_only(Tensor, partial(_receive, dist.get_global_rank(group, i), group), stage)
        state = state | {name: value for name, value in received.items() if name not in state}
    return state


def _receive(rank: int, group: dist.ProcessGroup, like: Tensor) -> Tensor:
    tensor = torch.empty(like.shape, dtype=like.dtype)
    dist.recv(tensor, rank, group=group)
    return tensor


def tied_names(module: nn.Module) -> dict[str, str]:
    """Return {alias: name} for tied parameters, which are saved under their last name; call before wrapping."""
    last = {id(p): name for name, p in module.named_parameters(remove_duplicate=False)}
    pairs = ((name, last[id(p)]) for name, p in module.named_parameters(remove_duplicate=False))
    return {name: first for name, first in pairs if name != first}


def sharded_state(
    module: nn.Module, optimizer: Optimizer, tied: dict[str, str], offload: bool = True
) -> tuple[Tensors, Tensors, State]:
    """Return this rank's shards of weights (by name) and optimizer (by ``parameter|key``), and a dict of the rest.

    The rest is ``{"values": {"parameter|key": number}, "param_groups": [...], ...}``; ``values`` is None before the
    first step. fp32 masters replace the weights as in :func:`full_state`. ``offload`` moves the shards to CPU memory.
    """
    options = StateDictOptions(cpu_offload=offload and _on_cuda(module))
    weights = _untied(_without_warnings(get_model_state_dict, module, options=options), tied)
    weights = as_pieces(weights, cuts_of(module))
    if _has_no_state(optimizer):
        return weights, {}, {"values": None, **_group_state(module, optimizer, {})}
    state = _optimizer_state(module, optimizer, options)
    weights, state = _with_masters(weights, state, tied)
    tensors, values = _flatten(state)
    everywhere = ranks.all_gather_object((values, {name: bool(entries) for name, entries in state.items()}))
    values = {name: value for part, _ in everywhere for name, value in part.items()}
    with_state = {name: value for _, part in everywhere for name, value in part.items()}
    return weights, tensors, {"values": values, **_group_state(module, optimizer, with_state)}


def load_sharded_weights(module: nn.Module, tied: dict[str, str], folder: Path) -> None:
    """Load the module's weights from a folder of shards, written by any number of ranks.

    ``tied``: see :func:`tied_names`.
    """
    weights = _without_warnings(get_model_state_dict, module)
    load_sharded(as_pieces(_untied(weights, tied), cuts_of(module)), folder)
    if cuts_of(module):
        return  # the shards share memory with the parameters
    _without_warnings(set_model_state_dict, module, _with_aliases(weights, tied))


def adapter_state(module: nn.Module, optimizer: Optimizer) -> tuple[Tensors, State]:
    """Return the adapters and their optimizer state, by canonical name, in CPU memory.

    torch's functions would also gather the base model.
    """
    adapters = {canonical_name(name): p for name, p in module.named_parameters() if is_adapter(name)}
    whole, cuts = StateDictOptions(full_state_dict=True), cuts_of(module)
    weights = {name: _gather(p.detach(), whole, cuts.get(name)).cpu() for name, p in adapters.items()}
    state = tree_map_only(Tensor, Tensor.cpu, _parameter_states(adapters, optimizer, whole, cuts))
    if ranks.layout().pipeline > 1:
        weights, state = gather_stages(weights), gather_stages(state)
    return weights, {"adapters": state, **_group_state(module, optimizer, state)}


def _optimizer_state(module: nn.Module, optimizer: Optimizer, options: StateDictOptions) -> Entries:
    if not any(map(is_sharded, module.parameters())):
        state: Entries = _without_warnings(get_optimizer_state_dict, module, optimizer, options=options)["state"]
        return state
    named = {canonical_name(name): parameter for name, parameter in module.named_parameters()}
    return _parameter_states(named, optimizer, options, cuts_of(module))


def _parameter_states(
    parameters: dict[str, nn.Parameter],
    optimizer: Optimizer,
    options: StateDictOptions,
    cuts: dict[str, Cut],
) -> Entries:
    """Gather and offload the optimizer state of each parameter. Cuts apply to values of the parameter's shape."""
    states: Entries = {}
    for name, parameter in parameters.items():
        for key, value in sharded_values(optimizer.state.get(shard_of(parameter), {}), parameter).items():
            has_shape = isinstance(value, Tensor) and value.shape == parameter.shape
            gathered = _gather(value, options, cuts.get(name) if has_shape else None)
            states.setdefault(name, {})[key] = gathered
    return states


def _gather(value: Any, options: StateDictOptions, cut: Cut | None = None) -> Any:
    """Gather and offload a value as torch's functions do with these options, or return its pieces. Collective."""
    if options.full_state_dict and (hasattr(value, "full_tensor") or cut is not None):
        if hasattr(value, "full_tensor"):
            value = value.to(value.device_mesh.device_type).full_tensor()  # offloaded shards are in CPU memory
        value = value if cut is None else cut.gather(value)
        if options.cpu_offload and ranks.global_rank() > 0:
            return value.new_empty(0)  # only rank 0 writes
    value = value.cpu() if options.cpu_offload and isinstance(value, Tensor) else value
    return value if cut is None or options.full_state_dict else Pieces.of(value, cut)


def _group_state(module: nn.Module, optimizer: Optimizer, state: State) -> State:
    """Return the optimizer's param_groups and the names of parameters without state. ``state`` is of all stages."""
    groups = group_values(module, optimizer)
    names = [name for group in groups["param_groups"] for name in group["params"]]
    with_state = {canonical_name(name) for name, values in state.items() if values}
    return {**groups, "without_state": [name for name in names if name not in with_state]}


def _with_masters(weights: Tensors, state: Entries, tied: dict[str, str]) -> tuple[Tensors, Entries]:
    """Replace bf16 weights with the fp32 masters, and remove the masters from the optimizer state."""
    masters = {tied.get(name, name): values[MASTER] for name, values in state.items() if MASTER in values}
    rest = {name: {k: v for k, v in values.items() if k != MASTER} for name, values in state.items()}
    return weights | masters, rest


def _has_no_state(optimizer: Optimizer) -> bool:
    """Whether the optimizer state is empty. torch's functions would then run a step to create it."""
    return not any(optimizer.state.values())


def _on_cuda(module: nn.Module) -> bool:
    """Whether to offload; on CPU, offloading does not copy: the tensors would alias storage that FSDP frees.

    FSDP may keep its shards in CPU memory, and gathers them on its compute device.
    """
    meshes = (getattr(p, "device_mesh", None) for p in module.parameters())
    devices = {getattr(mesh, "device_type", None) for mesh in meshes}
    return "cuda" in devices | {p.device.type for p in module.parameters()}


def _flatten(state: Entries) -> tuple[Tensors, State]:
    """Split optimizer state into tensors and other values, both by ``parameter|key``."""
    flat = {f"{name}{SEPARATOR}{key}": value for name, values in state.items() for key, value in values.items()}
    tensors = {name: value for name, value in flat.items() if isinstance(value, Tensor)}
    return tensors, {name: value for name, value in flat.items() if name not in tensors}


def _untied(weights: Tensors, tied: dict[str, str]) -> Tensors:
    return {name: tensor for name, tensor in weights.items() if name not in tied}


def _with_aliases(weights: Tensors, tied: dict[str, str]) -> Tensors:
    return weights | {second: weights[first] for second, first in tied.items() if first in weights}


def _without_warnings(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call a torch function without its warnings, which users cannot act on.

    Some optimizers warn about missing gradients when torch initializes their state with a step of lr 0.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(*args, **options)


class Pieces(Tensor):
    """A rank's rows of a divided parameter, or of its optimizer state, as chunks of the complete tensor.

    A folder of shards then holds the complete tensor in the order of an undivided model. Implements DCP's protocol for
    tensors of other classes. The chunks share memory with ``value``, a DTensor or a plain tensor.
    """

    local: Tensor
    chunks: dict[torch.Size, Tensor]

    @classmethod
    def of(cls, value: Tensor, cut: Cut) -> "Pieces":
        local = local_shard(value.detach())
        self = local.new_zeros(()).expand(cut.shape).as_subclass(cls)  # no memory
        self.local, self.chunks = local, {}
        rest = () if len(cut.shape) == 1 else (cut.columns.start or 0, *(0,) * (len(cut.shape) - 2))
        for row, begin, length in cut.rows(first_row(value), local.size(0)):
            self.chunks[torch.Size((row, *rest))] = local[begin : begin + length]
        return self

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.local)
        return [
            WriteItem(
                MetadataIndex(fqn, offset),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.shape),
            )
            for offset, chunk in zip(self.chunks, self.__create_chunk_list__(), strict=True)
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offset, values.shape) for offset, values in self.chunks.items()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        return self.chunks[index.offset]


def as_pieces(tensors: Tensors, cuts: dict[str, Cut]) -> Tensors:
    """Replace the divided parameters among ``tensors`` by their pieces."""
    return {name: Pieces.of(value, cuts[name]) if name in cuts else value for name, value in tensors.items()}
