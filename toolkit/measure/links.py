"""Predict a step's communication time by strategy, and the part that computation hides."""

from dataclasses import dataclass

from toolkit.distributed.units import EMBEDDING, HEAD, Unit, plan_units
from toolkit.measure.gathered import is_replicated, unit_sizer
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
    if setup.strategy.kind == "single":
        return Communication()
    topology = _Topology(gpu, max(1, devices // setup.tensor), num_nodes)  # the ranks with the same part of each layer
    if setup.strategy.kind == "ddp":
        itemsize = FP32 if setup.has_masters else setup.weight_bytes  # see distributed/ddp_bf16.py
        trained = ((name, p) for name, p in model.named_parameters() if p.requires_grad)
        size = sum(p.numel() * (FP32 if is_adapter(name) else itemsize) for name, p in trained)
        bucket = setup.ddp.bucket_cap_mb * 2**20 * itemsize / setup.weight_bytes
        sent = topology.all_reduce(size)
        exposed = max(topology.all_reduce(min(size, bucket)), sent - backward)
    else:
        sent, exposed = _fsdp(setup, model, topology, forward, backward)
        tensor = _tensor(setup, _Topology(gpu, devices, num_nodes))
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


def _tensor(setup: MemoryInputs, topology: _Topology) -> float:
    """Return the seconds of the all-reduces of tensor parallelism. Computation waits for each of them.

    Per layer, the outputs of attention and MLP, once more where they are recomputed, and the gradients of their inputs;
    the embedded tokens and the gradient of the head's input. The loss's all-reduces are small.
    """
    outputs = 2 * setup.config.n_layer * (1 if setup.activation_checkpointing == "none" else 2)
    gradients = 2 * setup.config.n_layer + 2  # autocast keeps the residual stream in fp32
    counts = ((outputs, setup.compute_bytes), (gradients, setup.weight_bytes))
    elements = setup.tokens * setup.config.n_embd
    return setup.accumulation * sum(n * 2 * topology.gather(size * elements, setup.tensor) for n, size in counts)


def _fsdp(setup: MemoryInputs, model: GPT, topology: _Topology, forward: float, backward: float) -> tuple[float, float]:
    """Return the seconds of all collectives of FSDP and context parallelism, and of the exposed ones."""
    rest, *units = plan_units(model, setup.fsdp, (Block,))
    size = unit_sizer(setup, model, quantized_weights(setup, model))
    strategy, steps = setup.strategy, setup.accumulation

    def gather(parts: list[Unit], kind: str = "param_dtype", trained: bool = False) -> float:
        return sum(topology.gather(size(part, kind, trained), strategy.shards) for part in parts)

    keeps_weights = strategy.sharding in ("SHARD_GRAD_OP", "NO_SHARD")
    reductions = 1 if setup.accumulates_unsharded else steps
    in_forward = reductions if keeps_weights else steps  # kept until the gradients are reduced
    gathers, scatters = gather(units), gather(units, "reduce_dtype", trained=True)
    # the backward pass needs no embedding, and follows the head at once
    again = 0.0 if keeps_weights else gather([part for part in units if part.name not in (HEAD, EMBEDDING)])
    sent = in_forward * gathers + steps * again + reductions * scatters
    exposed = in_forward * (gather(units[:1]) + max(0.0, gathers - forward))
    # the reductions share the link with the gathers of their backward pass
    prefetched = 0.0 if setup.fsdp.backward_prefetch == "none" else again
    exposed += steps * (again - prefetched) + (steps - reductions) * max(0.0, prefetched - backward)
    exposed += reductions * max(0.0, prefetched + scatters - backward)
    if strategy.layout.replicate > 1:  # each shard over the replicas, overlapped when it follows a reduce-scatter
        shards = sum(size(part, "reduce_dtype", True) for part in [rest, *units]) / strategy.shards
        between = topology.gpu.link if topology.num_nodes == 1 else topology.gpu.network
        replicas = _ring(2 * shards, strategy.layout.replicate, between)
        if strategy.layout.shard == 1:
            replicas = topology.all_reduce(shards)
        sent += replicas
        exposed += max(LATENCY, replicas - (0.0 if setup.fsdp.accumulate == "sharded" else backward))
    # what computation waits for: the root; keys and values of each layer and, in the backward pass, their gradients;
    # gradients of replicated vectors
    waits = in_forward * gather([rest]) + reductions * gather([rest], "reduce_dtype", trained=True)
    passes = setup.config.n_layer * (2 + (setup.activation_checkpointing != "none"))
    waits += steps * passes * topology.gather(setup.gathered_bytes, strategy.layout.context)
    replicated = sum(p.numel() for p in model.parameters() if p.requires_grad and is_replicated(setup, p))
    waits += topology.all_reduce(FP32 * replicated)
    return sent + waits, exposed + waits
