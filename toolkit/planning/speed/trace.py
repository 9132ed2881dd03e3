"""The operators of a training step on one device, from the model of a run on the meta device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from inspect import signature
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import nn

from toolkit.config import ActivationCheckpointing
from toolkit.distributed.strategy import StrategyPlan
from toolkit.models import loss
from toolkit.models.activation_checkpointing import checkpoint_blocks
from toolkit.models.attention_kernels import DocumentBounds
from toolkit.models.config import ModelConfig
from toolkit.models.cross_entropy import _pointwise as pointwise_cross_entropy
from toolkit.models.families import family_of
from toolkit.models.gpt import GPT, Block
from toolkit.models.lora import adapted_on_meta, is_adapter
from toolkit.optim.classes import HYBRID, optimizer_class
from toolkit.planning.setup import TrainingSetup
from toolkit.planning.speed.cuda_on_meta import cuda_on_meta
from toolkit.planning.speed.operators import Op, Recorder

_PER_LAYER = ("sliding_window_indices", "rope_indices", "moe_indices")
"""Lists of the config with an entry per layer; otherwise layers are equal."""


LOSS = -1
"""Layer of the operators of the cross-entropy where they are compiled."""


class Trace(NamedTuple):
    """Operators of a model in which each kind of block occurs once, and how often each of its blocks counts."""

    ops: list[Op]
    counts: list[int]

    def times(self, op: Op) -> int:
        return 1 if op.layer in (None, LOSS) else self.counts[op.layer]


_known: dict[str, Trace] = {}


def trace_micro_step(setup: TrainingSetup, has_gradients: bool, is_compiled: bool = False) -> Trace:
    """Return the operators of the forward and backward pass of one micro-batch; the same list for the same setup.

    Args:
        setup: The run.
        has_gradients: It adds to the gradients of earlier micro-batches.
        is_compiled: The kernel of the loss is the compiled one. The blocks' operators are the same, see ``fusion.py``.
    """
    others = StrategyPlan("fsdp" if setup.strategy.kind == "fsdp" else "single", None, (1, 1), "")
    same = replace(setup, strategy=others, accumulation=1, optimizer={}, optimizer_class=None, async_save=False)
    key = f"{same} {has_gradients} {is_compiled}"
    if key not in _known:
        _known[key] = _trace(setup, has_gradients, is_compiled)
    return _known[key]


def _trace(setup: TrainingSetup, has_gradients: bool, is_compiled: bool) -> Trace:
    config, counts = one_layer_of_each_kind(setup.config)
    model = adapted_on_meta(config, setup.lora).train()
    _set_dtypes(model, setup)
    trained = [p for p in model.parameters() if p.requires_grad]
    for parameter in trained if has_gradients else ():
        if setup.has_masters:
            parameter.grad_dtype = torch.float32
        parameter.grad = torch.empty_like(parameter, dtype=torch.float32 if setup.has_masters else None)
    _checkpoint(model, setup.activation_checkpointing)
    quantized = _quantized_storages(model, setup)
    autocast = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(setup.precision)
    inputs = _inputs(setup)
    recorder = Recorder((p.grad for p in trained if p.grad is not None), quantized)
    _follow_blocks(model, recorder)
    model.compiled_loss = is_compiled
    with recorder, patch.object(loss, "choose_cross_entropy", lambda *args: partial(_compiled_loss, recorder)):
        with cuda_on_meta(autocast):
            loss_sum, _ = model(**inputs)
        recorder.is_backward = True
        with cuda_on_meta(None):
            torch.autograd.backward(loss_sum * 1.0)
    return Trace(recorder.ops, counts)


def _compiled_loss(recorder: Recorder, *args: Any) -> Any:
    """The function that the run compiles: here is nothing to compile for, and no device to check it on."""
    layer, recorder.layer = recorder.layer, LOSS
    result = pointwise_cross_entropy(*args)
    recorder.layer = layer
    return result


def one_layer_of_each_kind(config: ModelConfig) -> tuple[ModelConfig, list[int]]:
    """Return a config with the first layer and one of each kind of the others, and how often each of them counts.

    The first layer is alone, because its input may need no gradient.
    """
    if family_of(config).model_class() is not None:  # an extension's model may treat any layer differently
        return config, [1] * config.n_layer
    lists = [getattr(config, name) or [None] * config.n_layer for name in _PER_LAYER]
    first, *others = zip(*lists, strict=True)
    kinds = Counter(others)
    layers = [first, *kinds]
    columns = zip(*layers, strict=True)
    given: dict[str, Any] = {
        name: list(column)
        for name, column in zip(_PER_LAYER, columns, strict=True)
        if getattr(config, name) is not None
    }
    return replace(config, n_layer=len(layers), **given), [1, *kinds.values()]


def _set_dtypes(model: GPT, setup: TrainingSetup) -> None:
    """Give the weights the dtypes of the run; those that FSDP gathers in 16 bits have 16 bits."""
    gathered = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(setup.precision)
    blocks = {id(p) for block in model.blocks for p in block.parameters()}
    for name, parameter in model.named_parameters():
        dtype = torch.float32 if is_adapter(name) else setup.dtype
        if setup.strategy.kind == "fsdp" and gathered and id(parameter) in blocks and parameter.ndim > 1:
            dtype = torch.float32 if is_adapter(name) else gathered
        parameter.data = parameter.data.to(dtype)


def _quantized_storages(model: GPT, setup: TrainingSetup) -> dict[int, int]:
    """Return the bytes of the 4-bit weights by their storage: those of the blocks' linear layers."""
    if setup.quantize is None:
        return {}
    linears = [m for block in model.blocks for m in block.modules() if isinstance(m, nn.Linear)]
    return {m.weight.untyped_storage()._cdata: m.weight.numel() * 9 // 16 for m in linears}  # 4.5 bits


def _checkpoint(model: GPT, mode: ActivationCheckpointing) -> None:
    """Checkpoint the blocks, without torch's check that recomputed tensors are on the same device."""
    checkpoint_blocks(model, (Block,), mode)
    for block in model.blocks if mode != "none" else ():
        forward: Any = block.forward
        plain, checkpointed = forward.args
        block.forward = partial(forward.func, plain, partial(checkpointed, determinism_check="none"))  # type: ignore[method-assign]


def _inputs(setup: TrainingSetup) -> dict[str, Any]:
    shape, names = (setup.micro_batch_size, setup.seq_length), ["input_ids", "labels"]
    if setup.packed:
        names += ["positions", "documents"]
    inputs: dict[str, Any] = {name: torch.empty(shape, dtype=torch.int64, device="meta") for name in names}
    if setup.packed:
        cu_seqlens = torch.empty(setup.micro_batch_size + 1, dtype=torch.int32, device="meta")
        inputs["document_bounds"] = DocumentBounds(cu_seqlens, setup.seq_length)
    return inputs


def _follow_blocks(model: GPT, recorder: Recorder) -> None:
    """Let the recorder know which block runs.

    The gradient of a block's output is known when its backward pass begins, and that of its input when it ends.
    """

    def enter(layer: int | None) -> Callable[[torch.Tensor], None]:
        def hook(gradient: torch.Tensor) -> None:
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


def trace_update(setup: TrainingSetup, shape: torch.Size, dtype: torch.dtype) -> list[Op]:
    """Return the operators of the optimizer's step for a parameter, fused where the class supports it, as in a run.

    Raises:
        NotImplementedError: it is one of those of :mod:`toolkit.optim.hybrid`, or updates copies in fp32.
    """
    if setup.has_masters or "state_dtype" in setup.optimizer or setup.optimizer["name"] in HYBRID:
        raise NotImplementedError(setup.optimizer["name"])
    options = {k: v for k, v in setup.optimizer.items() if k not in ("name", "weight_decay")}
    cls: Any = setup.optimizer_class or optimizer_class(setup.optimizer["name"])
    if "fused" in signature(cls).parameters and setup.precision != "16-mixed" and "foreach" not in options:
        options.setdefault("fused", True)
    parameter = nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"))
    parameter.grad = torch.empty_like(parameter)
    optimizer = cls([parameter], lr=1e-3, **options)
    recorder = Recorder()
    with cuda_on_meta(None):
        optimizer.step()
        with recorder:
            optimizer.step()
    return recorder.ops
