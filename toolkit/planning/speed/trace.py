"""Record the operators of a training step on one device, with the model on the meta device."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from toolkit.models.activation_checkpointing import checkpoint_blocks, selective_contexts
from toolkit.models.block import Block
from toolkit.models.cross_entropy import pointwise_cross_entropy
from toolkit.models.gpt import GPT
from toolkit.planning.memory_inputs import MemoryInputs, cached_by_text
from toolkit.planning.sample_model import (
    AUTOCAST,
    micro_batch,
    one_layer_of_each_kind,
    quantized_weights,
    sample_model,
)
from toolkit.planning.speed.cuda_on_meta import cuda_on_meta
from toolkit.planning.speed.operators import Op, Recorder

LOSS = -1
"""Layer of the compiled cross-entropy's operators."""


class Trace(NamedTuple):
    """Operators of a model with one block of each kind, and the number of layers that each block represents."""

    ops: list[Op]
    counts: list[int]

    def times(self, op: Op) -> int:
        return 1 if op.layer in (None, LOSS) else self.counts[op.layer]


def trace_micro_step(setup: MemoryInputs, has_gradients: bool, is_compiled: bool = False) -> Trace:
    """Return the operators of the forward and backward pass of one micro-batch. The result is cached.

    Args:
        setup: The run's memory inputs.
        has_gradients: Whether the micro-batch adds to the gradients of earlier micro-batches.
        is_compiled: Whether the loss is compiled. Blocks have the same operators; ``fusion.py`` fuses them.
    """
    return _trace(setup.of_forward(), has_gradients, is_compiled)


@cached_by_text
def _trace(setup: MemoryInputs, has_gradients: bool, is_compiled: bool) -> Trace:
    config, counts = one_layer_of_each_kind(setup.config)
    model = sample_model(replace(setup, config=config), "meta")
    trained = [p for p in model.parameters() if p.requires_grad]
    for parameter in trained if has_gradients else ():
        if setup.has_masters:
            parameter.grad_dtype = torch.float32
        parameter.grad = torch.empty_like(parameter, dtype=torch.float32 if setup.has_masters else None)
    _checkpoint(model, setup)
    weights = quantized_weights(setup, model).values()
    quantized = {w.untyped_storage()._cdata: w.numel() * 9 // 16 for w in weights}  # 4.5 bits
    inputs = micro_batch(setup, "meta")
    recorder = Recorder((p.grad for p in trained if p.grad is not None), quantized)
    _follow_blocks(model, recorder)
    if is_compiled and setup.tensor == 1:
        model.execute_with(compiled_loss=partial(_compiled_loss, recorder))
    with recorder, warnings.catch_warnings():
        with cuda_on_meta(AUTOCAST.get(setup.precision)):
            loss_sum, _ = model(**inputs)
            loss_sum = loss_sum * 1.0
        recorder.is_backward = True
        warnings.filterwarnings("ignore", ".*Disabling autocast")  # of checkpoints: _contexts enables it
        loss_sum.backward()
    return Trace(recorder.ops, counts)


def _compiled_loss(recorder: Recorder, *args: Any) -> Any:
    """Record the loss without compiling it: there is no device to compile for."""
    layer, recorder.layer = recorder.layer, LOSS
    result = pointwise_cross_entropy(*args)
    recorder.layer = layer
    return result


def _checkpoint(model: GPT, setup: MemoryInputs) -> None:
    """Checkpoint the blocks. The recomputation also emulates CUDA; torch does not check the recomputed tensors."""
    mode = setup.activation_checkpointing
    make = selective_contexts if mode == "selective" else lambda: (nullcontext(), nullcontext())
    contexts = partial(_contexts, make, AUTOCAST.get(setup.precision))
    checkpoint_blocks(model, (Block,), mode, determinism_check="none", context_fn=contexts)


def _contexts(make: Callable[[], tuple[Any, Any]], autocast: torch.dtype | None) -> tuple[Any, Any]:
    """Return the contexts of a block's forward pass and of its recomputation."""
    forward, recomputation = make()
    return forward, _nested(cuda_on_meta(autocast), recomputation)


@contextmanager
def _nested(first: Any, second: Any) -> Iterator[None]:
    with first, second:
        yield


def _follow_blocks(model: GPT, recorder: Recorder) -> None:
    """Set the recorder's ``layer`` to the running block.

    A block's backward pass begins with the gradient of its output and ends with the gradient of its input.
    """

    def enter(layer: int | None) -> Callable[[Tensor], None]:
        def hook(gradient: Tensor) -> None:
            recorder.layer = layer

        return hook

    def before(layer: int, args: tuple[Any, ...]) -> None:
        recorder.layer = layer
        if layer == 0 and args[0].requires_grad:
            args[0].register_hook(enter(None))

    def after(layer: int, output: Any) -> None:
        recorder.layer = None
        x = output[0] if isinstance(output, tuple) else output
        if x.requires_grad:
            x.register_hook(enter(layer))

    for i, block in enumerate(model.blocks):
        block.register_forward_pre_hook(lambda module, args, i=i: before(i, args))
        block.register_forward_hook(lambda module, args, output, i=i: after(i, output))
