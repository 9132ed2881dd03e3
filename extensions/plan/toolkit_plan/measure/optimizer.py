"""Estimate optimizer memory: the state, and the temporary tensors of a step. Sizes are in bytes."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from inspect import signature
from typing import Any

import torch
from torch import nn

from toolkit.optim.bf16 import UPDATE_CHUNK, chunks
from toolkit.optim.classes import construct, optimizer_class
from toolkit.optim.evaluation_weights import begin_training
from toolkit.optim.hybrid import MIN_8BIT_SIZE, NS_STEPS, QUANTIZED_BLOCK, AdamW8bit, Muon
from toolkit.optim.muon import STACK_NUMEL, newton_schulz_flops
from toolkit_plan.measure.inputs import FP32, MemoryInputs, cached_by_text
from toolkit_plan.measure.parameters import ADAPTERS, StoredParameter
from toolkit_plan.measure.recorder import Recorder, tensors_in

BF16 = 2
Shape = tuple[int, int]
LOOKUP_TABLES_8BIT = 2 * 256 * FP32
"""Bytes of bitsandbytes' two 8-bit lookup tables, which all parameters share."""


def optimizer_bytes(inputs: MemoryInputs, parameters: Iterable[StoredParameter]) -> float:
    """Return the bytes of the optimizer state of some parameters, including masters and averaged weights."""
    total, has_main = 0.0, False
    for p in parameters:
        if p.is_trained:
            dtype = torch.float32 if p.kind == ADAPTERS or inputs.has_masters else inputs.dtype
            shape = (-(-p.parameter.shape[0] // p.shards), *p.parameter.shape[1:])
            total += state_bytes(inputs.optimizer, dtype, shape, inputs.optimizer_class, p.is_main)
            total += FP32 * p.numel if inputs.has_masters else 0
            total += FP32 * math.prod(shape) if inputs.ema is not None else 0
            has_main |= p.is_main
    return total + (LOOKUP_TABLES_8BIT if has_main and inputs.optimizer["name"] == AdamW8bit.__name__ else 0)


def update_bytes(inputs: MemoryInputs, stored: list[StoredParameter]) -> float:
    """Return the temporary bytes of a step, in addition to gradients and state.

    With bf16-master or bf16 moments: fp32 gradients and moments of one chunk of shards, see
    :class:`toolkit.optim.bf16.BF16Optimizer`. With bf16 moments also, for one parameter: random numbers, rounded values
    in fp32 and bf16, and a mask of finite values. Muon: updates and products of the matrices that it processes
    together; for sharded weights also one gathered matrix and its update. Sharded Adafactor: the updates of one chunk.
    Unfused on CUDA: intermediate values for a group's weights.
    """
    shards = inputs.strategy.shards
    groups = defaultdict[tuple[bool, bool], list[float]](list)  # elements of shards
    for p in stored:
        if p.is_trained:
            groups[p.decays, p.is_main].append(p.numel / shards)
    orthogonalization, needs = _orthogonalization_bytes(inputs, stored), 0.0
    has_bf16_moments, casts_gradients = (
        "state_dtype" in inputs.optimizer,
        inputs.has_masters and not inputs.sums_in_fp32,
    )
    if has_bf16_moments or casts_gradients:
        rounded = FP32 + 1 + FP32 + BF16 if has_bf16_moments else 0
        for (_, is_main), sizes in groups.items():
            widened = int(casts_gradients)  # fp32 tensors per weight
            if has_bf16_moments:
                moments = state_bytes(inputs.optimizer, torch.float32, (256, 256), inputs.optimizer_class, is_main)
                widened += int(moments // (BF16 * 256 * 256))
            for part in chunks(sizes, float, 1 if inputs.in_backward else UPDATE_CHUNK):
                after = max(orthogonalization * is_main, rounded * max(part))  # rounding follows the update
                needs = max(needs, FP32 * widened * sum(part) + after)
        return needs
    itemsize = FP32 if inputs.lora is not None else inputs.weight_bytes
    if inputs.optimizer["name"] == "Adafactor" and shards > 1:
        needs = itemsize * max(sum(part) for sizes in groups.values() for part in chunks(sizes, float))
    elif inputs.device == "cuda" and not (inputs.strategy.offloads or inputs.has_masters) and _is_foreach(inputs):
        needs = itemsize * max((max if inputs.in_backward else sum)(sizes) for sizes in groups.values())
    return needs + orthogonalization


def _orthogonalization_bytes(inputs: MemoryInputs, stored: list[StoredParameter]) -> float:
    """Return the temporary memory of Muon's iterations, in a chunk of its matrices; 0 for other optimizers."""
    if inputs.optimizer["name"] != Muon.__name__:
        return 0.0
    product, shards = FP32 if inputs.device == "cpu" else BF16, inputs.strategy.shards

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
    matrices = _muon_parts(stored)
    together = chunks(matrices, _numel, STACK_NUMEL if shards == 1 else 1)
    gathered = max(map(_numel, matrices), default=0) if shards > 1 else 0
    return max(map(peak_bytes, together), default=0) + (FP32 + product) * gathered


def _is_foreach(inputs: MemoryInputs) -> bool:
    """Whether the optimizer uses foreach kernels on CUDA, with intermediates as large as a group's weights."""
    return _takes(inputs, "foreach") and inputs.optimizer.get("foreach") is not False and not is_fused(inputs)


def state_bytes_8bit(elements: int) -> float:
    """Return the bytes of bitsandbytes' state for one parameter, without the 2 KB of shared lookup tables."""
    if elements < MIN_8BIT_SIZE:
        return 2 * 4 * elements
    return 2 * (elements + 4 * -(-elements // QUANTIZED_BLOCK))


def is_fused(inputs: MemoryInputs) -> bool:
    """Whether one kernel updates a weight, see :func:`toolkit.optim.classes.build_optimizer`."""
    is_possible = inputs.precision != "16-mixed" and "foreach" not in inputs.optimizer
    return bool(inputs.optimizer.get("fused", is_possible and _takes(inputs, "fused")))


def _takes(inputs: MemoryInputs, option: str) -> bool:
    return option in signature(inputs.optimizer_class or optimizer_class(inputs.optimizer["name"])).parameters


def orthogonalization_flops(inputs: MemoryInputs, stored: list[StoredParameter]) -> float:
    """Return the FLOPs of Muon's Newton-Schulz iterations per step on one device; 0 for other optimizers.

    With sharded weights, each rank orthogonalizes its share of the matrices.
    """
    if inputs.optimizer["name"] != Muon.__name__:
        return 0.0
    iterations = inputs.optimizer.get("ns_steps", NS_STEPS)
    parts = (shape for matrix in _muon_parts(stored) for shape in matrix)
    return sum(newton_schulz_flops(*shape, iterations) for shape in parts) / inputs.strategy.shards


def _muon_parts(stored: list[StoredParameter]) -> list[list[Shape]]:
    """Return the shapes of the parts that Muon orthogonalizes, for each of its matrices."""
    return [[(rows, p.parameter.shape[1]) for rows in p.parts] for p in stored if p.is_main]


def _numel(shapes: Iterable[Shape]) -> int:
    return sum(r * c for r, c in shapes)


@cached_by_text
def state_bytes(
    options: dict[str, Any],
    dtype: torch.dtype,
    shape: tuple[int, ...],
    user_class: type[torch.optim.Optimizer] | None = None,
    is_main: bool = False,
) -> float:
    """Return the bytes of an optimizer's state for one parameter, without a master.

    This runs one step of the optimizer on a parameter without data. ``is_main``: whether a hybrid optimizer's main
    optimizer updates the parameter.
    """
    name, is_adamw = options["name"], user_class is None and options["name"] == AdamW8bit.__name__
    if is_main and is_adamw:
        return state_bytes_8bit(math.prod(shape))
    others = ("name", "fused", "foreach", "state_dtype", "loraplus_lr_ratio")
    arguments = {k: v for k, v in options.items() if k not in others}
    # AdamW8bit is not built: its package may not be installed here
    cls: Any = torch.optim.AdamW if is_adamw else user_class or optimizer_class(name)
    parameter = nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"))
    parameter.grad = torch.empty_like(parameter)
    group = {"params": [parameter]} | ({"main": is_main} if name == Muon.__name__ else {})
    optimizer = construct(cls, [group], lr=1e-3, **arguments)
    begin_training(optimizer)
    with Recorder(None):  # answers ``.item()``
        optimizer.step()
    in_bf16 = "state_dtype" in options  # tensors of the weight's shape
    state = tensors_in(optimizer.state[parameter])
    return sum(v.numel() * (BF16 if in_bf16 and v.shape == shape else v.element_size()) for v in state)
