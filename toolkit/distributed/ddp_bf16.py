"""DDP for bf16 weights. Gradients are accumulated and all-reduced in fp32."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from lightning.fabric.strategies import DDPStrategy
from torch import Tensor, nn
from torch import distributed as dist

from toolkit.distributed.private_lightning import BackwardSyncControl
from toolkit.private_torch import prebuild_ddp_buckets


class BucketedDDPStrategy(DDPStrategy):
    """Fabric's DDP with its final buckets from the first step on."""

    def setup_module(self, module: nn.Module) -> Any:
        wrapped = super().setup_module(module)
        prebuild_ddp_buckets(wrapped)
        return wrapped


class BF16DDPStrategy(BucketedDDPStrategy):
    """Fabric's DDP with an fp32 all-reduce of bf16 gradients. Not tested on CUDA."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._backward_sync_control = self._sums = FP32GradientSum()

    def setup_module(self, module: nn.Module) -> Any:
        wrapped = super().setup_module(module)
        self._sums.attach(wrapped)
        return wrapped


class FP32GradientSum(BackwardSyncControl):
    """Accumulates gradients of bf16 weights in fp32.

    Without gradient accumulation, the gradient is the fp32 mean over ranks, rounded to bf16. With accumulation, each
    micro-batch's gradient is added to an fp32 sum and freed. The last backward pass all-reduces the sums bucket by
    bucket and makes them the gradients.
    """

    def __init__(self) -> None:
        self._sums: dict[Tensor, Tensor] = {}
        self._accumulates = False

    def attach(self, wrapped: Any) -> None:
        """Register the communication hook and the gradient hooks on a DDP module."""
        wrapped.register_comm_hook(None, lambda state, bucket: self._reduce(bucket))
        for parameter in wrapped.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._add)

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager:
        return self._accumulate(module) if enabled else self._finalize_gradients(module)

    @contextmanager
    def _accumulate(self, module: Any) -> Iterator[None]:
        _restore_gradient_dtypes(module)
        self._accumulates = True
        try:
            with module.no_sync():
                yield
        finally:
            self._accumulates = False

    @contextmanager
    def _finalize_gradients(self, module: nn.Module) -> Iterator[None]:
        _restore_gradient_dtypes(module)
        yield
        for parameter in module.parameters():
            if parameter.grad is not None and parameter in self._sums:
                parameter.grad, parameter.grad_dtype = None, torch.float32
                parameter.grad = self._sums[parameter]
        self._sums = {}

    @torch.no_grad()
    def _add(self, parameter: Any) -> None:
        if self._accumulates:
            if parameter in self._sums:
                self._sums[parameter] += parameter.grad
            else:
                self._sums[parameter] = parameter.grad.float()
            parameter.grad = None

    def _reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        total, parameters = bucket.buffer().float(), bucket.parameters()
        parts = total.split([p.numel() for p in parameters])
        is_accumulated = bool(self._sums)
        if is_accumulated:
            for parameter, part in zip(parameters, parts, strict=True):
                if parameter in self._sums:
                    part += self._sums[parameter].flatten()
                else:  # another rank may have a gradient; all ranks get the same mean
                    self._sums[parameter] = torch.empty_like(parameter, dtype=torch.float32)
        total /= dist.get_world_size()
        reduced = dist.all_reduce(total, async_op=True).get_future()

        def store(future: torch.futures.Future) -> Tensor:
            if is_accumulated:
                for parameter, part in zip(parameters, parts, strict=True):
                    self._sums[parameter].copy_(part.view_as(parameter))
            return bucket.buffer().copy_(total)

        return reduced.then(store)


def _restore_gradient_dtypes(module: nn.Module) -> None:
    """Let the backward pass produce bf16 gradients again, as DDP's buckets require. Norms would get fp32 gradients."""
    for parameter in module.parameters():
        if parameter.grad is None:
            parameter.grad_dtype = parameter.dtype
