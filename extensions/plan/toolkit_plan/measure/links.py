"""Predict a step's communication time by strategy, and the part that computation hides."""

from dataclasses import dataclass

from toolkit.distributed.gpus import GpuSpec
from toolkit.distributed.units import EMBEDDING, HEAD, Unit, plan_units
from toolkit.models.block import Block
from toolkit.models.gpt import GPT
from toolkit_plan.measure.gathered import unit_sizer
from toolkit_plan.measure.inputs import FP32, MemoryInputs
from toolkit_plan.measure.parameters import stored_parameters

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
    inputs: MemoryInputs, model: GPT, gpu: GpuSpec, devices: int, num_nodes: int, forward: float, backward: float
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
    if inputs.strategy.kind == "single":
        return Communication()
    topology = _Topology(gpu, max(1, devices // inputs.tensor), num_nodes)  # the ranks with the same part of each layer
    if inputs.strategy.kind == "ddp":
        widened = FP32 / inputs.weight_bytes if inputs.has_masters else 1  # see distributed/ddp_bf16.py
        size = widened * sum(p.bytes for p in stored_parameters(inputs, model) if p.is_trained)
        bucket = widened * inputs.ddp.bucket_cap_mb * 2**20
        sent = topology.all_reduce(size)
        exposed = max(topology.all_reduce(min(size, bucket)), sent - backward)
    else:
        sent, exposed = _fsdp(inputs, model, topology, forward, backward)
        tensor = _tensor(inputs, _Topology(gpu, devices, num_nodes))
        sent, exposed = sent + tensor, exposed + tensor
    names = [gpu.link_name] * (num_nodes == 1 or devices > 1) + [f"{gpu.network_name} between nodes"] * (num_nodes > 1)
    return Communication(sent, exposed, ", ".join(names))


def _ring(size: float, ranks: int, rate: float) -> float:
    """Return the seconds to all-gather or reduce-scatter ``size`` bytes over links of this rate."""
    return LATENCY + size * (ranks - 1) / ranks / (rate * NCCL_SHARE) if ranks > 1 and size else 0.0


@dataclass(frozen=True)
class _Topology:
    gpu: GpuSpec
    devices: int
    num_nodes: int

    def gather(self, size: float, ranks: int) -> float:
        """Return the seconds to all-gather or reduce-scatter ``size`` bytes over ``ranks`` consecutive devices."""
        rate = self.gpu.link
        if ranks > self.devices:  # the ring leaves each node through all of its network links
            rate = min(rate, self.gpu.network * self.devices)
        return _ring(size, ranks, rate)

    def all_reduce(self, size: float) -> float:
        """Return the seconds of an all-reduce: within nodes, then of each device's part between nodes."""
        return 2 * self.gather(size, self.devices) + _ring(2 * size / self.devices, self.num_nodes, self.gpu.network)


def _tensor(inputs: MemoryInputs, topology: _Topology) -> float:
    """Return the seconds of the all-reduces of tensor parallelism. Computation waits for each of them.

    Per layer, the outputs of attention and MLP, once more where they are recomputed, and the gradients of their inputs;
    the embedded tokens and the gradient of the head's input. The loss's all-reduces are small.
    """
    outputs = 2 * inputs.config.n_layer * (1 if inputs.activation_checkpointing == "none" else 2)
    gradients = 2 * inputs.config.n_layer + 2  # in the dtype of the residual stream
    counts = ((outputs, inputs.compute_bytes), (gradients, inputs.residual_bytes))
    elements = inputs.tokens * inputs.config.n_embd
    return inputs.accumulation * sum(n * 2 * topology.gather(size * elements, inputs.tensor) for n, size in counts)


def _fsdp(
    inputs: MemoryInputs, model: GPT, topology: _Topology, forward: float, backward: float
) -> tuple[float, float]:
    """Return the seconds of all collectives of FSDP and context parallelism, and of the exposed ones."""
    rest, *units = plan_units(model, inputs.fsdp, (Block,))
    stored = stored_parameters(inputs, model)
    size = unit_sizer(inputs, stored)
    strategy, steps = inputs.strategy, inputs.accumulation

    def gather(parts: list[Unit], kind: str = "param_dtype", trained: bool = False) -> float:
        return sum(topology.gather(size(part, kind, trained), strategy.shards) for part in parts)

    keeps_weights = strategy.sharding in ("SHARD_GRAD_OP", "NO_SHARD")
    reductions = 1 if inputs.accumulates_unsharded else steps
    in_forward = reductions if keeps_weights else steps  # kept until the gradients are reduced
    gathers, scatters = gather(units), gather(units, "reduce_dtype", trained=True)
    # the backward pass needs no embedding, and follows the head at once
    again = 0.0 if keeps_weights else gather([part for part in units if part.name not in (HEAD, EMBEDDING)])
    sent = in_forward * gathers + steps * again + reductions * scatters
    exposed = in_forward * (gather(units[:1]) + max(0.0, gathers - forward))
    # the reductions share the link with the gathers of their backward pass
    prefetched = 0.0 if inputs.fsdp.backward_prefetch == "none" else again
    exposed += steps * (again - prefetched) + (steps - reductions) * max(0.0, prefetched - backward)
    exposed += reductions * max(0.0, prefetched + scatters - backward)
    if strategy.layout.replicate > 1:  # each shard over the replicas, overlapped when it follows a reduce-scatter
        shards = sum(size(part, "reduce_dtype", True) for part in [rest, *units]) / strategy.shards
        between = topology.gpu.link if topology.num_nodes == 1 else topology.gpu.network
        replicas = _ring(2 * shards, strategy.layout.replicate, between)
        if strategy.layout.shard == 1:
            replicas = topology.all_reduce(shards)
        sent += replicas
        exposed += max(LATENCY, replicas - (0.0 if inputs.fsdp.accumulate == "sharded" else backward))
    # what computation waits for: the root; keys and values of each layer and, in the backward pass, their gradients;
    # gradients of replicated vectors
    waits = in_forward * gather([rest]) + reductions * gather([rest], "reduce_dtype", trained=True)
    passes = inputs.config.n_layer * (2 + (inputs.activation_checkpointing != "none"))
    waits += steps * passes * topology.gather(inputs.gathered_bytes, strategy.layout.context)
    replicated = sum(p.numel for p in stored if p.is_trained and p.is_replicated)
    waits += topology.all_reduce(FP32 * replicated)
    return sent + waits, exposed + waits
