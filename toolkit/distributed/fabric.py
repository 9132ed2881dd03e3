"""Build Lightning's Fabric."""

import logging
import warnings
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.fabric.plugins.precision import HalfPrecision
from lightning.fabric.strategies import ParallelStrategy, SingleDeviceStrategy
from torch import nn

from toolkit.config import Accelerator, Auto, DDPArgs, FSDPArgs, Precision
from toolkit.distributed import ranks
from toolkit.distributed.cpu_memory import disable_malloc_trim
from toolkit.distributed.ddp_bf16 import BF16DDPStrategy, BucketedDDPStrategy
from toolkit.distributed.device import pick_accelerator, pick_precision
from toolkit.distributed.fsdp import FullyShardedStrategy, fsdp_strategy
from toolkit.distributed.private_lightning import FabricModule, with_launcher
from toolkit.distributed.strategy import StrategyPlan
from toolkit.distributed.world import WorldInfo, cluster_environment
from toolkit.extension import load_registered
from toolkit.models.init import Materializer
from toolkit.private_torch import tensor_norms


class _True16Bits(HalfPrecision):
    """Fabric's half precision without casting modules. LoRA adapters of a 16-bit base model stay in fp32."""

    def convert_module(self, module: nn.Module) -> nn.Module:
        return module


def single_device_fabric(accelerator: Accelerator, precision: Precision | Auto) -> Fabric:
    """Build Fabric on one device for evaluation. Does not change the model's dtypes.

    auto is bf16-true on CUDA GPUs with bfloat16, because mixed precision casts all weights in every forward pass.
    """
    _quiet_libraries()
    device = pick_accelerator(accelerator)
    disable_malloc_trim(device)
    options, plugins = _precision_options(pick_precision(precision, device, on_cuda="bf16-true"))
    # without an environment, Fabric initializes MPI where mpi4py is installed, which may abort the process
    return Fabric(accelerator=device, devices=1, plugins=[LightningEnvironment(), *plugins], **options)


def _quiet_libraries() -> None:
    """Hide messages of Lightning and Inductor about settings that this project chooses."""
    for name in ("lightning.fabric", "lightning.pytorch"):  # Fabric logs to both
        logging.getLogger(name).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", r"\s*(Online softmax is disabled|TensorFloat32 tensor cores)")


def _precision_options(precision: Precision) -> tuple[dict[str, Any], list[Any]]:
    """Return Fabric's keyword arguments and plugins for a precision."""
    is_bf16 = precision in ("bf16-true", "bf16-master")
    return ({}, [_True16Bits("bf16-true")]) if is_bf16 else ({"precision": precision}, [])


def materialize_with(fabric: Fabric, module: nn.Module, materialize: Materializer) -> None:
    """Materialize a meta-device module immediately. With FSDP, do so when the strategy shards it."""
    if isinstance(fabric.strategy, FullyShardedStrategy):
        fabric.strategy.materialize = materialize
    else:
        for submodule in module.modules():
            materialize(submodule)


def setup_module(fabric: Fabric, module: nn.Module) -> FabricModule:
    """Wrap a module for the strategy. DDP does not wrap a module that is not trained."""
    if isinstance(fabric.strategy, FullyShardedStrategy) or any(p.requires_grad for p in module.parameters()):
        wrapped = fabric.setup(module)
        ranks.set_timeout(ranks.timeout())  # new groups start with torch's default timeout
        return wrapped
    return FabricModule(fabric.to_device(module), fabric.strategy)


def block_dtype(fabric: Fabric, dtype: torch.dtype) -> torch.dtype | None:
    """Return the dtype in which FSDP all-gathers block weights of dtype ``dtype``; None without FSDP."""
    return fabric.strategy.block_dtype(dtype) if isinstance(fabric.strategy, FullyShardedStrategy) else None


def knows_gradient_norm(fabric: Fabric) -> bool:
    """Whether :func:`gradient_norm` supports the strategy. Extension strategies support only clipping."""
    return isinstance(fabric.strategy, (SingleDeviceStrategy, BucketedDDPStrategy, FullyShardedStrategy))


def gradient_norm(fabric: Fabric, model: FabricModule, optimizer: Any) -> torch.Tensor:
    """Complete the gradient reduction and return the norm, an fp32 scalar on every rank. Call once per step."""
    if isinstance(fabric.strategy, FullyShardedStrategy):
        return fabric.strategy.gradient_norm(model._forward_module)
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    if not gradients:
        return torch.zeros((), device=fabric.device)
    return torch.linalg.vector_norm(torch.stack(list(tensor_norms(gradients, torch.float32))))


def build_fabric(
    plan: StrategyPlan,
    world: WorldInfo,
    *,
    accelerator: str,
    precision: Precision,
    fsdp: FSDPArgs,
    ddp: DDPArgs,
    block_classes: set[type[nn.Module]],
    groups: Mapping[str, Any] | None = None,
) -> Fabric:
    """Build Fabric for a strategy plan. :func:`toolkit.distributed.run_group.launch_processes` launches it.

    Args:
        accelerator: "cpu", "cuda" or "mps".
        block_classes: Module classes. Each instance becomes one FSDP unit.
        groups: Extension options by group name.
    """
    _quiet_libraries()
    ranks.set_layout(plan.layout)
    options, plugins = _precision_options(precision)
    if plan.kind == "single":
        return Fabric(accelerator=accelerator, devices=1, plugins=[cluster_environment(world), *plugins], **options)
    strategy: ParallelStrategy
    if plan.extension is not None:
        extension = load_registered("strategies", plan.extension)()
        cls, arguments = extension.build(plan, groups or {}, precision=precision, block_classes=block_classes)
        strategy = with_launcher(cls)(**arguments)
    elif plan.kind == "ddp":
        strategy = with_launcher(BF16DDPStrategy if precision == "bf16-master" else BucketedDDPStrategy)(**asdict(ddp))
    else:
        strategy = fsdp_strategy(plan, fsdp, precision, accelerator, block_classes)
        options, plugins = {}, []  # the strategy sets the precision
    return Fabric(
        accelerator=accelerator,
        strategy=strategy,
        devices=world.devices,
        num_nodes=world.num_nodes,
        plugins=[cluster_environment(world), *plugins],
        **options,
    )
