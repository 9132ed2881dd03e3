"""Estimate optimizer memory: the state, and the temporary tensors of a step. Sizes are in bytes."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from toolkit.measure.inputs import FP32, MemoryInputs, cached_by_text
from toolkit.models.block import Block
from toolkit.models.gpt import GPT
from toolkit.models.lora import is_adapter
from toolkit.optim.bf16 import UPDATE_CHUNK, chunks
from toolkit.optim.classes import HYBRID, optimizer_class
from toolkit.optim.groups import block_params, no_decay_params
from toolkit.optim.hybrid import NS_STEPS, AdamW8bit, Muon, state_bytes_8bit
from toolkit.optim.muon import STACK_NUMEL, newton_schulz_flops

BF16 = 2
Shape = tuple[int, int]
LOOKUP_TABLES_8BIT = 2 * 256 * FP32
"""Bytes of bitsandbytes' two 8-bit lookup tables, which all parameters share."""


def optimizer_bytes(setup: MemoryInputs, model: GPT, shards: Mapping[str, int] | None = None) -> float:
    """Return the bytes of the optimizer state, including bf16-master's masters.

    ``shards`` has the parameters to count and the number of ranks over which their rows are sharded. By default all
    are unsharded.
    """
    main, kinds = main_params(setup, model), dict[tuple[tuple[float, ...], torch.dtype, bool], int]()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and (shards is None or name in shards):
            dtype = torch.float32 if is_adapter(name) or setup.has_masters else setup.dtype
            rows = parameter.shape[0] / (1 if shards is None else shards[name])
            kind = ((rows, *parameter.shape[1:]), dtype, name in main)
            kinds[kind] = kinds.get(kind, 0) + 1
    total = sum(
        n * state_bytes(setup.optimizer, dtype, shape, setup.optimizer_class, is_main)
        for (shape, dtype, is_main), n in kinds.items()
    )
    if setup.has_masters:
        total += FP32 * sum(p.numel() for p in model.parameters() if p.requires_grad)
    return total + (LOOKUP_TABLES_8BIT if main and setup.optimizer["name"] == AdamW8bit.__name__ else 0)


def update_bytes(setup: MemoryInputs, model: GPT) -> float:
    """Return the temporary bytes of a step, in addition to gradients and state.

    With bf16-master or bf16 moments: fp32 gradients and moments of one chunk of shards, see
    :class:`toolkit.optim.bf16.BF16Optimizer`. With bf16 moments also, for one parameter: random numbers, rounded values
    in fp32 and bf16, and a mask of finite values. Muon: updates and products of the matrices that it processes
    together; for sharded weights also one gathered matrix and its update. Sharded Adafactor: the updates of one chunk.
    Unfused on CUDA: intermediate values for a group's weights.
    """
    shards = setup.strategy.shards if setup.strategy.kind == "fsdp" else 1
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}

    def size(parameter: nn.Parameter) -> float:
        return parameter.numel() / shards

    largest = max(map(size, trained.values()))
    has_bf16_moments, main = "state_dtype" in setup.optimizer, main_params(setup, model)
    needs, no_decay, groups = 0.0, no_decay_params(model), dict[tuple[bool, bool], list[nn.Parameter]]()
    for name, parameter in trained.items():
        groups.setdefault((name in no_decay, name in main), []).append(parameter)
    orthogonalization = _orthogonalization_bytes(setup, model, main, shards)
    if has_bf16_moments or (setup.has_masters and not setup.sums_in_fp32):
        widened = {is_main: int(setup.has_masters and not setup.sums_in_fp32) for _, is_main in groups}  # per element
        rounded = 0
        if has_bf16_moments:
            rounded = FP32 + 1 + FP32 + BF16
            for is_main in widened:
                moments = state_bytes(setup.optimizer, torch.float32, (256, 256), setup.optimizer_class, is_main)
                widened[is_main] += int(moments // (BF16 * 256 * 256))
        limit = 1 if setup.in_backward else UPDATE_CHUNK
        for (_, is_main), group in groups.items():
            for sizes in (list(map(size, part)) for part in chunks(group, size, limit)):
                after = max(orthogonalization * is_main, rounded * max(sizes))  # rounding follows the update
                needs = max(needs, FP32 * widened[is_main] * sum(sizes) + after)
        return needs
    if setup.optimizer["name"] == "Adafactor" and shards > 1:
        parts = [(1, part) for group in groups.values() for part in chunks(group, size)]
        needs += setup.weight_bytes * max(sum(map(size, part)) for _, part in parts)
    elif _is_foreach(setup) and not setup.has_masters:
        elements = largest if setup.in_backward else max(sum(map(size, group)) for group in groups.values())
        needs += (FP32 if setup.lora is not None else setup.weight_bytes) * elements
    return needs + orthogonalization


def _orthogonalization_bytes(setup: MemoryInputs, model: GPT, main: set[str], shards: int) -> float:
    """Return the temporary memory of Muon's iterations, in a chunk of its matrices; 0 for other optimizers."""
    if setup.optimizer["name"] != Muon.__name__:
        return 0.0
    product = FP32 if setup.device == "cpu" else BF16

    def peak_bytes(matrices: list[list[Shape]]) -> int:
        """Return the peak of matrices that are processed together: fp32 directions, a stack per shape, its products."""
        n_stacked, peak = Counter(shape for parts in matrices for shape in parts), 0
        held = FP32 * _numel(shape for parts in matrices for shape in parts)
        for (r, c), n in n_stacked.items():
            stack = FP32 * n * r * c if n > 1 else 0
            peak = max(peak, held + stack + 2 * product * n * (r * c + min(r, c) ** 2))
            held += product * n * r * c
        return peak

    # ranks exchange sharded matrices one by one
    together = chunks(_muon_parts(setup, model), _numel, STACK_NUMEL if shards == 1 else 1)
    gathered = max((model.get_parameter(name).numel() for name in main), default=0) if shards > 1 else 0
    return max(map(peak_bytes, together), default=0) + (FP32 + product) * gathered


def _is_foreach(setup: MemoryInputs) -> bool:
    """Whether the optimizer uses foreach kernels on CUDA, with intermediates as large as a group's weights."""
    if setup.device != "cuda" or setup.strategy.offloads or setup.optimizer.get("foreach") is False:
        return False
    return _takes(setup, "foreach") and not is_fused(setup)


def is_fused(setup: MemoryInputs) -> bool:
    """Whether one kernel updates a weight, see :func:`toolkit.optim.classes.build_optimizer`."""
    is_possible = setup.precision != "16-mixed" and "foreach" not in setup.optimizer
    return bool(setup.optimizer.get("fused", is_possible and _takes(setup, "fused")))


def _takes(setup: MemoryInputs, option: str) -> bool:
    return option in signature(setup.optimizer_class or optimizer_class(setup.optimizer["name"])).parameters


def orthogonalization_flops(setup: MemoryInputs, model: GPT) -> float:
    """Return the FLOPs of Muon's Newton-Schulz iterations per step on one device; 0 for other optimizers.

    With sharded weights, each rank orthogonalizes its share of the matrices.
    """
    if setup.optimizer["name"] != Muon.__name__:
        return 0.0
    iterations, shards = setup.optimizer.get("ns_steps", NS_STEPS), 1
    if setup.strategy.kind == "fsdp":
        shards = setup.strategy.shards
    parts = (shape for matrix in _muon_parts(setup, model) for shape in matrix)
    return sum(newton_schulz_flops(*shape, iterations) for shape in parts) / shards


def _muon_parts(setup: MemoryInputs, model: GPT) -> list[list[Shape]]:
    """Return the shapes of the parts that Muon orthogonalizes, for each of its matrices."""
    inside, main, matrices = block_params(model, (Block,)), main_params(setup, model), []
    for name, parameter in model.named_parameters():
        if name in main:
            n_rows, n_columns = parameter.shape
            rows = inside[name] if setup.optimizer.get("split_qkv") else ()
            matrices.append([(r, n_columns) for r in rows or (n_rows,)])
    return matrices


def _numel(shapes: Iterable[Shape]) -> int:
    return sum(r * c for r, c in shapes)


def main_params(setup: MemoryInputs, model: GPT) -> set[str]:
    """Return the names of the parameters that a hybrid optimizer's main optimizer updates."""
    hybrid_class = None if setup.optimizer_class else HYBRID.get(setup.optimizer["name"])
    if hybrid_class is None:
        return set()
    no_decay, inside = no_decay_params(model), block_params(model, (Block,))
    trained = ((name, p) for name, p in model.named_parameters() if p.requires_grad)
    return {name for name, p in trained if hybrid_class.is_main(p, name in inside, name not in no_decay)}


def state_bytes(
    options: dict[str, Any],
    dtype: torch.dtype,
    shape: tuple[float, ...],
    user_class: type[torch.optim.Optimizer] | None = None,
    is_main: bool = False,
) -> float:
    """Return the bytes of an optimizer's state for one parameter, without a master.

    This runs one step of the optimizer on tiny parameters. State sizes (elements, rows, columns, a counter) are linear
    in each axis, so four small matrices, or two vectors, determine all of them. ``is_main``: whether a hybrid
    optimizer's main optimizer updates the parameter. The first axis may be the mean rows of a shard.
    """
    if 0 in shape:
        return 0.0
    if is_main and options["name"] == AdamW8bit.__name__:
        return state_bytes_8bit(round(math.prod(shape)))
    measure = partial(_measure, options, dtype, user_class, is_main)
    if len(shape) == 1:
        low, high = measure((8,)), measure((16,))
        return low + (high - low) / 8 * (shape[0] - 8)
    if len(shape) == 3:  # stacked experts: one matrix each, and one counter for all
        once = 2 * measure((1, 8, 8)) - measure((2, 8, 8))
        return once + shape[0] * (state_bytes(options, dtype, shape[1:], user_class, is_main) - once)
    rows, columns = shape
    corner, right, down, both = (measure(s) for s in ((8, 8), (8, 16), (16, 8), (16, 16)))
    x, y = (rows - 8) / 8, (columns - 8) / 8
    return corner + (down - corner) * x + (right - corner) * y + (both - down - right + corner) * x * y


@cached_by_text
def _measure(
    options: dict[str, Any], dtype: torch.dtype, user_class: type | None, is_main: bool, shape: tuple[int, ...]
) -> int:
    """Return the bytes of the optimizer state of a small parameter, see :func:`state_bytes`."""
    others = ("name", "fused", "foreach", "state_dtype", "loraplus_lr_ratio")
    arguments, name = {k: v for k, v in options.items() if k not in others}, options["name"]
    # AdamW8bit is not built: its package may not be installed here
    is_adamw = user_class is None and name == AdamW8bit.__name__
    cls: Any = torch.optim.AdamW if is_adamw else user_class or optimizer_class(name)
    parameter = nn.Parameter(torch.zeros(shape, dtype=dtype))
    parameter.grad = torch.zeros_like(parameter)
    group = {"params": [parameter]} | ({"main": is_main} if name == Muon.__name__ else {})
    optimizer = cls([group], lr=1e-3, **arguments)
    optimizer.step()
    in_bf16 = "state_dtype" in options  # tensors of the weight's shape
    state = [v for v in optimizer.state[parameter].values() if isinstance(v, Tensor)]
    return sum(v.numel() * (BF16 if in_bf16 and v.shape == shape else v.element_size()) for v in state)
