"""Predict a step's communication time by strategy, and the part that computation hides."""

from dataclasses import dataclass

from toolkit.distributed.mesh import Layout
from toolkit.distributed.units import EMBEDDING, HEAD, Unit, block_dtypes, plan_units
from toolkit.measure.gathered import unit_sizer
from toolkit.measure.gpus import GpuSpec
from toolkit.measure.inputs import FP32, MemoryInputs
from toolkit.measure.sample import quantized_weights
from toolkit.models.block import Block
from toolkit.models.gpt import GPT
from toolkit.models.lora import is_adapter

NCCL_SHARE = 0.8
"""Fraction of a link's bandwidth that collectives of large tensors reach (nccl-tests on 8 x H100: 360 of 450 GB/s)."""
LATENCY = 30e-6
"""Minimum seconds of a collective."""


@dataclass(frozen=True)
class Communication:
    """Communication seconds per step.

    Args:
        sent: Seconds of all collectives.
        exposed: Seconds that do not overlap with computation.
        links: Names of the links, for display.
    """

    sent: float = 0.0
    exposed: float = 0.0
    links: str = ""


def communication(
    setup: MemoryInputs, model: GPT, gpu: GpuSpec, devices: int, num_nodes: int, forward: float, backward: float
) -> Communication:
    """Predict the communication time of a step.

    ddp: the all-reduce of every bucket but the last overlaps with the last backward pass. fsdp: a block's all-gather
    overlaps with the previous block, its reduction with the next block's backward pass; collectives of the root unit,
    the first unit and replicated parameters do not overlap.

    Args:
        model: The model on the meta device.
        devices: Devices per node.
        forward: Compute seconds of a forward pass.
        backward: Compute seconds of a backward pass, including recomputation.
    """
    links = gpu.link_name if num_nodes == 1 else f"{gpu.network_name} between nodes"
    if num_nodes > 1 and devices > 1:
        links = f"{gpu.link_name}, {links}"
    if setup.strategy.kind == "single":
        return Communication()
    topology = _Topology(gpu, max(1, devices // setup.tensor), num_nodes)  # the ranks with the same part of each layer
    if setup.strategy.kind == "ddp":
        trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        itemsize = FP32 if setup.has_masters else setup.weight_bytes  # see distributed/ddp_bf16.py
        size = sum(p.numel() * (FP32 if is_adapter(n) else itemsize) for n, p in trained)
        bucket = setup.ddp.bucket_cap_mb * 2**20 * itemsize / setup.weight_bytes
        sent, last = topology.all_reduce(size), topology.all_reduce(min(size, bucket))
        return Communication(sent, max(last, sent - backward), links)
    sent, exposed = _fsdp(setup, model, topology, forward, backward)
    tensor = _tensor(setup, _Topology(gpu, devices, num_nodes))
    return Communication(sent + tensor, exposed + tensor, links)


@dataclass(frozen=True)
class _Topology:
    gpu: GpuSpec
    devices: int
    num_nodes: int

    def gather(self, size: float, ranks: int) -> float:
        """Return the seconds to all-gather or reduce-scatter ``size`` bytes over ``ranks`` consecutive devices."""
        if ranks == 1:
            return 0.0
        moved, across = size * (ranks - 1) / ranks, ranks > self.devices
        rate = self.gpu.link if self.devices > 1 else self.gpu.network
        if across:  # the ring leaves each node through all of its network links
            rate = min(rate, self.gpu.network * min(ranks, self.devices))
        return LATENCY + moved / (rate * NCCL_SHARE)

    def all_reduce_replicas(self, size: float, layout: Layout) -> float:
        """Return the seconds to all-reduce each device's shard of ``size`` bytes over the replicas."""
        if layout.shard == 1:
            return self.all_reduce(size)
        rate = self.gpu.link if self.num_nodes == 1 else self.gpu.network
        return LATENCY + 2 * size * (layout.replicate - 1) / layout.replicate / (rate * NCCL_SHARE)

    def all_reduce(self, size: float) -> float:
        """Return the seconds of an all-reduce: within nodes, then of each device's part between nodes."""
        inside = 2 * self.gather(size, self.devices)
        if self.num_nodes == 1:
            return inside
        between = 2 * size / self.devices * (self.num_nodes - 1) / self.num_nodes
        return inside + LATENCY + between / (self.gpu.network * NCCL_SHARE)


def _tensor(setup: MemoryInputs, topology: _Topology) -> float:
    """Return the seconds of tensor parallelism's all-reduces. Computation waits for each of them.

    Per layer, the outputs of attention and MLP, once more where they are recomputed, and the gradients of their inputs;
    the embedded tokens and the gradient of the head's input. The loss's all-reduces are small.
    """
    if setup.tensor == 1:
        return 0.0

    def all_reduce(itemsize: int) -> float:
        return 2 * topology.gather(itemsize * setup.tokens * setup.config.n_embd, setup.tensor)

    outputs = 2 * setup.config.n_layer * (1 if setup.activation_checkpointing == "none" else 2)
    gradients = 2 * setup.config.n_layer + 2  # autocast keeps the residual stream in fp32
    seconds = outputs * all_reduce(setup.compute_bytes) + gradients * all_reduce(setup.weight_bytes)
    return setup.accumulation * seconds


def _fsdp(setup: MemoryInputs, model: GPT, topology: _Topology, forward: float, backward: float) -> tuple[float, float]:
    """Return the seconds of all collectives, and the exposed seconds."""
    rest, *units = plan_units(model, setup.fsdp, (Block,))
    has_vectors = block_dtypes(setup.fsdp, setup.precision) is not None  # replicated
    size = unit_sizer(setup, model, quantized_weights(setup, model))
    strategy, steps = setup.strategy, setup.accumulation

    def gather(part: Unit, kind: str = "param_dtype", trained: bool = False) -> float:
        bytes_sent = size(part, kind, trained)
        return topology.gather(bytes_sent, strategy.shards) if bytes_sent else 0.0

    keeps_weights = strategy.sharding in ("SHARD_GRAD_OP", "NO_SHARD")
    in_forward = 1 if keeps_weights and setup.accumulates_unsharded else steps  # kept until the gradients are reduced
    reductions = 1 if setup.accumulates_unsharded else steps
    gathers = sum(gather(part) for part in units)
    scatters = sum(gather(part, "reduce_dtype", trained=True) for part in units)
    root_gather, root_scatter = gather(rest), gather(rest, "reduce_dtype", trained=True)
    # the backward pass needs no embedding, and follows the head at once
    again = 0.0 if keeps_weights else sum(gather(part) for part in units if part.name not in (HEAD, EMBEDDING))
    sent = in_forward * (gathers + root_gather) + steps * again + reductions * (scatters + root_scatter)
    first = gather(units[0]) if units else 0.0
    exposed = in_forward * (root_gather + first + max(0.0, gathers - forward))
    # the reductions share the link with the gathers of their backward pass
    prefetched = 0.0 if setup.fsdp.backward_prefetch == "none" else again
    exposed += steps * (again - prefetched) + (steps - reductions) * max(0.0, prefetched - backward)
    exposed += reductions * (root_scatter + max(0.0, prefetched + scatters - backward))
    if strategy.layout.replicate > 1:  # each shard over the replicas, overlapped when it follows a reduce-scatter
        shards = sum(size(part, "reduce_dtype", True) for part in [rest, *units]) / strategy.shards
        replicas = topology.all_reduce_replicas(shards, strategy.layout)
        hidden = 0.0 if setup.fsdp.accumulate == "sharded" else backward
        sent, exposed = sent + replicas, exposed + max(LATENCY, replicas - hidden)
    if strategy.layout.context > 1:  # keys and values of each layer and, in the backward pass, their gradients
        passes = 2 + (setup.activation_checkpointing != "none")
        gathered = setup.config.n_layer * passes * topology.gather(setup.gathered_bytes, strategy.layout.context)
        sent, exposed = sent + steps * gathered, exposed + steps * gathered
    if vectors := sum(p.numel() for p in model.parameters() if p.requires_grad and has_vectors and p.ndim < 2):
        mean = topology.all_reduce(FP32 * vectors)
        sent, exposed = sent + mean, exposed + mean
    return sent, exposed
