"""Memory of FSDP's all-gathered weights and of the gradients that are about to be reduced, in bytes."""

from collections.abc import Callable

from torch import nn

from toolkit.distributed.units import EMBEDDING, HEAD, Unit, block_dtypes, plan_units, unit_dtypes
from toolkit.measure.inputs import FP32, MemoryInputs
from toolkit.measure.trace import StepMemory
from toolkit.models.block import Block
from toolkit.models.gpt import GPT
from toolkit.models.lora import is_adapter

# bitsandbytes: 4 bits, and an fp32 scale per 64 weights; with double quantization an 8-bit scale per 64 weights, and an
# fp32 scale per 256 scales (Dettmers et al. 2023, QLoRA, section 3).
BYTES_4BIT = 0.5
QUANTIZED_BYTES = {"bnb.nf4": BYTES_4BIT + 4 / 64, "bnb.nf4-dq": BYTES_4BIT + 1 / 64 + 4 / (64 * 256)}


def is_replicated(setup: MemoryInputs, parameter: nn.Parameter) -> bool:
    """Whether FSDP replicates a parameter: vectors under mixed precision."""
    return block_dtypes(setup.fsdp, setup.precision) is not None and parameter.ndim < 2


def unit_sizer(
    setup: MemoryInputs, model: GPT, quantized: dict[str, nn.Parameter]
) -> Callable[[Unit, str, bool], float]:
    """Return a function that computes the bytes of an FSDP unit's parameters, without replicated ones.

    Its arguments are the unit, the dtype ("": the dtype of the shards), and whether to count only trained parameters.
    """
    adapters = {id(p) for name, p in model.named_parameters() if is_adapter(name)}
    packed = {id(p) for p in quantized.values()}

    def size(part: Unit, kind: str, trained: bool) -> float:
        dtype, total = getattr(unit_dtypes(part, setup.fsdp, setup.precision), kind, None), 0.0
        gathers_fp8 = setup.gathers_fp8 and not trained and part.name not in ("", HEAD, EMBEDDING)
        for p in part.parameters:
            stored = FP32 if id(p) in adapters else setup.weight_bytes
            itemsize = 1 if gathers_fp8 and p.ndim == 2 else stored if dtype is None else dtype.itemsize
            if (p.requires_grad or not trained) and not is_replicated(setup, p):
                total += p.numel() * (BYTES_4BIT if id(p) in packed else itemsize)
        return total

    return size


def fsdp_bytes(
    setup: MemoryInputs, model: GPT, quantized: dict[str, nn.Parameter], step: StepMemory
) -> tuple[float, float]:
    """Return the bytes of FSDP's unsharded weights at the loss, and the most bytes of a step at another time.

    An all-gather writes to a buffer, from which the weights are copied and which the next all-gather frees. Gradients
    are copied to a buffer, which the next reduction frees (torch.distributed.fsdp, _fully_shard). The root's own
    weights stay unsharded. Without the weights and optimizer state that stay, the bytes are largest

    - at the loss: the head, the last buffer, and all units where they are kept (SHARD_GRAD_OP);
    - from one unit to the next in the forward pass: a buffer, and buffer and weights of the next; or in a block;
    - in the backward pass of a block: the block and the next buffer, its gradients, the previous ones; activations;
    - at the end: sharded gradients, and the embedding's.
    """
    size = unit_sizer(setup, model, quantized)
    rest, *units = plan_units(model, setup.fsdp, (Block,))
    root, sizes = size(rest, "param_dtype", False), [size(part, "param_dtype", False) for part in units] or [0.0]
    has_head = bool(units) and units[-1].name == HEAD
    blocks = [part for part in units if part.name not in (HEAD, EMBEDDING)]
    block = max((size(part, "param_dtype", False) for part in blocks), default=0.0)
    kept = sum(sizes) if setup.strategy.sharding in ("SHARD_GRAD_OP", "NO_SHARD") else 0.0
    buffer = 0.0 if setup.strategy.shards == 1 else sizes[-1]
    if setup.strategy.sharding == "SHARD_GRAD_OP" and setup.accumulates_unsharded:
        # only the first micro-batch has the buffer, because it gathers for all; the others have gradients
        buffer = max(max(root, buffer) - sum(size(part, "reduce_dtype", True) for part in (rest, *units)), 0.0)
    at_loss = root + (kept or (sizes[-1] if has_head else 0.0)) + buffer
    start = max(2 * (root + sizes[0]), *(root + a + 2 * b for a, b in zip(sizes, sizes[1:], strict=False)), 0.0)
    start = max(start, root + (kept or 2 * block) + step.forward)
    is_elsewhere = setup.accumulation > 1 or setup.strategy.offloads  # counted as gradients, or in CPU memory
    shards = 0.0 if is_elsewhere else sum(size(part, "", True) for part in units) / setup.strategy.shards
    n_layer, reduced = setup.config.n_layer, max((size(part, "reduce_dtype", True) for part in blocks), default=0.0)
    after_head = size(units[-1], "reduce_dtype", True) if has_head else 0.0
    # gradients of the blocks after it are shards, and kept weights of the blocks before it are in memory
    backward = max(
        peak
        + (after_head if before == n_layer - 1 else reduced)
        + (max(kept - block, 0.0) * before + shards * (n_layer - 1 - before)) / n_layer
        for before, peak in step.backward
    )
    backward += root + (block if kept else 2 * block)
    outer = units[0] if has_head else rest
    last = (0.0 if has_head else root) + reduced
    end = shards + size(outer, "param_dtype", True) + max(last, size(outer, "reduce_dtype", True))
    return at_loss, max(start, backward, end)
