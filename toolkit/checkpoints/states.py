"""The state of a model and its optimizer, by the names of the parameters: one path for every strategy.

Fabric's own sharded load corrupts the optimizer under HYBRID_SHARD, and its single-device load matches the optimizer's
state by position; torch's functions go by name and hold for all layouts. The optimizer's way back is
:mod:`toolkit.checkpoints.optimizer_state`. ``module`` is always the wrapped module. All
functions here are called by all ranks.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
)

from toolkit.checkpoints.optimizer_state import BETWEEN, group_values
from toolkit.checkpoints.sharded import load_sharded
from toolkit.checkpoints.weights import canonical_name
from toolkit.models.lora import is_adapter


def full_state(
    module: nn.Module, optimizer: torch.optim.Optimizer, tied: dict[str, str]
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the weights under their canonical names, and the optimizer's state keyed by these.

    Tied weights come under all their names, as one tensor. On CUDA only rank 0 gets them, in CPU memory.
    """
    options = StateDictOptions(full_state_dict=True, cpu_offload=_on_cuda(module))
    weights = _quietly(get_model_state_dict, module, options=options)
    weights |= {second: weights[first] for second, first in tied.items() if first in weights}
    state = (
        {} if _is_fresh(optimizer) else _quietly(get_optimizer_state_dict, module, optimizer, options=options)["state"]
    )
    return weights, {"state": state, **_beside(module, optimizer, state)}


def tied_names(module: nn.Module) -> dict[str, str]:
    """Return, for each further name of a parameter, the name that it counts under, the last; before wrapping."""
    last = {id(p): name for name, p in module.named_parameters(remove_duplicate=False)}
    pairs = ((name, last[id(p)]) for name, p in module.named_parameters(remove_duplicate=False))
    return {name: first for name, first in pairs if name != first}


def sharded_state(
    module: nn.Module, optimizer: torch.optim.Optimizer, tied: dict[str, str]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, Any]]:
    """Return this rank's shards: of the weights by name, of the optimizer by ``parameter|key``; and what is no tensor.

    The latter is ``{"values": {"parameter|key": number}, "param_groups": [...], ...}``, or None for values before the
    first step.
    """
    options = StateDictOptions(cpu_offload=_on_cuda(module))
    weights = _untied(_quietly(get_model_state_dict, module, options=options), tied)
    if _is_fresh(optimizer):
        return weights, {}, {"values": None, **_beside(module, optimizer, {})}
    state = _quietly(get_optimizer_state_dict, module, optimizer, options=options)["state"]
    tensors, values = _flat(state)
    return weights, tensors, {"values": values, **_beside(module, optimizer, state)}


def load_sharded_weights(module: nn.Module, tied: dict[str, str], folder: Path) -> None:
    """Fill the module's weights from a folder of shards, written by any number of ranks.

    ``tied``: see :func:`tied_names`.

    Raises:
        UserError: a shard is missing or damaged, or does not fit.
    """
    weights = _quietly(get_model_state_dict, module)
    load_sharded(_untied(weights, tied), folder)
    weights |= {second: weights[first] for second, first in tied.items()}
    _quietly(set_model_state_dict, module, weights)


def adapter_state(
    module: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the adapters and the optimizer's state of each, by canonical name, in CPU memory.

    Every rank holds them whole, so that nothing is gathered; torch's functions would gather the base with them.
    """
    adapters = _adapters(module)
    weights = {name: p.detach().cpu() for name, p in adapters.items()}
    state = {name: _on_cpu(optimizer.state[p]) for name, p in adapters.items() if optimizer.state.get(p)}
    return weights, {"adapters": state, **_beside(module, optimizer, state)}


def _adapters(module: nn.Module) -> dict[str, nn.Parameter]:
    return {canonical_name(name): p for name, p in module.named_parameters() if is_adapter(name)}


def _beside(module: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """What there is beside the state of the parameters: the groups, and the names of those that have no state."""
    groups = group_values(module, optimizer)
    names = [name for group in groups["param_groups"] for name in group["params"]]
    with_state = {canonical_name(name) for name, values in state.items() if values}
    return {**groups, "without_state": [name for name in names if name not in with_state]}


def _on_cpu(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value.cpu() if isinstance(value, torch.Tensor) else value for key, value in values.items()}


def _is_fresh(optimizer: torch.optim.Optimizer) -> bool:
    """Before its first step an optimizer has no state; torch's functions would make one, by a step of its own."""
    return not any(optimizer.state.values())


def _on_cuda(module: nn.Module) -> bool:
    """Whether to offload; on a CPU that copies nothing: the tensors would point into storage that FSDP frees."""
    return any(p.device.type == "cuda" for p in module.parameters())


def _flat(state: dict[str, dict[str, Any]]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the tensors and all else by ``parameter|key``."""
    flat = {f"{name}{BETWEEN}{key}": value for name, values in state.items() for key, value in values.items()}
    tensors = {name: value for name, value in flat.items() if isinstance(value, torch.Tensor)}
    return tensors, {name: value for name, value in flat.items() if name not in tensors}


def _untied(weights: dict[str, torch.Tensor], tied: dict[str, str]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in weights.items() if name not in tied}


def _quietly(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call one of torch's functions without its warnings, which users can do nothing about.

    Some optimizers warn of missing gradients when torch fills their state by a step of learning rate zero.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(*args, **options)
