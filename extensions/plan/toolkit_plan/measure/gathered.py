"""Memory of FSDP's all-gathered weights and of the gradients that are about to be reduced, in bytes."""

from collections.abc import Callable
from typing import NamedTuple

from toolkit.distributed.units import EMBEDDING, HEAD, Unit, block_dtypes, plan_units
from toolkit.models.block import Block
from toolkit.models.gpt import GPT
from toolkit_plan.measure.inputs import MemoryInputs
from toolkit_plan.measure.parameters import QUANTIZED_BASE, StoredParameter
from toolkit_plan.measure.trace import StepMemory


def unit_sizer(inputs: MemoryInputs, stored: list[StoredParameter]) -> Callable[[Unit, str, bool], float]:
    """Return a function that computes the bytes of an FSDP unit's parameters, without replicated ones.

    Its arguments are the unit, the dtype ("": the dtype of the shards), and whether to count only trained parameters.
    """
    by_id = {id(p.parameter): p for p in stored}

    def size(unit: Unit, kind: str, trained: bool) -> float:
        dtypes, total = block_dtypes(inputs.fsdp, inputs.precision), 0.0
        # units with head or embedding, and the root, are gathered as they are stored
        dtype = None if kind == "param_dtype" and not unit.is_block else getattr(dtypes, kind, None)
        gathers_fp8 = inputs.gathers_fp8 and not trained and unit.name not in ("", HEAD, EMBEDDING)
        for p in (by_id[id(parameter)] for parameter in unit.parameters):
            itemsize = p.itemsize
            if p.kind != QUANTIZED_BASE and gathers_fp8 and p.parameter.ndim == 2:
                itemsize = 1
            elif p.kind != QUANTIZED_BASE and dtype is not None:
                itemsize = dtype.itemsize
            if (p.is_trained or not trained) and not p.is_replicated:
                total += itemsize * p.numel
        return total

    return size


class FSDPMemory(NamedTuple):
    """Bytes of FSDP in a step.

    Args:
        at_loss: Unsharded weights at the loss.
        buffer: The part of them that is the last all-gather's buffer.
        elsewhere: The most bytes of a step at another time.
        all_weights: All unsharded weights.
    """

    at_loss: float = 0.0
    buffer: float = 0.0
    elsewhere: float = 0.0
    all_weights: float = 0.0


def fsdp_memory(inputs: MemoryInputs, model: GPT, stored: list[StoredParameter], step: StepMemory) -> FSDPMemory:
    """Return the memory of FSDP in a step.

    An all-gather writes to a buffer, from which the weights are copied and which the next all-gather frees. Gradients
    are copied to a buffer, which the next reduction frees (torch.distributed.fsdp, _fully_shard). The root's own
    weights stay unsharded. Without the weights and optimizer state that stay, the bytes are largest

    - at the loss: the head, the last buffer, and all units where they are kept (SHARD_GRAD_OP);
    - from one unit to the next in the forward pass: a buffer, and buffer and weights of the next; or in a block;
    - in the backward pass of a block: the block and the next buffer, its gradients, the previous ones; activations;
    - at the end: sharded gradients, and the embedding's.
    """
    size = unit_sizer(inputs, stored)

    def gathered(unit: Unit) -> float:
        return size(unit, "param_dtype", False)

    def gradients(unit: Unit) -> float:
        return size(unit, "reduce_dtype", True)

    root_unit, *units = plan_units(model, inputs.fsdp, (Block,))
    root, weights = gathered(root_unit), [*map(gathered, units)] or [0.0]
    has_head, n_layer = bool(units) and units[-1].name == HEAD, inputs.config.n_layer
    blocks = [unit for unit in units if unit.name not in (HEAD, EMBEDDING)]
    block, block_gradients = (max(map(of, blocks), default=0.0) for of in (gathered, gradients))
    kept = sum(weights) if inputs.strategy.sharding in ("SHARD_GRAD_OP", "NO_SHARD") else 0.0
    buffer = 0.0 if inputs.strategy.shards == 1 else weights[-1]
    if inputs.strategy.sharding == "SHARD_GRAD_OP" and inputs.accumulates_unsharded:
        # only the first micro-batch has the buffer, because it gathers for all; the others have gradients
        buffer = max(max(root, buffer) - sum(map(gradients, (root_unit, *units))), 0.0)
    at_loss = root + (kept or (weights[-1] if has_head else 0.0)) + buffer
    units_in_turn = (root + a + 2 * b for a, b in zip(weights, weights[1:], strict=False))
    forward = max(2 * (root + weights[0]), *units_in_turn, root + (kept or 2 * block) + step.forward)
    is_elsewhere = inputs.accumulation > 1 or inputs.strategy.offloads  # counted as gradients, or in CPU memory
    sharded_gradients = 0.0 if is_elsewhere else sum(size(unit, "", True) for unit in units) / inputs.strategy.shards
    head_gradients = gradients(units[-1]) if has_head else 0.0
    # gradients of the blocks after it are shards, and kept weights of the blocks before it are in memory
    backward = max(
        peak
        + (head_gradients if before == n_layer - 1 else block_gradients)
        + (max(kept - block, 0.0) * before + sharded_gradients * (n_layer - 1 - before)) / n_layer
        for before, peak in step.backward
    )
    backward += root + (block if kept else 2 * block)
    first_unit = units[0] if has_head else root_unit  # with the embedding
    before_first = (0.0 if has_head else root) + block_gradients
    end = sharded_gradients + size(first_unit, "param_dtype", True) + max(before_first, gradients(first_unit))
    return FSDPMemory(at_loss, buffer, max(forward, backward, end), root + sum(weights))
