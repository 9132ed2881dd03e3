"""Estimate the memory of a training run on one device, by part.

Nothing is allocated and no device is queried. Parameters, gradients and optimizer state are counted on the model on the
meta device; what a micro-batch needs is recorded, see :mod:`toolkit_plan.measure.trace`. Sizes are in bytes.

The peak is at the loss, when everything that the backward pass needs is in memory, in the backward pass of a block, or
in the update. Gradients of earlier micro-batches add to it. torch.compile may need less.
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any

from toolkit.distributed.stages import STAGES_PER_RANK
from toolkit.models.flops import count_parameters
from toolkit.models.gpt import GPT
from toolkit.models.quantize import quantized_layers
from toolkit.planning.meta_model import model_of
from toolkit_plan.measure.gathered import FSDPMemory, fsdp_memory
from toolkit_plan.measure.inputs import FP32, MemoryInputs
from toolkit_plan.measure.optimizer import optimizer_bytes, update_bytes
from toolkit_plan.measure.parameters import (
    ADAPTERS,
    QUANTIZED_BASE,
    SCALES_4BIT,
    WEIGHTS,
    StoredParameter,
    stored_parameters,
)
from toolkit_plan.measure.sample import select_layers
from toolkit_plan.measure.trace import StepMemory, step_memory

# CUDA context, cuBLAS workspace and allocator fragmentation: a rule of thumb; measured contexts take 0.3 to 0.6 GB.
CUDA_CONTEXT, FRAGMENTATION = 0.6e9, 0.03
_NO_PARTS = (
    "device", "has_gradients_in_forward", "gather_buffer", "elsewhere", "frozen_forward", "rollout", "host", "host_copy"
)  # fmt: skip


@dataclass(frozen=True)
class Memory:
    """Bytes on one device.

    Args:
        weights: Unquantized parameters of the base model on this device.
        quantized_base: 4-bit weights with scales.
        adapters: LoRA parameters.
        frozen_model: Weights of the objective's frozen model.
        gradients: Gradients of trainable parameters, in the dtype of the parameters; bf16-master accumulates in fp32.
        optimizer: Optimizer state, including bf16-master's fp32 masters and averaged weights.
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
        gathered_weights: FSDP's unsharded weights while the objective generates answers.
        held_weights: Weights that are quantized once for these answers (--qat.weights).
        kv_cache: Keys and values of these answers.
        checkpoint_copy: On a CPU, the state copy that --train.async_save writes.
        device: "cuda", "cpu" or "mps".
        has_gradients_in_forward: Whether gradients are in memory together with activations.
        gather_buffer: The part of ``unsharded_unit`` that is the last all-gather's buffer.
        elsewhere: The most bytes of activations, new gradients, FSDP's unsharded weights and a dequantized weight at
            another time than the loss; an alternative in ``total``, not a part. See
            :func:`toolkit_plan.measure.gathered.fsdp_memory`.
        frozen_forward: What the forward pass of the frozen model needs before the forward pass of the trained one; an
            alternative in ``total``, not a part.
        rollout: What generating answers before the step needs; an alternative in ``total``, not a part.
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
    gathered_weights: float
    held_weights: float
    kv_cache: float
    checkpoint_copy: float
    device: str
    has_gradients_in_forward: bool
    gather_buffer: float = 0.0
    elsewhere: float = 0.0
    frozen_forward: float = 0.0
    rollout: float = 0.0
    host: float = 0.0
    host_copy: float = 0.0

    @property
    def total(self) -> float:
        """Peak bytes; see the module docstring."""
        at_loss = self.unsharded_unit + self.cast_weights + self.activations + self.logits
        step = max(at_loss, self.elsewhere + self.gathered_context, self.frozen_forward)
        step += self.gradients if self.has_gradients_in_forward else 0.0
        return self._persistent + self.context + max(step, self.gradients + self.update, self.rollout)

    def __str__(self) -> str:
        largest = sorted(self.parts().items(), key=lambda part: -part[1])[:3]
        parts = ", ".join(f"{name.replace('_', ' ')} {size / 1e9:,.1f}" for name, size in largest)
        return f"{self.total / 1e9:,.1f} GB ({parts}, ...)"

    @property
    def training_state(self) -> float:
        """Bytes of parameters, gradients or unsharded weights, and optimizer state: a lower bound."""
        return self._persistent + max(self.gradients, self.gathered_weights)

    @property
    def _persistent(self) -> float:
        parameters = self.weights + self.quantized_base + self.adapters + self.frozen_model
        return parameters + self.optimizer + self.checkpoint_copy

    def parts(self) -> dict[str, float]:
        """Return the parts of ``total`` by name, in the order of the fields."""
        return self._own_parts() | {"context": self.context}

    @property
    def context(self) -> float:
        """The CUDA context and fragmentation, see :data:`CUDA_CONTEXT`."""
        return CUDA_CONTEXT + FRAGMENTATION * sum(self._own_parts().values()) if self.device == "cuda" else 0.0

    def _own_parts(self) -> dict[str, float]:
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in _NO_PARTS}


def plan_memory(inputs: MemoryInputs, model: GPT | None = None, step: StepMemory | None = None) -> Memory:
    """Estimate the memory of one device.

    Args:
        inputs: What determines it.
        model: The model on the meta device; None builds it.
        step: The memory of a micro-batch; None measures it, the slowest part.
    """
    if inputs.strategy.layout.pipeline > 1:
        return _plan_heaviest_rank(inputs, step)
    if model is None or inputs.tensor > 1:
        model = model_of(inputs.config, inputs.lora, inputs.tensor)
    stored = stored_parameters(inputs, model)
    trained = [p for p in stored if p.is_trained]
    on_device = [p for p in stored if not p.is_offloaded]
    offloaded = [p for p in stored if p.is_offloaded]
    quantized = [p for p in stored if p.kind == QUANTIZED_BASE]
    by_kind = {kind: _sum_bytes(p for p in on_device if p.kind == kind) for kind in (WEIGHTS, QUANTIZED_BASE, ADAPTERS)}
    if inputs.quantize is not None:  # FSDP shards the weights, but every device keeps all scales
        by_kind[QUANTIZED_BASE] += SCALES_4BIT[inputs.quantize] * sum(p.numel for p in quantized)
    if inputs.accumulates_unsharded:
        new_gradients = [p.itemsize * p.numel for p in trained]
    else:
        new_gradients = [p.bytes for p in trained if not p.is_offloaded]
    gradients = max(new_gradients) if inputs.in_backward else sum(new_gradients)  # one at a time, or all
    is_ddp = inputs.strategy.kind == "ddp"
    if inputs.sums_in_fp32:  # in addition to ddp's bf16 buckets
        gradients *= FP32 / inputs.weight_bytes + is_ddp
    elif is_ddp and inputs.accumulation > 1:  # all but the last micro-batch's are not in ddp's buckets
        gradients *= 2
    step = step or step_memory(inputs)
    checkpoint_copy = _copied_bytes(inputs, stored) if inputs.async_save else 0.0
    if inputs.strategy.kind == "fsdp":
        fsdp = fsdp_memory(inputs, model, stored, step)
    else:
        fsdp = FSDPMemory(elsewhere=max(step.forward, step.end, *(size for _, size in step.backward)))
    dequantized = 2 * max((p.numel for p in quantized), default=0)  # for a matmul
    frozen_weights, frozen_blocks = _frozen_bytes(inputs)
    gathered = fsdp.all_weights if inputs.gathers_weights else 0.0
    held = 0.0
    if inputs.kv_cache and inputs.config.qat and (gathered or inputs.strategy.kind != "fsdp"):
        held = inputs.compute_bytes * sum(layer.weight.numel() for _, layer in quantized_layers(model))
    host = 0.0
    if inputs.strategy.offloads:
        host = frozen_weights + _sum_bytes(offloaded) + _sum_bytes(p for p in offloaded if p.is_trained)
        host += optimizer_bytes(inputs, offloaded)
        frozen_weights = 0.0
    is_on_host = inputs.device == "cpu"
    return Memory(
        **by_kind,
        frozen_model=frozen_weights,
        gradients=gradients,
        optimizer=optimizer_bytes(inputs, on_device),
        update=update_bytes(inputs, stored),
        cast_weights=step.casts,
        unsharded_unit=fsdp.at_loss,
        gathered_context=2.0 * inputs.gathered_bytes if inputs.strategy.layout.context > 1 else 0.0,
        activations=step.saved,
        recomputed_block=step.recomputed if inputs.activation_checkpointing != "none" else 0.0,
        logits=step.head,
        gathered_weights=gathered,
        held_weights=held,
        kv_cache=inputs.kv_cache,
        checkpoint_copy=checkpoint_copy if is_on_host else 0.0,
        device=inputs.device,
        has_gradients_in_forward=inputs.accumulation > 1 or is_ddp,  # ddp's buckets persist
        gather_buffer=fsdp.buffer,
        elsewhere=fsdp.elsewhere + dequantized,
        frozen_forward=0.0 if inputs.frozen is None else frozen_blocks + step.frozen,
        rollout=gathered + held + inputs.kv_cache + step.casts + gradients * is_ddp if inputs.kv_cache else 0.0,
        host=host,
        host_copy=0.0 if is_on_host else checkpoint_copy,
    )


def activations_in_flight(schedule: str, size: int, micro_batches: int) -> tuple[float, float, float]:
    """Return how many micro-batches' activations the first, second and last rank hold at most, for all their layers."""
    first, second, last = {
        "1f1b": (size, size - 1, 1),
        "gpipe": (micro_batches, micro_batches, micro_batches),
        # warm-up passes of one of two stages, and the next one
        "interleaved": ((3 * size - 1) / 2, (3 * size - 3) / 2, (size + 1) / 2),
        # the weights' gradients wait, and what they need with them; the factors fit simulated steps
        "zbv": (1.3 * size, 1.5 * size, 1.5 * size),
    }[schedule]
    return min(first, micro_batches), min(second, micro_batches), min(last, micro_batches)


def _plan_heaviest_rank(inputs: MemoryInputs, step: StepMemory | None) -> Memory:
    """Return the memory of the rank of a pipeline that needs most: the first, the last, or the second of several.

    All have an equal part of the layers; the first also has the embedding, the last the head and the logits; with zbv
    the first has both, and the others are alike. The earlier a rank, the more micro-batches' activations it holds, but
    a rank between two others has twice the receive buffers. A pipeline gathers the weights once per step.
    """
    size, is_zbv = inputs.strategy.layout.pipeline, inputs.schedule == "zbv"
    first, second, last = activations_in_flight(inputs.schedule, size, inputs.accumulation)
    ranks = [_plan_rank(inputs, step, first, has_embedding=True, has_head=is_zbv)]
    if size > 2 or is_zbv:
        ranks.append(_plan_rank(inputs, step, second, has_embedding=False, has_head=False))
    if not is_zbv:
        ranks.append(_plan_rank(inputs, step, last, has_embedding=False, has_head=True))
    return max(ranks, key=lambda rank: rank.total)


def _plan_rank(
    inputs: MemoryInputs, step: StepMemory | None, in_flight: float, *, has_embedding: bool, has_head: bool
) -> Memory:
    """Return the memory of a rank of a pipeline, which holds the activations of up to ``in_flight`` micro-batches."""
    layout, n_stages = inputs.strategy.layout, STAGES_PER_RANK[inputs.schedule]
    config = select_layers(inputs.config, range(inputs.config.n_layer // layout.pipeline))
    if not (has_embedding or has_head):
        config = replace(config, vocab_size=inputs.tensor, padded_vocab_size=inputs.tensor)
    # tied, embedding and head have the parameters of one of them
    stage = replace(
        inputs,
        config=replace(config, tie_embeddings=not (has_embedding and has_head)),
        strategy=replace(inputs.strategy, sharding="SHARD_GRAD_OP", layout=replace(layout, pipeline=1)),
    )
    step = step or step_memory(replace(stage, config=replace(config, tie_embeddings=False)))
    memory = plan_memory(stage, step=step)
    residual = inputs.residual_bytes * inputs.tokens * config.n_embd  # bytes of a micro-batch's residual stream
    n_saved = n_stages - has_embedding  # received inputs that are activations of the first block
    is_gpipe, kept = inputs.schedule == "gpipe", 0.0
    if is_gpipe:  # no gradients before the last loss, and all of them from the second backward pass on
        kept = step.kept * has_head
    earlier = (in_flight - 1) * (step.saved - n_saved * residual + kept)
    # buffers for each stage's input and the gradient of its output
    received = (2 * n_stages - has_embedding - has_head) * inputs.accumulation * residual
    # the pass that gathers the weights, and has the buffer, is before those of most micro-batches
    unsharded = memory.unsharded_unit - min(memory.gather_buffer, earlier)
    table: Any = model_of(stage.config, stage.lora, stage.tensor).transformer.wte.weight
    embedding = has_embedding * table.requires_grad * inputs.weight_bytes * table.numel()
    passes = max(embedding, *(size for _, size in step.backward)) + 2 * residual
    if is_gpipe:
        passes += memory.gradients - step.saved - kept
    gathered = 1 if inputs.fsdp.state_dict_type == "sharded" else layout.pipeline  # rank 0 writes all stages
    return replace(
        memory,
        activations=step.saved + earlier + received,
        logits=memory.logits * has_head,
        unsharded_unit=unsharded,
        elsewhere=unsharded + earlier + received + passes,
        has_gradients_in_forward=not is_gpipe,
        checkpoint_copy=gathered * memory.checkpoint_copy,
        host_copy=gathered * memory.host_copy,
    )


def _sum_bytes(parameters: Iterable[StoredParameter]) -> float:
    return sum(p.bytes for p in parameters)


def _copied_bytes(inputs: MemoryInputs, stored: list[StoredParameter]) -> float:
    """Return the bytes of weights and optimizer state that a process copies to write a checkpoint.

    For an unsharded checkpoint, rank 0 copies everything except the adapters' base and bf16 weights that have masters.
    For a sharded checkpoint, each process copies the shards that it writes.
    """
    unsharded = [p._replace(shards=1) for p in stored]
    saved = [p for p in unsharded if (p.kind == ADAPTERS if inputs.lora else not (p.is_trained and inputs.has_masters))]
    whole = inputs.tensor * (_sum_bytes(saved) + optimizer_bytes(inputs, unsharded))
    return whole / inputs.strategy.layout.world_size if inputs.fsdp.state_dict_type == "sharded" else whole


def _frozen_bytes(inputs: MemoryInputs) -> tuple[float, float]:
    """Return the bytes of a frozen model's weights, and of the blocks that FSDP gathers in its forward pass."""
    if (frozen := inputs.of_frozen()) is None:
        return 0.0, 0.0
    model = model_of(frozen.config, None)
    weights, block = (frozen.weight_bytes * count_parameters(part).total for part in (model, model.blocks[0]))
    return weights / inputs.strategy.shards, 2.0 * block * (inputs.strategy.kind == "fsdp")
