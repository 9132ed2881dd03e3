"""FSDP1: Lightning's ``FSDPStrategy`` with explicit meshes and the same numerics as one device, on CUDA and CPU.

Block weights are all-gathered in 16 bits under mixed precision, and vectors are replicated in fp32, as described in
:mod:`toolkit.distributed.fsdp`. All uses of FSDP1's flat parameters and their private handles are in this file.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from lightning.fabric.strategies import FSDPStrategy
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch, FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import CustomPolicy

from toolkit.distributed.device import DTYPES
from toolkit.distributed.fsdp import ShardedStrategy
from toolkit.distributed.mesh import data_mesh
from toolkit.distributed.private_lightning import BackwardSyncControl
from toolkit.distributed.units import UnitDtypes, unit_precision
from toolkit.errors import UserError

_PREFETCH = {"pre": BackwardPrefetch.BACKWARD_PRE, "post": BackwardPrefetch.BACKWARD_POST, "none": None}


class FSDP1Strategy(ShardedStrategy, FSDPStrategy):
    """FSDP1 with one unit per block. The remaining modules form the root unit.

    ``materialize(module, wanted)`` initializes the meta-device parameters directly in ``module`` that satisfy
    ``wanted``.
    """

    materialize: Callable[..., None] | None = None

    def __init__(self, *args: Any) -> None:
        # setup_module creates the mesh, because Fabric would create it on CUDA only
        super().__init__(*args, sharding_strategy="FULL_SHARD")
        self.sharding_strategy = ShardingStrategy[self._sharding]
        self._sums_shards = False
        self._backward_sync_control = _GradientSync(self._options.accumulate == "sharded")

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Wrap ``module`` in FSDP and return the wrapped module."""
        if self._options.buffer_dtype != "auto" and not any(b.is_floating_point() for b in module.buffers()):
            raise UserError(
                f"--fsdp.buffer_dtype {self._options.buffer_dtype}: has no effect, the model has no buffers"
            )
        unit, root = (self._mixed_precision(dtypes) for dtypes in unit_precision(self._options, self._dtypes))
        self._replicate_vectors(module)
        if not hasattr(torch.cpu, "memory_summary"):  # FSDP1 calls it with TORCH_DISTRIBUTED_DEBUG=DETAIL
            torch.cpu.memory_summary = lambda: "no summary on a CPU"  # type: ignore[attr-defined]
        mesh = data_mesh(self._layout, self.root_device.type)
        wrapped = FullyShardedDataParallel(
            module,
            auto_wrap_policy=CustomPolicy(lambda m: isinstance(m, self._blocks) and {"mixed_precision": unit}),
            mixed_precision=root,
            sharding_strategy=self.sharding_strategy,
            device_mesh=mesh,
            device_id=self.root_device,
            param_init_fn=self.materialize,
            ignored_states=self._replicated or None,
            use_orig_params=True,
            backward_prefetch=_PREFETCH[self._options.backward_prefetch],
            forward_prefetch=self._options.forward_prefetch,
            limit_all_gathers=self._options.limit_all_gathers,
        )
        self._shard_group = mesh.get_group("shard")
        if self._options.accumulate == "sharded" and self._layout.replicate > 1:
            _reduce_over_shards_only(wrapped)
            self._replica_group = mesh.get_group("replicate")
            self._sums_shards = True
        return wrapped

    def _complete_gradients(self, module: nn.Module) -> None:
        super()._complete_gradients(module)
        if self._sums_shards:
            for handle in _handles(module):
                if handle.flat_param.grad is not None:
                    dist.all_reduce(handle.flat_param.grad, group=self._replica_group)

    def _mixed_precision(self, dtypes: UnitDtypes | None) -> MixedPrecision | None:
        if dtypes is None:
            return None
        is_mixed = self._dtypes.endswith("-mixed")
        buffers = DTYPES.get(self._options.buffer_dtype, torch.float32 if is_mixed else None)
        rest: dict[str, Any] = {"cast_forward_inputs": False, "cast_root_forward_inputs": False}
        return MixedPrecision(dtypes.param_dtype, dtypes.reduce_dtype, buffers, **rest)


class _GradientSync(BackwardSyncControl):
    """Reduces gradients in every micro-batch, to shards in the parameter dtype, or once per step, from sums in fp32."""

    def __init__(self, accumulates_shards: bool) -> None:
        self._accumulates_shards = accumulates_shards

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager:
        return _accumulate(module) if enabled and not self._accumulates_shards else nullcontext()


@contextmanager
def _accumulate(module: Any) -> Iterator[None]:
    """Defer the reduction, and cast the accumulated gradients to the parameter dtype.

    ``no_sync`` accumulates in the FSDP unit's compute dtype, and a 16-bit sum loses small gradients.
    """
    with module.no_sync():
        yield
    for handle in _handles(module):
        gradient = handle.flat_param.grad
        if gradient is not None and gradient.dtype != handle._orig_param_dtype:
            gradient.data = gradient.to(handle._orig_param_dtype)
            handle._use_unsharded_grad_views()  # otherwise parameters keep views of the old tensor


def flat_parts(module: nn.Module) -> dict[int, tuple[torch.Size, int]]:
    """Map the ``id`` of each FSDP1 parameter to its unsharded shape and its shard's start in the flattened tensor."""
    flat_params: list[Any] = [handle.flat_param for handle in _handles(module)]
    return {
        id(parameter): (shape, info.intra_param_start_idx or 0)
        for flat in flat_params
        for parameter, shape, info in zip(flat._params, flat._shapes, flat._shard_param_infos, strict=True)
    }


def _reduce_over_shards_only(module: nn.Module) -> None:
    """Skip HYBRID_SHARD's all-reduce over replicas in the backward pass; ``_complete_gradients`` does it once a step.

    Either way, gradients are divided by the world size.
    """
    for handle in _handles(module):
        handle._sharding_strategy = type(handle._sharding_strategy).FULL_SHARD


def _handles(module: nn.Module) -> list[Any]:
    """Return the FlatParamHandle of each FSDP unit."""
    units = FullyShardedDataParallel.fsdp_modules(module)
    return [unit._handle for unit in units if unit._handle is not None]
