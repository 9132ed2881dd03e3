"""All uses of private torch APIs. Tested with torch 2.13. None has a public equivalent."""

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
from torch.utils._pytree import tree_map_only as tree_map_only

FLASH_FORWARD = torch.ops.aten._flash_attention_forward
FLASH_BACKWARD = torch.ops.aten._flash_attention_backward


def has_no_data(tensor: Tensor) -> bool:
    """Whether a tensor has a shape but no data: a meta tensor or a FakeTensor."""
    return tensor.is_meta or isinstance(tensor, FakeTensor)


def mark_dynamic(tensor: Tensor, dim: int) -> None:
    """Mark a dimension as dynamic, so that one compiled graph serves all sizes."""
    torch._dynamo.maybe_mark_dynamic(tensor, dim)


def specialized_floats() -> AbstractContextManager:
    """Return a context that compiles Python floats as constants, as FlexAttention requires."""
    return torch._dynamo.config.patch(specialize_float=True)


def configure_compiler(any_length: bool, is_exact: bool) -> None:
    """Compile Python floats as constants, because FlexAttention requires a constant scale and soft cap.

    With ``any_length``, dimensions of equal size are not assumed equal (duck shaping). Otherwise a length that equals
    head_size would cost another graph. With ``is_exact``, fused operators round and divide as single ones: Inductor
    omits conversions to 16 bits between them, and on CUDA divides approximately.
    """
    torch._dynamo.config.specialize_float = True
    inductor = torch._inductor.config
    inductor.emulate_precision_casts = is_exact
    if hasattr(inductor, "eager_numerics"):  # not in all versions of torch
        inductor.eager_numerics.division_rounding = is_exact
    if any_length:
        torch.fx.experimental._config.use_duck_shape = False


def set_group_timeouts(seconds: float) -> None:
    """Set the collective timeout of all process groups. torch has no public list of groups."""
    for group in list(dist.distributed_c10d._world.pg_map):
        group.set_timeout(timedelta(seconds=seconds))


def tensor_norms(tensors: Sequence[Tensor], dtype: torch.dtype | None = None) -> Sequence[Tensor]:
    """Return the L2 norm of each tensor, with the kernel of torch's gradient clipping. NaN and Inf propagate."""
    return torch._foreach_norm(list(tensors), dtype=dtype)


def divide_(tensors: Sequence[Tensor], divisor: Tensor) -> None:
    """Divide tensors in place by a scalar tensor on the same device."""
    torch._foreach_div_(list(tensors), divisor)


def copy_(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source tensor into its target."""
    torch._foreach_copy_(list(targets), list(sources))


def local_parts(module: nn.Module) -> dict[int, tuple[torch.Size, int]]:
    """Map the ``id`` of each DTensor parameter, sharded by rows, to its unsharded shape and local start index.

    The index is in elements of the flattened parameter. :func:`local_shard` has the local length. torch's state-dict
    functions also support shards, but hold two copies of the optimizer state when loading.
    """
    parts = {}
    parameters: list[Any] = list(module.parameters())
    for parameter in parameters:
        if hasattr(parameter, "device_mesh"):
            parts[id(parameter)] = (parameter.shape, first_row(parameter) * parameter.shape[1:].numel())
    return parts


def first_row(tensor: Any) -> int:
    """Return the first row of a DTensor's local shard; 0 for other tensors."""
    if not hasattr(tensor, "device_mesh"):
        return 0
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, (row, *_) = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return row


def local_shard(tensor: Tensor) -> Tensor:
    """Return a DTensor's local shard, which shares memory. Other tensors are returned unchanged."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def inner_shard(tensor: Any) -> Any:
    """Return the local tensor object of a DTensor, of which ``to_local`` returns a view."""
    return tensor._local_tensor


def allocate(module: nn.Module, device: torch.device) -> None:
    """Allocate all meta tensors; ``to_empty`` would also replace the others."""
    module._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor)


@torch.no_grad()
def fill_shard(parameter: Tensor, value: Tensor) -> None:
    """Copy this rank's shard of an unsharded value into a DTensor, without a collective."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(parameter, DTensor)
    part = distribute_tensor(
        value.to(parameter.device), parameter.device_mesh, parameter.placements, src_data_rank=None
    )
    parameter.to_local().copy_(part.to_local())


def rank_wrapper() -> Any:
    """Return torch's distributed-checkpoint collectives. An error on any rank is raised on all ranks.

    ``dcp.save`` uses them, but cannot plan and write in separate calls.
    """
    from torch.distributed.checkpoint.utils import _DistWrapper

    return _DistWrapper(None, use_dist=dist.is_available() and dist.is_initialized(), coordinator_rank=0)


def has_fast_bf16() -> bool:
    """Whether this CPU multiplies bf16 matrices several times as fast as fp32 ones (AMX)."""
    return bool(getattr(torch.cpu, "_is_amx_tile_supported", bool)())


def record_memory_history(enabled: bool = True) -> None:
    """Record the last 100,000 CUDA allocations with Python stacks, or stop recording."""
    if enabled:
        torch.cuda.memory._record_memory_history(max_entries=100_000, stacks="python")
    else:
        torch.cuda.memory._record_memory_history(enabled=None)


def dump_memory_history(path: Path) -> None:
    """Write the recorded allocations in the format of pytorch.org/memory_viz. Not tested on CUDA."""
    torch.cuda.memory._dump_snapshot(str(path))


def prebuild_ddp_buckets(module: Any) -> None:
    """Rebuild DDP's buckets with a backward pass of zero gradients, as after the first step.

    With more than two ranks, a gradient's summation order depends on its position in a bucket. If the buckets after a
    resume differed from the uninterrupted run's, the first step would round differently (S2).
    """
    # buckets are never rebuilt, or static_graph needs the model's own pass
    if module.find_unused_parameters or module.static_graph:
        return
    weights = [(name, weight) for name, weight in reversed(list(module.named_parameters())) if weight.requires_grad]
    # the head is stored first and is the first to have a gradient
    weights.sort(key=lambda named: "lm_head" not in named[0] and "score." not in named[0])
    module.reducer.prepare_for_forward()
    module.reducer.prepare_for_backward([])
    for _, weight in weights:
        weight.backward(torch.zeros_like(weight))
    module.reducer._rebuild_buckets()
    module.zero_grad()


def muon_learning_rate(lr: float, adjust_lr_fn: str | None, shape: tuple[int, int]) -> float:
    """Return Muon's learning rate for a matrix of this shape."""
    return _muon._adjust_lr(lr, adjust_lr_fn, torch.Size(shape))


def start_fake_group(world_size: int, rank: int) -> None:
    """Create a process group of fake ranks; this process is ``rank``. Collectives do nothing, also on fake tensors."""
    from torch.distributed._tools import fake_collectives  # noqa: F401  # registers them
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)


def skip_stage_negotiation() -> None:
    """Let pipeline stages use the given shapes without asking the other ranks, because fake ranks do not answer."""
    from torch.distributed.pipelining import _utils, schedules

    def warm_up(schedule: Any, stages: list[Any], *_: Any) -> None:
        for stage in stages:
            stage._inference_mode = _utils.InferenceMode.STATIC

    setattr(schedules._PipelineSchedule, "_warmup_p2p", warm_up)  # noqa: B010


def collective_of(func: Any, out: Any, args: Any, kwargs: Any) -> tuple[list[int], int] | None:
    """Return the ranks of a collective and the bytes of its largest tensor; None for other operators."""
    from torch.distributed._tools.fake_collectives import CollectiveOp, collective_ops, sync_ops

    if func not in collective_ops or func in sync_ops:
        return None
    group: Any = CollectiveOp.get_process_group(func, args)
    return dist.get_process_group_ranks(group), CollectiveOp.get_comm_tensor_size(func, out, args, kwargs)
