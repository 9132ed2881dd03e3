"""Lightning Fabric strategies in which Thunder's compiled blocks contain the collectives.

Each block is a unit: one function, compiled by Thunder, that gathers weights and reduces gradients. Parameters outside
blocks (embedding, final norm, head) form the root unit: torch gathers them before the forward pass and reduces their
gradients at the end of the backward pass. Without block classes, the complete module is one unit, as in LitGPT's
strategies. Gradients are reduced after each micro-batch. Tested with gloo on CPUs only, not on CUDA.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from lightning.fabric.strategies import DDPStrategy, ModelParallelStrategy
from lightning.fabric.strategies.parallel import ParallelStrategy
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.nn import functional as F
from torch.optim import Optimizer

from toolkit.distributed.private_lightning import BackwardSyncControl
from toolkit_thunder.kernel import Kernel
from toolkit_thunder.options import ThunderArgs
from toolkit_thunder.units import install_units
from toolkit_thunder.versions import load_thunder

Blocks = Sequence[type[nn.Module]]


class ReduceEachMicroBatch(BackwardSyncControl):
    """Lets a strategy reduce every micro-batch's gradients."""

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager:
        return nullcontext()


class ThunderDDPStrategy(DDPStrategy):
    """Data parallelism in which Thunder's compiled blocks all-reduce the gradients.

    Args:
        jit: Whether to compile; False runs eagerly.
        executors: Names of Thunder executors; None for Thunder's defaults.
        blocks: Classes of the modules to compile separately. By default the complete module is compiled.
        bucket_size_in_mb: Size of the gradient buckets within a unit.
        options: Options of DDPStrategy, such as ``timeout``.

    Raises:
        UserError: an installed version is not supported.
    """

    def __init__(
        self,
        jit: bool = True,
        executors: Sequence[str] | None = None,
        blocks: Blocks = (),
        bucket_size_in_mb: float = 25.0,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        load_thunder()
        self._jit, self._executors, self._blocks = jit, executors, tuple(blocks)
        self._bucket_size = bucket_size_in_mb
        self._backward_sync_control = ReduceEachMicroBatch()

    def setup_module(self, module: nn.Module) -> Any:
        """Broadcast rank 0's weights to all ranks, and compile.

        Raises:
            UserError: Thunder cannot compile the module, or an executor is unknown.
        """
        with torch.no_grad():
            for tensor in (*module.parameters(), *module.buffers()):
                dist.broadcast(tensor, src=0)

        def make_transforms() -> list[Any]:
            from thunder.distributed.transforms.ddp_v2 import DDPTransform

            return [DDPTransform(dist.group.WORLD, self._bucket_size, None)]

        make_kernel = _kernel_maker(self._jit, self._executors, make_transforms)
        install_units(module, self._blocks, make_kernel, lambda p: p, _AverageGradient.apply)
        return module


class ThunderFSDPStrategy(ModelParallelStrategy):
    """Fully sharded data parallelism over all ranks, compiled by Thunder.

    Parameters are DTensors sharded by rows. As with FSDP2, Fabric and torch handle clipping, state dicts and optimizer
    state. During setup, every rank holds the complete model. Fabric does not support precision 16-mixed here.

    Args:
        sharding_strategy: ZERO3 gathers a unit's weights again in the backward pass; ZERO2 keeps them.
        bucketing_strategy: Tensors per all-gather: one tensor (NONE), one layer (LAYER) or one block (BLOCK).
        jit: Whether to compile; False runs eagerly and keeps gathered weights as ZERO2 does.
        executors: Names of Thunder executors; None for Thunder's defaults.
        blocks: Classes of the modules to compile separately. By default the complete module is compiled.
        state_dict_type: Whether ``fabric.save`` writes one file ("full") or a folder of shards ("sharded").
        options: Options of ModelParallelStrategy, such as ``timeout``.

    Raises:
        UserError: an installed version is not supported.
    """

    def __init__(
        self,
        sharding_strategy: Literal["ZERO2", "ZERO3"] = "ZERO3",
        bucketing_strategy: Literal["NONE", "LAYER", "BLOCK"] = "NONE",
        jit: bool = True,
        executors: Sequence[str] | None = None,
        blocks: Blocks = (),
        state_dict_type: Literal["full", "sharded"] = "sharded",
        **options: Any,
    ) -> None:
        super().__init__(self._shard, save_distributed_checkpoint=state_dict_type == "sharded", **options)
        load_thunder()
        ThunderArgs(sharding_strategy, bucketing_strategy)  # checks the names
        self._sharding, self._bucketing = sharding_strategy, bucketing_strategy
        self._jit, self._executors, self._blocks = jit, executors, tuple(blocks)
        self._backward_sync_control = ReduceEachMicroBatch()

    def setup_environment(self) -> None:
        ParallelStrategy.setup_environment(self)  # Fabric's class would create a two-dimensional mesh
        self._setup_distributed()

    @property
    def device_mesh(self) -> DeviceMesh:
        """All ranks."""
        if self._device_mesh is None:
            shape, names = (dist.get_world_size(),), ("data_parallel",)
            self._device_mesh = init_device_mesh(self.root_device.type, shape, mesh_dim_names=names)
        return self._device_mesh

    def clip_gradients_norm(
        self, module: nn.Module, optimizer: Optimizer, max_norm: float, *args: Any, **options: Any
    ) -> Tensor:
        """Clip the gradient by its global norm, and return the norm, which is equal on all ranks."""
        norm = super().clip_gradients_norm(module, optimizer, max_norm, *args, **options)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def _shard(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        """Shard the parameters and install the compiled units.

        Raises:
            ValueError: a parameter is a scalar.
            UserError: Thunder cannot compile the module, or an executor is unknown.
        """

        def transforms() -> list[Any]:
            from toolkit_thunder.sharding import make_transforms

            return make_transforms(self.root_device, mesh.get_group(), self._sharding, self._bucketing)

        make_kernel = _kernel_maker(self._jit, self._executors, transforms)
        install_units(module, self._blocks, make_kernel, _padded_rows, _gathered)
        _shard_parameters(module, mesh)
        for buffers in (part._buffers for part in module.modules()):
            buffers |= {name: b.to(self.root_device) for name, b in buffers.items() if b is not None and not b.is_meta}
        return module


def _kernel_maker(
    jit: bool, executors: Sequence[str] | None, make_transforms: Callable[[], list[Any]]
) -> Callable[[nn.Module, str], Kernel | None]:
    return lambda part, name: Kernel(part, name, executors, make_transforms) if jit else None


def _shard_parameters(module: nn.Module, mesh: DeviceMesh) -> None:
    """Replace each parameter by a DTensor sharded by rows, with rank 0's values. Tied parameters share a DTensor."""
    sharded: dict[nn.Parameter, nn.Parameter] = {}
    for path, owner in module.named_modules():
        for name, parameter in owner._parameters.items():
            if parameter is None:
                continue
            if not parameter.ndim:
                raise ValueError(f"parameter {path}.{name} is a scalar and cannot be sharded; give it shape (1,)")
            if parameter not in sharded:
                rows = distribute_tensor(parameter.detach(), mesh, [Shard(0)])
                sharded[parameter] = nn.Parameter(rows, requires_grad=parameter.requires_grad)
            owner._parameters[name] = sharded[parameter]


def _padded_rows(parameter: Tensor) -> Tensor:
    """Return this rank's rows of a DTensor, zero-padded to the largest shard as Thunder requires."""
    assert isinstance(parameter, DTensor)
    rows = parameter.to_local()
    missing = math.ceil(parameter.size(0) / parameter.device_mesh.size()) - rows.size(0)
    return F.pad(rows, (0, 0) * (rows.ndim - 1) + (0, missing)) if missing else rows


def _gathered(parameter: Tensor) -> Tensor:
    """Return the unsharded parameter. The backward pass averages its gradient over the ranks."""
    assert isinstance(parameter, DTensor)
    complete, size = parameter.full_tensor(grad_placements=[Partial()]), parameter.device_mesh.size()
    if complete.requires_grad:
        complete.register_hook(lambda gradient: gradient / size)
    return complete


class _AverageGradient(torch.autograd.Function):
    """Identity function whose backward pass averages the gradient over the ranks."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        gradient = gradient / dist.get_world_size()
        dist.all_reduce(gradient)
        return gradient
