"""The state of a model and its optimizer, by the names of the parameters: one path for every strategy.

Fabric's own sharded load corrupts the optimizer under HYBRID_SHARD, and its single-device load matches the optimizer's
state by position; torch's functions go by name and hold for all layouts.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

_FULL = StateDictOptions(full_state_dict=True)


def model_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the weights under their canonical names. Tied weights come under both names, as one tensor."""
    return get_model_state_dict(model, options=_FULL)


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the optimizer's state, keyed by the names of the parameters."""
    return get_optimizer_state_dict(model, optimizer, options=_FULL)


def set_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    if not state["state"]:  # plain SGD has none, and torch does not know on which device to put nothing
        return
    with warnings.catch_warnings():
        # torch fills an optimizer's state by a step of learning rate zero, and some warn of the missing gradients
        warnings.simplefilter("ignore")
        set_optimizer_state_dict(model, optimizer, state, options=_FULL)
