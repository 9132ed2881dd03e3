"""Estimate the memory of a training run on one device, by part.

Nothing is allocated and no device is queried. Parameters, gradients and optimizer state are counted on the model on the
meta device; what a micro-batch needs is recorded, see :mod:`toolkit.measure.trace`. Sizes are in bytes.

The peak is at the loss, when everything that the backward pass needs is in memory, in the backward pass of a block, or
in the update. Gradients of earlier micro-batches add to it. torch.compile may need less.
"""

from dataclasses import dataclass, fields, replace
from typing import Any

from torch import nn

from toolkit.distributed.stages import STAGES_PER_RANK, activations_in_flight
from toolkit.measure.flops import matmul_parameters
from toolkit.measure.gathered import BYTES_4BIT, QUANTIZED_BYTES, fsdp_bytes, is_replicated
from toolkit.measure.inputs import FP32, MemoryInputs
from toolkit.measure.optimizer import optimizer_bytes, update_bytes
from toolkit.measure.sample import first_layers, model_of, quantized_weights
from toolkit.measure.trace import NOTHING, step_memory
from toolkit.models.gpt import GPT
from toolkit.models.lora import is_adapter

# CUDA context, cuBLAS workspace and allocator fragmentation: a rule of thumb; measured contexts take 0.3 to 0.6 GB.
CUDA_CONTEXT, FRAGMENTATION = 0.6e9, 0.03


@dataclass(frozen=True)
class Memory:
    """Bytes on one device.

    Args:
        weights: Unquantized parameters of the base model on this device.
        quantized_base: 4-bit weights with scales.
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
        recomputed_block: With activation checkpointing, what the backward pass of a block needs in addition to what
            exists before it: recomputed activations, autocast's copies and temporary tensors.
        logits: A chunk of logits, and the gradients of the head. With a frozen model, also its head, hidden states and
            logits.
        checkpoint_copy: On a CPU, the state copy that --train.async_save writes.
        context: CUDA context and fragmentation; see :data:`CUDA_CONTEXT`.
        has_gradients_in_forward: Whether gradients are in memory together with activations.
        elsewhere: The most bytes of activations, new gradients, FSDP's unsharded weights and a dequantized weight at
            another time than the loss; an alternative in ``total``, not a part. See
            :func:`toolkit.measure.gathered.fsdp_bytes`.
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
    elsewhere: float = 0.0
    frozen_forward: float = 0.0
    host: float = 0.0
    host_copy: float = 0.0

    @property
    def total(self) -> float:
        """Peak bytes; see the module docstring."""
        persistent = self.weights + self.quantized_base + self.adapters + self.frozen_model + self.optimizer
        at_loss = self.unsharded_unit + self.cast_weights + self.activations + self.logits
        step = max(at_loss, self.elsewhere + self.gathered_context, self.frozen_forward)
        step += self.gradients if self.has_gradients_in_forward else 0.0
        return persistent + self.checkpoint_copy + self.context + max(step, self.gradients + self.update)

    @property
    def training_state(self) -> float:
        """Bytes of parameters, gradients and optimizer state: a lower bound without activations."""
        parameters = self.weights + self.quantized_base + self.adapters + self.frozen_model
        return parameters + self.gradients + self.optimizer + self.checkpoint_copy

    def parts(self) -> dict[str, float]:
        """Return the parts of ``total`` by name, in the order of the fields."""
        others = ("has_gradients_in_forward", "elsewhere", "frozen_forward", "host", "host_copy")
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in others}


@dataclass(frozen=True)
class Parameters:
    """Parameter counts.

    Args:
        total: All parameters, including adapters; tied parameters count once.
        trained: Trainable parameters.
        matmul: Parameters used in a matmul for every token (see :mod:`toolkit.measure.flops`).
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
    # gradients of all but the last micro-batch are not in ddp's buckets
    copies = 2 if setup.strategy.kind == "ddp" and setup.accumulation > 1 and not setup.sums_in_fp32 else 1
    has_gradients_in_forward = setup.accumulation > 1 or setup.strategy.kind == "ddp"  # ddp's buckets persist
    if setup.in_backward:
        elements: float = max(p.numel() for p in trained)  # one at a time
    else:
        elements = _count(trained) if setup.accumulates_unsharded else _local_elements(setup, trained)
    gradients = copies * (setup.weight_bytes * elements + adapter_gradients)
    if setup.sums_in_fp32:  # in addition to ddp's bf16 buckets
        gradients = FP32 * elements + (gradients if setup.strategy.kind == "ddp" else 0)
    step = step_memory(setup) if with_activations else NOTHING
    checkpoint_copy = _copied_bytes(setup, model, list(base.values())) if setup.async_save else 0.0
    is_sharded = setup.strategy.kind == "fsdp"
    unsharded, elsewhere = 0.0, max(step.forward, step.end, *(size for _, size in step.backward))
    if is_sharded:
        unsharded, elsewhere = fsdp_bytes(setup, model, quantized, step)
    elsewhere += 2 * max((p.numel() for p in quantized.values()), default=0)  # dequantized for a matmul
    frozen_weights, frozen_blocks = _frozen_bytes(setup)
    is_on_host = setup.device == "cpu"
    parts = {
        "weights": weights,
        "quantized_base": _quantized_bytes(setup, quantized),
        "adapters": adapter_bytes,
        "frozen_model": 0.0 if setup.strategy.offloads else frozen_weights,
        "gradients": gradients,
        "optimizer": _optimizer_bytes(setup, model),
        "update": update_bytes(setup, model),
        "cast_weights": step.casts,
        "unsharded_unit": unsharded,
        "gathered_context": 2.0 * setup.gathered_bytes if setup.strategy.layout.context > 1 else 0.0,
        "activations": step.saved,
        "recomputed_block": step.recomputed if setup.activation_checkpointing != "none" else 0.0,
        "logits": step.head,
        "checkpoint_copy": checkpoint_copy if is_on_host else 0.0,
    }
    host = _host_bytes(setup, model, list(base.values())) + (frozen_weights if setup.strategy.offloads else 0.0)
    return Memory(
        **parts,
        context=_context_bytes(setup, parts),
        has_gradients_in_forward=has_gradients_in_forward,
        elsewhere=elsewhere,
        frozen_forward=0.0 if setup.frozen is None else frozen_blocks + step.frozen,
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
    memory = plan_memory(stage, None, with_activations=False)
    has_loss, has_embedding = ends in ("head", "both"), ends in ("embedding", "both")
    is_gpipe, residual = setup.schedule == "gpipe", 0  # bytes of a micro-batch's residual stream
    if with_activations:
        residual = setup.weight_bytes * setup.tokens * config.n_embd
    n_saved = STAGES_PER_RANK[setup.schedule] - has_embedding  # received inputs that are activations of the first block
    untied = replace(stage, config=replace(config, tie_embeddings=False))
    step = step_memory(untied) if with_activations else NOTHING
    waiting = (in_flight - 1) * (step.saved - n_saved * residual) + inputs * setup.accumulation * residual
    table: Any = model_of(stage.config, stage.lora, stage.tensor).transformer.wte.weight
    embedding = has_embedding * table.requires_grad * setup.weight_bytes * table.numel()
    passes = max(embedding, *(size for _, size in step.backward)) + 2 * residual
    if is_gpipe:  # no gradients before the last loss, and all of them from the second backward pass on
        waiting += (in_flight - 1) * step.kept * has_loss
        passes += memory.gradients - step.saved - step.kept * has_loss
    elsewhere = memory.unsharded_unit + waiting + passes
    gathered = 1 if setup.fsdp.state_dict_type == "sharded" else layout.pipeline  # rank 0 writes all stages
    rank = replace(
        memory,
        activations=step.saved + waiting,
        recomputed_block=step.recomputed if setup.activation_checkpointing != "none" else 0.0,
        elsewhere=elsewhere,
        has_gradients_in_forward=not is_gpipe,
        logits=step.head if has_loss else 0.0,
        checkpoint_copy=gathered * memory.checkpoint_copy,
        host_copy=gathered * memory.host_copy,
        context=0.0,
    )
    return replace(rank, context=_context_bytes(setup, rank.parts()))


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


def _frozen_bytes(setup: MemoryInputs) -> tuple[float, float]:
    """Return the bytes of a frozen model's weights, and of the blocks that FSDP gathers in its forward pass."""
    if (frozen := setup.of_frozen()) is None:
        return 0.0, 0.0
    model = model_of(frozen.config, None)
    weights, block = (frozen.weight_bytes * _count(part.parameters()) for part in (model, model.blocks[0]))
    return (weights / setup.strategy.shards, 2.0 * block) if setup.strategy.kind == "fsdp" else (weights, 0.0)


def _quantized_bytes(setup: MemoryInputs, quantized: dict[str, nn.Parameter]) -> float:
    """Return the bytes of 4-bit weights and scales. FSDP shards the weights, but every device keeps all scales."""
    if setup.quantize is None:
        return 0.0
    shards = setup.strategy.shards if setup.strategy.kind == "fsdp" else 1
    per_weight = BYTES_4BIT / shards + QUANTIZED_BYTES[setup.quantize] - BYTES_4BIT
    return per_weight * _count(quantized.values())
