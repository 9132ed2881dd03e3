"""Hybrid optimizers: a main optimizer for some parameters of a model, AdamW for the others, as one object."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from toolkit.errors import require_bitsandbytes
from toolkit.private_torch import StackedMuon

Betas = tuple[float, float]
NS_STEPS = 5
"""Newton-Schulz iterations of Muon."""
MIN_8BIT_SIZE = 4096
"""bitsandbytes keeps the state of smaller tensors in fp32."""
QUANTIZED_BLOCK = 256
"""Elements of the state that share a scale in bitsandbytes."""


class HybridOptimizer(torch.optim.Optimizer):
    """The main optimizer for the groups with ``main`` true, AdamW for the others.

    The two share this object's state and its current groups, which may be replaced between steps.

    Args:
        params: Groups; without ``main`` all parameters are the main optimizer's.
        build_main: Builds the main optimizer from groups.
        lr, weight_decay, betas, eps: Passed to AdamW, which is fused.
    """

    def __init__(
        self,
        params: Any,
        build_main: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
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
            self._main = build_main(main)
        if others:
            self._adamw = torch.optim.AdamW(
                others, lr=lr, weight_decay=weight_decay, betas=betas, eps=eps, fused=_can_fuse(others)
            )

    @staticmethod
    def is_main(parameter: nn.Parameter, is_in_block: bool, decays: bool) -> bool:
        """Whether the main optimizer takes a parameter."""
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

    With ``adjust_lr_fn`` "match_rms_adamw" Muon's updates have the size of AdamW's, so that one learning rate and one
    weight decay serve both (Liu et al. 2025, arXiv 2502.16982, section 2.2).

    Args:
        betas, eps: Passed to AdamW.
        momentum, nesterov, ns_steps, adjust_lr_fn: Passed to Muon.
        split_qkv: Orthogonalize fused queries, keys and values one by one: the matrices whose rows a group counts in
            ``rows``.
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
        def build(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
            return StackedMuon(
                groups,
                lr=lr,
                weight_decay=weight_decay,
                momentum=momentum,
                nesterov=nesterov,
                ns_steps=ns_steps,
                adjust_lr_fn=adjust_lr_fn,
            )

        super().__init__(params, build, lr=lr, weight_decay=weight_decay, betas=betas, eps=eps)

    @staticmethod
    def is_main(parameter: nn.Parameter, is_in_block: bool, decays: bool) -> bool:
        # stacked experts have three dimensions, their biases two
        return is_in_block and decays and parameter.ndim == 2


class AdamW8bit(HybridOptimizer):
    """bitsandbytes' AdamW with 8-bit moments; fp32 moments for embeddings, norms and biases, which are less robust.

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

        def build(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
            return EightBit(groups, lr=lr, weight_decay=weight_decay, betas=betas, eps=eps)

        super().__init__(params, build, lr=lr, weight_decay=weight_decay, betas=betas, eps=eps)

    @staticmethod
    def is_main(parameter: nn.Parameter, is_in_block: bool, decays: bool) -> bool:
        return decays


def state_bytes_8bit(elements: int) -> float:
    """Return the bytes of bitsandbytes' state of a parameter, without the tables of 2 KB that all of them share."""
    if elements < MIN_8BIT_SIZE:
        return 2 * 4 * elements
    return 2 * (elements + 4 * -(-elements // QUANTIZED_BLOCK))


def _can_fuse(groups: Iterable[dict[str, Any]]) -> bool:
    return all(p.device.type in ("cuda", "cpu", "mps") for group in groups for p in group["params"])
