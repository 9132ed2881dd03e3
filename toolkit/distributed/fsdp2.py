"""FSDP2 (torch's ``fully_shard``) with explicit meshes and the same numerics as one device, on CUDA and CPU.

Parameters are DTensors, sharded by rows within a shard group. Shard groups are replicas of each other.

Under mixed precision, a single device keeps weights, residual stream, norms and gradients in fp32 and computes matrix
products in 16 bits (autocast). FSDP2 matches that as follows:

- block weight matrices are all-gathered in 16 bits;
- embedding and head are all-gathered in fp32;
- vectors (norms, biases) are replicated in fp32, and their gradients are all-reduced once per step, because a unit has
  one dtype;
- gradients accumulate over micro-batches in fp32, unsharded or as each rank's shard (``FSDPArgs.accumulate``). The
  shards are all-reduced over the replicas once per step in both cases.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.nn.utils import clip_grads_with_norm_
from torch.optim import Optimizer

from toolkit.config import FSDPArgs, Precision
from toolkit.distributed import ranks
from toolkit.distributed.fsdp import ReplicatedVectors, ShardedPrecision
from toolkit.distributed.mesh import Layout, data_mesh
from toolkit.distributed.names import canonical_name
from toolkit.distributed.private_lightning import BackwardSyncControl
from toolkit.distributed.shards import add_shards, give_gradients, shard_of
from toolkit.distributed.tensor_parallel import cuts_of, reduce_gradients
from toolkit.distributed.units import plan_units, unit_precision
from toolkit.models.init import Materializer
from toolkit.private_torch import allocate, fill_shard, local_shard


class FullyShardedStrategy(ReplicatedVectors):
    """FSDP2 with one unit per block, or with the units that ``options`` define.

    Args:
        block_classes: The classes of the blocks. Each block is a unit; the remaining modules form the root unit.
        layout: Sizes of the mesh dimensions.
        sharding: FULL_SHARD, SHARD_GRAD_OP, HYBRID_SHARD or NO_SHARD.
        options: FSDP options (``--fsdp``).
        precision: The compute precision.
        device_type: "cpu" or "cuda".
        offloads: Whether to keep the shards in CPU memory.

    ``materialize`` computes the values of meta-device parameters.
    """

    materialize: Materializer | None = None

    def __init__(
        self,
        block_classes: set[type[nn.Module]],
        layout: Layout,
        sharding: str,
        options: FSDPArgs,
        precision: Precision,
        device_type: str,
        offloads: bool = False,
    ) -> None:
        super().__init__(precision=ShardedPrecision(precision, device_type))
        self._blocks, self._layout, self._options, self._dtypes = tuple(block_classes), layout, options, precision
        self._sharding, self._offloads, self._num_nodes = sharding, offloads, 1
        self._replicated: list[nn.Parameter] = []
        self._module: nn.Module | None = None
        self._backward_sync_control = GradientSync(options.accumulate == "sharded")

    # ---- Fabric's strategy interface

    @property
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_nodes(self) -> int:
        return self._num_nodes

    @property
    def num_processes(self) -> int:
        return len(self.parallel_devices or [])

    def _set_world_ranks(self) -> None:
        assert self.cluster_environment is not None
        self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
        self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)

    def module_to_device(self, module: nn.Module) -> None:
        """Do nothing; ``setup_module`` moves the shards."""

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        dist.all_reduce(tensor, group=group)
        return tensor / ranks.world_size() if reduce_op == "mean" else tensor

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        dist.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        box = [obj]
        dist.broadcast_object_list(box, src=src)
        return box[0]

    # ---- sharding

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Shard ``module`` in place and initialize its meta-device parameters."""
        unit, root = unit_precision(self._options, self._dtypes)
        # Norms and biases are too small to shard, and would be gathered in 16 bits.
        names = [name for name, p in module.named_parameters() if unit and p.ndim < 2]
        if self.materialize is not None:
            whole = {id(module.get_parameter(name)) for name in names}
            for owner in module.modules():
                self.materialize(owner, lambda p: id(p) in whole)
        self._replicated = [module.get_parameter(name) for name in names]
        for parameter in self._replicated:
            parameter.data = parameter.data.to(self.root_device)
        originals = dict(module.named_parameters())
        self._mesh = data_mesh(self._layout, self.root_device.type)
        options: dict[str, Any] = {
            "mesh": self._mesh,
            "ignored_params": set(self._replicated),
            "offload_policy": CPUOffloadPolicy() if self._offloads else OffloadPolicy(),
        }
        keeps_weights = self._sharding in ("SHARD_GRAD_OP", "NO_SHARD")
        for part in reversed(plan_units(module, self._options, self._blocks)[1:]):  # inner units first
            policy = root if self._has_embedding(part.module) else unit
            fully_shard(part.module, mp_policy=_policy(policy), reshard_after_forward=not keeps_weights, **options)
        # the root stays gathered until the end of the backward pass
        fully_shard(module, mp_policy=_policy(root), reshard_after_forward=False if keeps_weights else None, **options)
        if self.materialize is not None:
            allocate(module, torch.device("cpu") if self._offloads else self.root_device)
            for name, parameter in module.named_parameters():
                if (original := originals[name]).is_meta:
                    fill_shard(parameter, self.materialize.value(original))
        add_shards(module)
        self._module = module
        module.register_forward_hook(_reshard)
        return module

    def clip_gradients_norm(
        self, module: nn.Module, optimizer: Optimizer, max_norm: float, *args: Any, **options: Any
    ) -> torch.Tensor:
        """Complete the gradient reduction, then clip. Called once per optimizer step."""
        self._complete_gradients(module)
        self.precision.unscale_gradients(optimizer)
        norm = self._norm(module)
        clip_grads_with_norm_([shard_of(p) for p in module.parameters()], max_norm, norm)
        return norm

    def gradient_norm(self, module: nn.Module) -> torch.Tensor:
        """Complete the gradient reduction and return the norm. Called once per optimizer step."""
        self._complete_gradients(module)
        return self._norm(module)

    def optimizer_step(self, optimizer: Any, **options: Any) -> Any:
        result = super().optimizer_step(optimizer, **options)
        assert self._module is not None
        for parameter in self._module.parameters():
            parameter.grad = None  # the optimizer uses the shards' gradients
        return result

    def _complete_gradients(self, module: nn.Module) -> None:
        self._reduce_replicated_gradients()
        reduce_gradients(module)
        give_gradients(module)

    def _norm(self, module: nn.Module) -> torch.Tensor:
        """Return the total gradient norm, an fp32 scalar on this rank's device, equal on all ranks."""
        replicated, cuts = set(self._replicated), cuts_of(module)
        gradients: dict[tuple[bool, bool], list[torch.Tensor]] = {}  # by whether sharded, and cut by tensor parallelism
        for name, parameter in module.named_parameters():
            if parameter.grad is not None:
                kind = parameter not in replicated, canonical_name(name) in cuts
                gradients.setdefault(kind, []).append(local_shard(parameter.grad))
        squares = {
            (is_sharded, is_cut): self._sum_of_squares(gradients.get((is_sharded, is_cut), []))
            for is_sharded in (True, False)
            for is_cut in (True, False)
        }
        sharded = torch.stack([squares[True, False], squares[True, True]])
        dist.all_reduce(sharded, group=self._mesh.get_group("shard"))
        whole, cut = sharded + torch.stack([squares[False, False], squares[False, True]])
        if cuts:
            ranks.sum_over_ranks(cut, "tensor")
        norm = (whole + cut).sqrt()
        if self._layout.replicate * self._layout.tensor > 1:
            # The norms of the replicas may differ in the last bit; clipping by them would let the replicas diverge.
            dist.all_reduce(norm, op=dist.ReduceOp.MAX)
        return norm


class GradientSync(BackwardSyncControl):
    """Reduces gradients in every micro-batch, or only in the last one of a step.

    Args:
        accumulates_shards: Whether to reduce-scatter each micro-batch. The last one also all-reduces over replicas.
    """

    def __init__(self, accumulates_shards: bool) -> None:
        self._accumulates_shards = accumulates_shards

    @contextmanager
    def no_backward_sync(self, module: nn.Module, enabled: bool) -> Iterator[None]:
        assert isinstance(module, FSDPModule)
        self._set(module, is_last=not enabled)
        try:
            yield
        finally:
            self._set(module, is_last=True)

    def _set(self, module: FSDPModule, is_last: bool) -> None:
        if self._accumulates_shards:
            module.set_requires_all_reduce(is_last)
        else:
            module.set_requires_gradient_sync(is_last)
        module.set_is_last_backward(is_last)


def _reshard(module: nn.Module, *_: Any) -> None:
    """Free all-gathered weights after a forward pass without gradients; otherwise the backward pass frees them."""
    if not torch.is_grad_enabled():
        for part in module.modules():
            if isinstance(part, FSDPModule):
                part.reshard()


def _policy(dtypes: Any) -> MixedPrecisionPolicy:
    if dtypes is None:
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(dtypes.param_dtype, dtypes.reduce_dtype, cast_forward_inputs=False)
