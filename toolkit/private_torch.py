"""Private APIs of torch, all in this file. Tried with torch 2.13; each has no public equivalent."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.optim import _muon
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import tree_leaves as tree_leaves

FLASH_FORWARD = torch.ops.aten._flash_attention_forward
FLASH_BACKWARD = torch.ops.aten._flash_attention_backward


def has_no_data(tensor: Tensor) -> bool:
    """Whether a tensor has a shape but no data: on the meta device, or while torch traces."""
    return tensor.is_meta or isinstance(tensor, FakeTensor)


def register_meta_kernels() -> None:
    """Register the shapes of CUDA's kernels on the meta device."""
    torch._meta_registrations  # noqa: B018  # imported by its first use


def mark_dynamic(tensor: Tensor, dim: int) -> None:
    """Let one compiled graph serve every size of this dimension."""
    torch._dynamo.maybe_mark_dynamic(tensor, dim)


def specialized_floats() -> AbstractContextManager:
    """Compile Python floats as constants in the block; FlexAttention takes no variables."""
    return torch._dynamo.config.patch(specialize_float=True)


def configure_compiler(any_length: bool) -> None:
    """Compile Python floats as constants, which FlexAttention needs for attention's scale and cap.

    With ``any_length``, a length that equals another size, such as head_size, is not taken for that size, which would
    cost one more graph.
    """
    torch._dynamo.config.specialize_float = True
    if any_length:
        torch.fx.experimental._config.use_duck_shape = False


def set_group_timeouts(seconds: float) -> None:
    """Set the timeout of collectives in all process groups: torch has no public list of them."""
    for group in list(dist.distributed_c10d._world.pg_map):
        group.set_timeout(timedelta(seconds=seconds))


def tensor_norms(tensors: Sequence[Tensor], dtype: torch.dtype | None = None) -> Sequence[Tensor]:
    """Return the norm of each tensor: the fastest pass that propagates NaN and Inf, which clipping uses too."""
    return torch._foreach_norm(list(tensors), dtype=dtype)


def divide_(tensors: Sequence[Tensor], divisor: Tensor) -> None:
    """Divide tensors in place by a scalar tensor on their device."""
    torch._foreach_div_(list(tensors), divisor)


def copy_(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy tensors in place."""
    torch._foreach_copy_(list(targets), list(sources))


def local_parts(module: nn.Module) -> dict[int, tuple[torch.Size, int]]:
    """Return the unsharded shape and the local start index of each parameter that may be sharded, by ``id``.

    They are FSDP's, and DTensors. The index counts elements of the flattened parameter; :func:`local_shard` has the
    local length.
    torch's functions for state dicts know these shards, but hold two copies of the optimizer state on loading.
    """
    flat_params: list[Any] = [handle.flat_param for handle in _handles(module)]
    parts = {
        id(parameter): (shape, info.intra_param_start_idx or 0)
        for flat in flat_params
        for parameter, shape, info in zip(flat._params, flat._shapes, flat._shard_param_infos, strict=True)
    }
    parameters: list[Any] = list(module.parameters())
    for parameter in parameters:
        if hasattr(parameter, "device_mesh"):  # a DTensor, sharded by rows
            from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

            layout = parameter.device_mesh, parameter.placements
            _, (first_row, *_) = compute_local_shape_and_global_offset(parameter.shape, *layout)
            parts[id(parameter)] = (parameter.shape, first_row * parameter.shape[1:].numel())
    return parts


def local_shard(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, in the same memory; another tensor as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def allocate(module: nn.Module, device: torch.device) -> None:
    """Allocate what is on the meta device; ``to_empty`` would also replace what is not."""
    module._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor)


@torch.no_grad()
def fill_shard(parameter: Tensor, value: Tensor) -> None:
    """Copy this rank's part of an unsharded value into a DTensor; no collective."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(parameter, DTensor)
    part = distribute_tensor(
        value.to(parameter.device), parameter.device_mesh, parameter.placements, src_data_rank=None
    )
    parameter.to_local().copy_(part.to_local())


def rank_wrapper() -> Any:
    """Return the collectives of torch's distributed checkpoints, which raise an error of any rank on all ranks.

    ``dcp.save`` consists of them, but cannot plan and write in separate calls.
    """
    from torch.distributed.checkpoint.utils import _DistWrapper

    return _DistWrapper(None, use_dist=dist.is_available() and dist.is_initialized(), coordinator_rank=0)


def restore_gradient_dtypes(module: nn.Module) -> None:
    """Cast the gradients that FSDP accumulated without synchronization to the dtype of their parameters.

    ``no_sync`` accumulates in the unit's compute dtype; a 16-bit sum loses small gradients.
    """
    for handle in _handles(module):
        gradient = handle.flat_param.grad
        if gradient is not None and gradient.dtype != handle._orig_param_dtype:
            gradient.data = gradient.to(handle._orig_param_dtype)
            handle._use_unsharded_grad_views()  # otherwise parameters keep views of the old tensor


def has_fast_bf16() -> bool:
    """Whether this CPU multiplies bf16 matrices several times as fast as fp32 ones (AMX)."""
    return bool(getattr(torch.cpu, "_is_amx_tile_supported", bool)())


def complete_cpu_backend() -> None:
    """Add ``torch.cpu.memory_summary``, which FSDP calls on saving with ``TORCH_DISTRIBUTED_DEBUG=DETAIL``."""
    if not hasattr(torch.cpu, "memory_summary"):
        torch.cpu.memory_summary = lambda: "no summary on a CPU"  # type: ignore[attr-defined]


def record_memory_history(enabled: bool = True) -> None:
    """Record the last 100,000 CUDA allocations with their Python stacks, or stop. Not tried on CUDA."""
    if enabled:
        torch.cuda.memory._record_memory_history(max_entries=100_000, stacks="python")
    else:
        torch.cuda.memory._record_memory_history(enabled=None)


def dump_memory_history(path: Path) -> None:
    """Write the recorded allocations as a file for pytorch.org/memory_viz. Not tried on CUDA."""
    torch.cuda.memory._dump_snapshot(str(path))


def shard_over_one_rank(module: nn.Module) -> None:
    """Gather and free the units of a group of one rank as in larger groups.

    torch makes it NO_SHARD, which keeps the weights that the backward pass needs on the device although they are
    offloaded, and fails in mixed precision with tied weights.
    """
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
    from torch.distributed.fsdp._flat_param import HandleShardingStrategy

    for unit in FullyShardedDataParallel.fsdp_modules(module):
        unit.sharding_strategy = ShardingStrategy.FULL_SHARD
    for handle in _handles(module):
        handle._sharding_strategy = HandleShardingStrategy.FULL_SHARD


def prebuild_ddp_buckets(module: Any) -> None:
    """Order DDP's buckets as after its first backward pass, by a pass whose gradients are zeros.

    The order in which a gradient is summed over more than two ranks depends on its place in a bucket. The first step
    after a resume would round differently if its buckets differed from the uninterrupted run's (S2).
    """
    if module.find_unused_parameters or module.static_graph:  # never refilled; or it must be a pass of the model
        return
    weights = [(name, weight) for name, weight in reversed(list(module.named_parameters())) if weight.requires_grad]
    weights.sort(key=lambda named: "lm_head" not in named[0])  # stored first, and the first to have a gradient
    module.reducer.prepare_for_forward()
    module.reducer.prepare_for_backward([])
    for _, weight in weights:
        weight.backward(torch.zeros_like(weight))
    module.reducer._rebuild_buckets()
    module.zero_grad()


def zero_offloaded_gradients(module: nn.Module) -> None:
    """Set the gradients in CPU memory to zero; FSDP would add the next step's gradients to them."""
    for handle in _handles(module):
        if getattr(handle.flat_param, "_cpu_grad", None) is not None:
            handle.flat_param._cpu_grad.zero_()


def reduce_over_shards_only(module: nn.Module) -> None:
    """Skip HYBRID_SHARD's all-reduce over the replicas in the backward pass; :func:`sum_over_replicas` does it.

    The gradient of a unit is divided by the number of all ranks in both cases.
    """
    from torch.distributed.fsdp._flat_param import HandleShardingStrategy

    for handle in _handles(module):
        handle._sharding_strategy = HandleShardingStrategy.FULL_SHARD


def sum_over_replicas(module: nn.Module, group: dist.ProcessGroup) -> None:
    """All-reduce the shards of the gradients, one collective per unit."""
    for handle in _handles(module):
        if handle.flat_param.grad is not None:
            dist.all_reduce(handle.flat_param.grad, group=group)


def _handles(module: nn.Module) -> list[Any]:
    """Return the objects that hold the flattened parameters of FSDP's units."""
    from torch.distributed.fsdp import FullyShardedDataParallel  # slow to import

    units = FullyShardedDataParallel.fsdp_modules(module)
    return [unit._handle for unit in units if unit._handle is not None]


class StackedMuon(torch.optim.Muon):
    """torch's Muon; of a group with ``rows`` it updates each of the matrices stacked in a weight as a matrix.

    On a CPU it iterates in fp32: bf16 products take 40 times as long on one that has none, and round differently.
    """

    def step(self, closure: Any = None) -> Any:
        """Update the weights."""
        torch_function = _muon._zeropower_via_newtonschulz
        _muon._zeropower_via_newtonschulz = _orthogonalize
        try:
            return super().step(closure)
        finally:
            _muon._zeropower_via_newtonschulz = torch_function

    def _init_group(self, group: Any, *lists: list[Tensor]) -> bool:
        """Fill the lists of weights, gradients and momentum, with views."""
        has_complex = super()._init_group(group, *lists)
        if rows := group.get("rows"):
            for tensors in lists:
                tensors[:] = [part for tensor in tensors for part in tensor.split(rows)]
        return has_complex


_zeropower_via_newtonschulz = _muon._zeropower_via_newtonschulz


def _orthogonalize(grad: Tensor, ns_coefficients: tuple[float, float, float], ns_steps: int, eps: float) -> Tensor:
    """Return the quintic Newton-Schulz iteration of a matrix (Jordan et al. 2024), in fp32 on a CPU."""
    if grad.device.type != "cpu":
        return _zeropower_via_newtonschulz(grad, ns_coefficients, ns_steps, eps)
    a, b, c = ns_coefficients
    is_tall = grad.size(0) > grad.size(1)
    update = (grad.T if is_tall else grad).float()
    update = update / update.norm().clamp(min=eps)
    for _ in range(ns_steps):
        gram = update @ update.T
        update = torch.addmm(update, torch.addmm(gram, gram, gram, beta=b, alpha=c), update, beta=a)
    return update.T if is_tall else update
