"""Hybrid optimizers: a main optimizer for some parameters, AdamW for the others."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from toolkit.distributed.device import can_fuse
from toolkit.distributed.shards import sharding_of
from toolkit.errors import UserError, require_bitsandbytes
from toolkit.optim.muon import StackedMuon

Betas = tuple[float, float]
NS_STEPS = 5
"""Newton-Schulz iterations of Muon."""
MIN_8BIT_SIZE = 4096
"""Minimum elements of a tensor for 8-bit state in bitsandbytes; smaller ones have fp32 state."""
QUANTIZED_BLOCK = 256
"""Elements per scale in bitsandbytes' 8-bit state."""


class HybridOptimizer(torch.optim.Optimizer):
    """Updates parameter groups that have ``main`` True with the main optimizer, and other groups with AdamW.

    Both share this object's state and groups. The groups may be replaced between steps.

    Args:
        params: Parameter groups; ``main`` is True by default.
        build_main: Builds the main optimizer from its groups, with lr and weight_decay.
        lr, weight_decay, betas, eps: Passed to AdamW, which is fused.
    """

    def __init__(
        self,
        params: Any,
        build_main: Callable[..., torch.optim.Optimizer],
        *,
        lr: float,
        weight_decay: float,
        betas: Betas,
        eps: float,
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "main": True})
        self._main = self._adamw = None
        main, others = self._split()
        if main:
            self._main = build_main(main, lr=lr, weight_decay=weight_decay)
        if others:
            fused = can_fuse(p for group in others for p in group["params"])
            self._adamw = torch.optim.AdamW(others, lr=lr, weight_decay=weight_decay, betas=betas, eps=eps, fused=fused)

    @staticmethod
    def is_main(parameter: nn.Parameter, is_in_block: bool, decays: bool) -> bool:
        """Whether the main optimizer updates a parameter."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step both optimizers. ``closure`` is not supported: the loss is evaluated once per step."""
        assert closure is None
        for optimizer, groups in zip((self._main, self._adamw), self._split(), strict=True):
            if optimizer is not None and groups:
                optimizer.param_groups, optimizer.state = groups, self.state
                optimizer.step()

    def _split(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        return [g for g in self.param_groups if g["main"]], [g for g in self.param_groups if not g["main"]]


class Muon(HybridOptimizer):
    """``torch.optim.Muon`` for the matrices of the blocks, AdamW for all other parameters.

    With ``adjust_lr_fn`` "match_rms_adamw", Muon's updates match the RMS of AdamW's updates. Both then use the same
    learning rate and weight decay (Liu et al. 2025, arXiv 2502.16982, section 2.2).

    Args:
        betas, eps: Passed to AdamW.
        momentum, nesterov, ns_steps, adjust_lr_fn: Passed to Muon.
        split_qkv: Orthogonalize fused queries, keys and values separately. A group's ``rows`` are their row counts.

    The matrices may be sharded; see :class:`toolkit.optim.muon.StackedMuon`.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        betas: Betas = (0.9, 0.95),
        eps: float = 1e-8,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = NS_STEPS,
        adjust_lr_fn: str = "match_rms_adamw",
        split_qkv: bool = False,
    ) -> None:
        build = partial(StackedMuon, momentum=momentum, nesterov=nesterov, ns_steps=ns_steps, adjust_lr_fn=adjust_lr_fn)
        super().__init__(params, build, lr=lr, weight_decay=weight_decay, betas=betas, eps=eps)

    @staticmethod
    def is_main(parameter: nn.Parameter, is_in_block: bool, decays: bool) -> bool:
        # stacked experts have three dimensions, their biases two
        return is_in_block and decays and parameter.ndim == 2


class AdamW8bit(HybridOptimizer):
    """bitsandbytes' 8-bit AdamW for matrices; AdamW for embeddings, norms and biases, which 8-bit state may harm.

    See Dettmers et al. 2022 (arXiv 2110.02861), sections 2.1 and 2.3.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        weight_decay: float = 1e-2,
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        require_bitsandbytes("--optimizer.name AdamW8bit")
        from bitsandbytes.optim import AdamW8bit as EightBit

        build = partial(EightBit, betas=betas, eps=eps)
        super().__init__(params, build, lr=lr, weight_decay=weight_decay, betas=betas, eps=eps)
        for parameter in (p for group in self._split()[0] for p in group["params"]):
            _require_equal_blocks(parameter)

    @staticmethod
    def is_main(parameter: nn.Parameter, is_in_block: bool, decays: bool) -> bool:
        return decays


def _require_equal_blocks(parameter: nn.Parameter) -> None:
    """Require that the quantized blocks of a sharded matrix are the same as of the unsharded one."""
    sharding = sharding_of(parameter)
    if sharding is None or sharding.shape.numel() < MIN_8BIT_SIZE:
        return
    smallest = sharding.numel(sharding.size - 1)
    if sharding.shape[1:].numel() % QUANTIZED_BLOCK or smallest < MIN_8BIT_SIZE:
        shape = " x ".join(map(str, sharding.shape))
        raise UserError(
            f"--optimizer.name AdamW8bit: the quantized blocks of a {shape} matrix do not align with its shards on "
            f"{sharding.size} devices; its rows must be a multiple of {QUANTIZED_BLOCK} elements, and each shard must "
            f"have at least {MIN_8BIT_SIZE}; use --strategy ddp or --optimizer.name AdamW"
        )
