"""Estimate the memory of a training run on one device, by part.

Nothing is allocated and no device is queried. Parameters are counted on the model on the meta device, activations by
:mod:`toolkit.planning.activations`. Sizes are in bytes.

The peak is after the forward pass, when everything that the backward pass needs is in memory. Gradients of earlier
micro-batches add to it; without accumulation, gradients replace activations during the backward pass, and the larger of
the two counts. With activation checkpointing, the backward pass also has the activations of one block in memory, but no
longer autocast's copies of the weights. torch.compile may need less.
"""

from dataclasses import dataclass, fields, replace
from typing import Any

from torch import nn

from toolkit.distributed.stages import STAGES_PER_RANK, activations_in_flight
from toolkit.models.gpt import GPT
from toolkit.models.lora import is_adapter
from toolkit.planning.activations import (
    Activations,
    frozen_forward_bytes,
    frozen_loss_bytes,
    kept_loss_bytes,
    logits_bytes,
    measure_activations,
)
from toolkit.planning.memory_inputs import FP32, MemoryInputs
from toolkit.planning.optimizer_memory import optimizer_bytes, update_bytes
from toolkit.planning.sample_model import first_layers, model_of, quantized_weights
from toolkit.planning.speed.flops import matmul_parameters
from toolkit.planning.unsharded import BYTES_4BIT, QUANTIZED_BYTES, fsdp_bytes, is_replicated

# CUDA context, cuBLAS workspace and allocator fragmentation: a rule of thumb; measured contexts take 0.3 to 0.6 GB.
CUDA_CONTEXT, FRAGMENTATION = 0.6e9, 0.03


@dataclass(frozen=True)
class Memory:
    """Bytes on one device.

    Args:
        weights: Unquantized parameters of the base model on this device.
        quantized_base: 4-bit weights with scales, plus the largest weight dequantized for its matmul.
        adapters: LoRA parameters.
        frozen_model: Weights of the objective's frozen model.
        gradients: Gradients of trainable parameters, in the dtype of the parameters; bf16-master accumulates in fp32.
        optimizer: Optimizer state, including bf16-master's fp32 masters.
        update: Temporary tensors of an optimizer step: fp32 copies of bf16 gradients and moments, and Muon's matrices.
        cast_weights: Autocast's 16-bit copies of the block weights.
        unsharded_unit: All-gathered FSDP root unit and two blocks, plus the gradients of the root and one block.
        gathered_context: With context parallelism, two copies of a layer's keys and values while they are gathered. The
            result is part of ``activations``.
        activations: Tensors saved for the backward pass.
        recomputed_block: With activation checkpointing, extra activations and autocast weight copies while a block is
            recomputed.
        logits: A chunk of logits, and the gradients of the head. With a frozen model, also its head, hidden states and
            logits.
        checkpoint_copy: On a CPU, the state copy that --train.async_save writes.
        context: CUDA context and fragmentation; see :data:`CUDA_CONTEXT`.
        has_gradients_in_forward: Whether gradients are in memory together with activations.
        outside_loss: With FSDP, the most bytes of unsharded weights, gradients and activations together at another
            time than the loss; an alternative in ``total``, not a part. See
            :func:`toolkit.planning.unsharded.fsdp_bytes`.
        frozen_forward: What the forward pass of the frozen model needs before the forward pass of the trained one; an
            alternative in ``total``, not a part.
        host: CPU memory per process for FSDP's offloaded weights, gradients and optimizer state; not in ``total``.
        host_copy: On a GPU, the CPU memory for the state copy that --train.async_save writes; not in ``total``. For
            unsharded checkpoints, only rank 0 has it.
    """

    weights: float
    quantized_base: float
    adapters: float
    frozen_model: float
    gradients: float
    optimizer: float
    update: float
    cast_weights: float
    unsharded_unit: float
    gathered_context: float
    activations: float
    recomputed_block: float
    logits: float
    checkpoint_copy: float
    context: float
    has_gradients_in_forward: bool
    outside_loss: float = 0.0
    frozen_forward: float = 0.0
    host: float = 0.0
    host_copy: float = 0.0

    @property
    def total(self) -> float:
        """Peak bytes; see the module docstring."""
        step = max(self.cast_weights, self.recomputed_block) + self.activations + self.logits + self.gathered_context
        step = max(step, self.frozen_forward)
        persistent = self.weights + self.quantized_base + self.adapters + self.optimizer + self.checkpoint_copy
        persistent += self.frozen_model
        if self.outside_loss:
            at_loss = self.unsharded_unit + self.cast_weights + self.activations + self.logits
            gradients = self.gradients if self.has_gradients_in_forward else 0.0
            step = max(at_loss, self.outside_loss + self.gathered_context, self.frozen_forward) + gradients
            return persistent + self.context + max(step, self.gradients + self.update)
        persistent += self.unsharded_unit
        if self.has_gradients_in_forward:
            return persistent + self.context + max(step, self.update) + self.gradients
        return persistent + self.context + max(step, self.gradients + max(self.recomputed_block, self.update))

    @property
    def training_state(self) -> float:
        """Bytes of parameters, gradients and optimizer state: a lower bound without activations."""
        parameters = self.weights + self.quantized_base + self.adapters + self.frozen_model
        return parameters + self.gradients + self.optimizer + self.checkpoint_copy

    def parts(self) -> dict[str, float]:
        """Return the parts of ``total`` by name, in the order of the fields."""
        others = ("has_gradients_in_forward", "outside_loss", "frozen_forward", "host", "host_copy")
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in others}


@dataclass(frozen=True)
class Parameters:
    """Parameter counts.

    Args:
        total: All parameters, including adapters; tied parameters count once.
        trained: Trainable parameters.
        matmul: Parameters used in a matmul for every token (see :mod:`toolkit.planning.speed.flops`).
    """

    total: int
    trained: int
    matmul: int


def count_parameters(model: nn.Module) -> Parameters:
    sizes = [(p.numel(), p.requires_grad) for p in model.parameters()]
    trained = sum(size for size, is_trained in sizes if is_trained)
    return Parameters(sum(size for size, _ in sizes), trained, matmul_parameters(model))


def plan_memory(setup: MemoryInputs, model: GPT | None = None, with_activations: bool = True) -> Memory:
    """Estimate the memory of one device.

    ``model`` is on the meta device. ``with_activations`` False skips the activations, the slowest part to estimate.
    """
    if setup.strategy.layout.pipeline > 1:
        return _plan_heaviest_rank(setup, with_activations)
    if model is None or setup.tensor > 1:
        model = model_of(setup.config, setup.lora, setup.tensor)
    quantized = quantized_weights(setup, model)
    base = {n: p for n, p in model.named_parameters() if not is_adapter(n) and n not in quantized}
    adapters = [p for n, p in model.named_parameters() if is_adapter(n)]
    adapter_bytes = FP32 * _local_elements(setup, adapters)
    adapter_gradients = FP32 * _count(adapters) if setup.accumulates_unsharded else adapter_bytes
    trained = [p for p in base.values() if p.requires_grad]
    weights = setup.weight_bytes * _local_elements(setup, base.values())
    copies = 1 if setup.strategy.kind != "ddp" or setup.ddp.gradient_as_bucket_view else 2
    has_gradients_in_forward = setup.accumulation > 1 or setup.strategy.kind == "ddp"  # ddp's buckets persist
    if setup.in_backward:
        elements: float = max(p.numel() for p in trained)  # one at a time
    else:
        elements = _count(trained) if setup.accumulates_unsharded else _local_elements(setup, trained)
    gradients = copies * (setup.weight_bytes * elements + adapter_gradients)
    if setup.sums_in_fp32:  # in addition to ddp's bf16 buckets
        gradients = FP32 * elements + (gradients if setup.strategy.kind == "ddp" else 0)
    activations = measure_activations(setup) if with_activations else Activations(0.0, 0.0, 0.0)
    checkpoint_copy = _copied_bytes(setup, model, list(base.values())) if setup.async_save else 0.0
    is_sharded = setup.strategy.kind == "fsdp"
    unsharded, outside_loss = fsdp_bytes(setup, model, quantized, activations) if is_sharded else (0.0, 0.0)
    frozen = None if setup.frozen is None else model_of(setup.frozen, None)
    frozen_weights = 0.0 if frozen is None else setup.frozen_itemsize * _count(frozen.parameters())
    frozen_weights /= setup.strategy.shards if is_sharded else 1
    is_on_host = setup.device == "cpu"
    parts = {
        "weights": weights,
        "quantized_base": _quantized_bytes(setup, quantized),
        "adapters": adapter_bytes,
        "frozen_model": 0.0 if setup.strategy.offloads else frozen_weights,
        "gradients": gradients,
        "optimizer": _optimizer_bytes(setup, model),
        "update": update_bytes(setup, model),
        "cast_weights": activations.cast_weights,
        "unsharded_unit": unsharded,
        "gathered_context": 2.0 * setup.gathered_bytes if setup.strategy.layout.context > 1 else 0.0,
        "activations": activations.saved,
        "recomputed_block": activations.recomputed,
        "logits": logits_bytes(setup) + frozen_loss_bytes(setup),
        "checkpoint_copy": checkpoint_copy if is_on_host else 0.0,
    }
    host = _host_bytes(setup, model, list(base.values())) + (frozen_weights if setup.strategy.offloads else 0.0)
    return Memory(
        **parts,
        context=_context_bytes(setup, parts),
        has_gradients_in_forward=has_gradients_in_forward,
        outside_loss=outside_loss,
        frozen_forward=0.0 if frozen is None else frozen_forward_bytes(setup, frozen),
        host=host,
        host_copy=0.0 if is_on_host else checkpoint_copy,
    )


def _plan_heaviest_rank(setup: MemoryInputs, with_activations: bool) -> Memory:
    """Return the memory of the rank of a pipeline that needs most: the first, the last, or the second of several.

    All have an equal part of the layers; the first also has the embedding, the last the head and the logits; with zbv
    the first has both, and the others are alike. The earlier a rank, the more micro-batches' activations it holds, but
    a rank between two others has twice the receive buffers. A pipeline gathers the weights once per step.
    """
    layout, is_zbv = setup.strategy.layout, setup.schedule == "zbv"
    first, second, last = activations_in_flight(setup.schedule, layout.pipeline, setup.accumulation)
    inputs = 2 * STAGES_PER_RANK[setup.schedule]  # each stage's input, and the gradient of its output
    ranks = [_plan_rank(setup, with_activations, first, inputs - 1 - is_zbv, "both" if is_zbv else "embedding")]
    if layout.pipeline > 2 or is_zbv:
        ranks.append(_plan_rank(setup, with_activations, second, inputs, "none"))
    if not is_zbv:
        ranks.append(_plan_rank(setup, with_activations, last, inputs - 1, "head"))
    return max(ranks, key=lambda rank: rank.total)


def _plan_rank(setup: MemoryInputs, with_activations: bool, in_flight: float, inputs: int, ends: str) -> Memory:
    """Return the memory of a rank of a pipeline.

    Args:
        in_flight: Micro-batches whose activations it holds at most.
        inputs: Number of tensors that it receives per micro-batch, each with a buffer.
        ends: Whether it has the embedding, the head, "both" or "none".
    """
    layout = setup.strategy.layout
    config = first_layers(setup.config, setup.config.n_layer // layout.pipeline)
    if ends == "none":
        config = replace(config, vocab_size=setup.tensor, padded_vocab_size=setup.tensor)
    # tied, embedding and head have the parameters of one of them
    stage = replace(
        setup,
        config=replace(config, tie_embeddings=ends != "both"),
        strategy=replace(setup.strategy, sharding="SHARD_GRAD_OP", layout=replace(layout, pipeline=1)),
    )
    memory = plan_memory(stage, None, with_activations)
    has_loss, has_embedding = ends in ("head", "both"), ends in ("embedding", "both")
    is_gpipe, residual = setup.schedule == "gpipe", 0  # bytes of a micro-batch's residual stream
    if with_activations:
        residual = setup.weight_bytes * setup.tokens * config.n_embd
    n_saved = STAGES_PER_RANK[setup.schedule] - has_embedding  # received inputs that are activations of the first block
    waiting = (in_flight - 1) * (memory.activations - n_saved * residual) + inputs * setup.accumulation * residual
    passes = _backward_bytes(stage, memory, residual, has_embedding)
    if is_gpipe:  # no gradients before the last loss, and all of them from the second backward pass on
        waiting += (in_flight - 1) * kept_loss_bytes(setup) * has_loss
        passes += memory.gradients - memory.activations
    outside_loss = memory.unsharded_unit + waiting + passes
    gathered = 1 if setup.fsdp.state_dict_type == "sharded" else layout.pipeline  # rank 0 writes all stages
    rank = replace(
        memory,
        activations=memory.activations + waiting,
        outside_loss=outside_loss,
        has_gradients_in_forward=not is_gpipe,
        logits=memory.logits if has_loss else 0.0,
        checkpoint_copy=gathered * memory.checkpoint_copy,
        host_copy=gathered * memory.host_copy,
        context=0.0,
    )
    return replace(rank, context=_context_bytes(setup, rank.parts()))


def _backward_bytes(stage: MemoryInputs, memory: Memory, residual: float, has_embedding: bool) -> float:
    """Return the bytes of a micro-batch's activations and new gradients in the backward pass of a pipeline's rank.

    Autograd adds each new gradient to the sum, or FSDP adds a block's gradients if they have another dtype. They are
    reduced after the last pass. ``residual``: Bytes of a residual stream.
    """
    model = model_of(stage.config, stage.lora, stage.tensor)
    block = [p.numel() for p in model.blocks[-1].parameters() if p.requires_grad]
    recomputed, gradient = memory.recomputed_block, stage.weight_bytes * max(block, default=0)
    if stage.is_mixed:  # the fractions fit simulated blocks
        gradient = stage.compute_bytes * sum(block)
        recomputed, gradient = max(recomputed / 4 + gradient, recomputed + gradient / 2), 0
    in_block = memory.activations + recomputed + gradient + 3 * residual
    table: Any = model.transformer.wte.weight
    return max(in_block, has_embedding * table.requires_grad * (stage.weight_bytes * table.numel() + 2 * residual))


def _context_bytes(setup: MemoryInputs, parts: dict[str, float]) -> float:
    return CUDA_CONTEXT + FRAGMENTATION * sum(parts.values()) if setup.device == "cuda" else 0.0


# ---- parameters


def _count(parameters: Any) -> int:
    return sum(p.numel() for p in parameters)


def _local_elements(setup: MemoryInputs, parameters: Any) -> float:
    """Return the number of parameter elements that one device stores.

    FSDP shards each unit equally, but replicates vectors if it all-gathers in another dtype.
    """
    parameters = list(parameters)
    if setup.strategy.kind != "fsdp":
        return _count(parameters)
    replicated = _count(p for p in parameters if is_replicated(setup, p))
    return replicated + (0 if setup.strategy.offloads else _sharded_elements(setup, parameters))


def _sharded_elements(setup: MemoryInputs, parameters: list[nn.Parameter]) -> float:
    """Return the number of elements of one device's shards of the parameters."""
    return _count(p for p in parameters if not is_replicated(setup, p)) / setup.strategy.shards


def _host_bytes(setup: MemoryInputs, model: GPT, base: list[nn.Parameter]) -> float:
    """Return the bytes of offloaded shards."""
    if not setup.strategy.offloads:
        return 0.0
    adapters = [p for name, p in model.named_parameters() if is_adapter(name)]
    trained = [p for p in base if p.requires_grad]
    tensors = setup.weight_bytes * (_sharded_elements(setup, base) + _sharded_elements(setup, trained))
    tensors += 2 * FP32 * _sharded_elements(setup, adapters)
    return tensors + optimizer_bytes(setup, model, _sharded_parameters(setup, model))


def _sharded_parameters(setup: MemoryInputs, model: GPT) -> dict[str, int]:
    """Return {name: number of shards} for FSDP's sharded trainable parameters."""
    trained = ((n, p) for n, p in model.named_parameters() if p.requires_grad)
    return {name: setup.strategy.shards for name, p in trained if not is_replicated(setup, p)}


def _copied_bytes(setup: MemoryInputs, model: GPT, base: list[nn.Parameter]) -> float:
    """Return the bytes of weights and optimizer state that a process copies to write a checkpoint.

    For an unsharded checkpoint, rank 0 copies everything except the adapters' base and bf16 weights that have masters.
    For a sharded checkpoint, each process copies the shards that it writes.
    """
    adapters = [p for name, p in model.named_parameters() if is_adapter(name)]
    saved = [p for p in base if not (p.requires_grad and setup.has_masters)]
    weights = FP32 * _count(adapters) if adapters else setup.weight_bytes * _count(saved)
    whole = weights + _optimizer_bytes(replace(setup, strategy=replace(setup.strategy, kind="single")), model)
    whole *= setup.tensor
    return whole / setup.strategy.layout.world_size if setup.fsdp.state_dict_type == "sharded" else whole


def _optimizer_bytes(setup: MemoryInputs, model: GPT) -> float:
    """Return the bytes of the optimizer state on the device, in the dtype and sharding of each parameter."""
    if setup.strategy.kind != "fsdp":
        return optimizer_bytes(setup, model)
    sharded = _sharded_parameters(setup, model)
    replicated = {name: 1 for name, _ in model.named_parameters() if name not in sharded}
    return optimizer_bytes(setup, model, replicated | ({} if setup.strategy.offloads else sharded))


def _quantized_bytes(setup: MemoryInputs, quantized: dict[str, nn.Parameter]) -> float:
    """Return the bytes of 4-bit weights and scales, and of the largest weight dequantized for its matmul.

    FSDP shards the weights, but every device keeps all scales.
    """
    if setup.quantize is None:
        return 0.0
    shards = setup.strategy.shards if setup.strategy.kind == "fsdp" else 1
    per_weight = BYTES_4BIT / shards + QUANTIZED_BYTES[setup.quantize] - BYTES_4BIT
    return per_weight * _count(quantized.values()) + 2 * max(p.numel() for p in quantized.values())
