"""Run the forward and backward pass of one micro-batch without data, and record its operators and its memory.

The model has one block of each kind, and its tensors have no data: meta tensors that look like CUDA tensors, or fake
CPU tensors. What other layers of a kind need follows from the recorded one. This works for any layer.
"""

import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization

from toolkit.distributed.units import AUTOCAST_DTYPES
from toolkit.models.activation_checkpointing import checkpoint_blocks, selective_contexts
from toolkit.models.block import Block
from toolkit.models.cross_entropy import pointwise_cross_entropy
from toolkit.models.gpt import GPT
from toolkit.models.loss import COMPARED_TENSORS, chunk_rows
from toolkit.objectives.base import LOSS as LOSS_PART
from toolkit.private_torch import FakeTensorMode
from toolkit_plan.measure.cuda_on_meta import cuda_on_meta
from toolkit_plan.measure.inputs import MemoryInputs, cached_by_text
from toolkit_plan.measure.operators import (
    BACKWARD,
    CASTS,
    END,
    FORWARD,
    HEAD,
    HEAD_BACKWARD,
    START,
    Op,
    OperatorRecorder,
    Phase,
)
from toolkit_plan.measure.parameters import quantized_weights
from toolkit_plan.measure.recorder import ACTIVATIONS, WEIGHTS, Recorder, tensors_in
from toolkit_plan.measure.sample import (
    micro_batch,
    objective_of,
    one_layer_of_each_kind,
    sample_model,
)

MAX_CHUNKS = 4
"""Chunks of the loss that are traced; what further rows need are added up."""
LOSS = -1
"""Layer of the compiled cross-entropy's operators."""

Held = Counter[tuple[Phase, bool]]
"""Live bytes by the phase that allocated them, and whether they are casts."""


class Trace(NamedTuple):
    """Operators and memory of a model with one block of each kind, and the number of layers that each represents."""

    ops: list[Op]
    counts: list[int]
    memory: "StepMemory"

    def total(self, value: Callable[[Op], float]) -> float:
        """Add up a value of the operators, of all layers."""
        return sum((1 if op.layer in (None, LOSS) else self.counts[op.layer]) * value(op) for op in self.ops)


@dataclass(frozen=True)
class StepMemory:
    """Bytes that a micro-batch allocates on one device, without gradients of earlier ones. All layers are counted.

    Args:
        saved: Tensors that exist between the passes, without casts and what the head has made.
        casts: Autocast's 16-bit copies of weights, before the head.
        head: More at the peak of head and loss.
        kept: What the head has made and keeps for its backward pass.
        frozen: The peak of the forward pass of a frozen model.
        forward: The peak of the forward pass of the blocks.
        backward: The peaks of the backward pass of blocks: layers before the block, and bytes.
        end: The peak after it: the gradient of the embedding.
        recomputed: The most that the backward pass of a block needs in addition to what exists before it.
    """

    saved: float = 0.0
    casts: float = 0.0
    head: float = 0.0
    kept: float = 0.0
    frozen: float = 0.0
    forward: float = 0.0
    backward: tuple[tuple[int, float], ...] = ((0, 0.0),)
    end: float = 0.0
    recomputed: float = 0.0

    def plus(self, times: float, other: "StepMemory") -> "StepMemory":
        """Return this memory plus ``times`` the difference to another."""

        def add(a: float, b: float) -> float:
            return a + times * (b - a)

        names = {field.name for field in fields(self)} - {"backward"}
        values = {name: add(getattr(self, name), getattr(other, name)) for name in names}
        pairs = zip(self.backward, other.backward, strict=True)
        return replace(self, **values, backward=tuple((layers, add(a, b)) for (layers, a), (_, b) in pairs))


def step_memory(inputs: MemoryInputs) -> StepMemory:
    """Return the memory of a micro-batch.

    More rows than fill a few chunks of the loss need as much more for each row; their chunks would take long to trace.
    """
    # ddp's gradients become views of buckets that exist
    in_buckets = inputs.strategy.kind == "ddp" and inputs.ddp.gradient_as_bucket_view
    has_gradients = in_buckets or (inputs.accumulation > 1 and inputs.strategy.kind != "fsdp")
    rows, per_row = inputs.micro_batch_size, inputs.tokens / inputs.micro_batch_size
    vocabulary = inputs.config.padded_vocab_size // inputs.tensor * (1 if inputs.frozen is None else COMPARED_TENSORS)
    chunk = chunk_rows(vocabulary, torch.device(inputs.device))
    few = math.ceil(MAX_CHUNKS * chunk / per_row)
    forward = inputs.of_micro_batch(inputs.frozen)
    if rows <= 2 * few:
        return _trace(forward, has_gradients, False).memory
    a, b = (_trace(replace(forward, micro_batch_size=n), has_gradients, False).memory for n in (few, 2 * few))
    return a.plus((rows - few) / few, b)


def trace_micro_step(inputs: MemoryInputs, has_gradients: bool, is_compiled: bool = False) -> Trace:
    """Return the trace of one micro-batch, without a frozen model. The result is cached.

    Args:
        inputs: Of the run.
        has_gradients: Whether the micro-batch adds to the gradients of earlier micro-batches.
        is_compiled: Whether the loss is compiled. Blocks have the same operators; ``fusion.py`` fuses them.
    """
    return _trace(inputs.of_micro_batch(), has_gradients, is_compiled)


@cached_by_text
def _trace(inputs: MemoryInputs, has_gradients: bool, is_compiled: bool) -> Trace:
    config, counts = one_layer_of_each_kind(inputs.config)
    autocast = AUTOCAST_DTYPES.get(inputs.precision)
    with ExitStack() as stack:
        device = "meta" if inputs.device == "cuda" else "cpu"
        if device == "cpu":
            stack.enter_context(FakeTensorMode())
        model = sample_model(replace(inputs, config=config), device)
        batch, frozen = micro_batch(inputs, device), None
        if (frozen_inputs := inputs.of_frozen()) is not None:
            frozen = sample_model(
                replace(frozen_inputs, config=one_layer_of_each_kind(frozen_inputs.config)[0]), device
            ).eval()
            if inputs.strategy.kind == "fsdp":
                register_parametrization(frozen.lm_head, "weight", _Gather())
        trained = [p for p in model.parameters() if p.requires_grad]
        for parameter in trained if has_gradients else ():
            if inputs.has_masters:
                parameter.grad_dtype = torch.float32
            parameter.grad = torch.empty_like(parameter, dtype=torch.float32 if inputs.has_masters else None)
        if device == "meta":
            run: Callable[[], Any] = partial(cuda_on_meta, autocast)
        else:
            run = partial(torch.autocast, "cpu", dtype=autocast or torch.bfloat16, enabled=autocast is not None)
        _checkpoint(model, inputs.activation_checkpointing, run)
        gradients = [p.grad for p in trained if p.grad is not None]
        matrices = (p for p in model.parameters() if p.ndim > 1)
        recorder = OperatorRecorder(gradients, quantized_weights(inputs, model).values(), matrices)
        recorder.track_all((*model.parameters(), *model.buffers(), *gradients), WEIGHTS)
        recorder.track_all(frozen.parameters() if frozen is not None else (), WEIGHTS)
        recorder.track_all(tensors_in([batch.input_ids, batch.labels, batch.packed]), ACTIVATIONS)
        _follow(model, recorder, inputs.strategy.kind == "fsdp", inputs.in_backward)
        if is_compiled and inputs.tensor == 1:
            model.execute_with(compiled_loss=partial(_compiled_loss, recorder))
        with recorder, warnings.catch_warnings():
            with run():
                loss_sum = objective_of(frozen, model.config).sums(model, batch, torch.device(device))[LOSS_PART] * 1.0
            recorder.phase = Phase(HEAD_BACKWARD)
            warnings.filterwarnings("ignore", ".*Disabling autocast")  # of checkpoints: _contexts enables it
            loss_sum.backward()
    return Trace(recorder.ops, counts, _memory(recorder, counts))


class _Gather(nn.Module):
    """Allocates what FSDP needs to gather a weight when it is read: the all-gather's buffer, then the weight."""

    def forward(self, weight: Tensor) -> Tensor:
        buffer = torch.empty_like(weight)
        return torch.empty_like(buffer)


def _compiled_loss(recorder: OperatorRecorder, *args: Any) -> Any:
    """Record the loss without compiling it: there is no device to compile for."""
    phase, recorder.phase = recorder.phase, recorder.phase._replace(layer=LOSS)
    result = pointwise_cross_entropy(*args)
    recorder.phase = phase
    return result


def _checkpoint(model: GPT, mode: Any, run: Callable[[], Any]) -> None:
    """Checkpoint the blocks. The recomputation also emulates CUDA; torch does not check the recomputed tensors."""

    @contextmanager
    def nested(recomputation: Any) -> Iterator[None]:
        with run(), recomputation:
            yield

    def contexts() -> tuple[Any, Any]:
        forward, recomputation = selective_contexts() if mode == "selective" else (nullcontext(), nullcontext())
        return forward, nested(recomputation)

    checkpoint_blocks(model, (Block,), mode, determinism_check="none", context_fn=contexts)


def _follow(model: GPT, recorder: OperatorRecorder, is_sharded: bool, in_backward: bool) -> None:
    """Set the recorder's phase to what runs: a block, the head, or what is between them.

    A block's backward pass begins with the gradient of its output and ends with the gradient of its input. FSDP then
    frees the block's gradients, which ``in_backward`` frees one by one.
    """

    def enter(phase: Phase, finished: nn.Module) -> Callable[[Tensor], None]:
        def hook(gradient: Tensor) -> None:
            for parameter in finished.parameters() if is_sharded else ():
                parameter.grad = None
            recorder.phase = phase

        return hook

    def before(layer: int, args: tuple[Any, ...]) -> None:
        recorder.phase = Phase(FORWARD, layer)
        if layer == 0 and args[0].requires_grad:
            args[0].register_hook(enter(Phase(END), blocks[0]))

    def after(layer: int, output: Any) -> None:
        recorder.phase = Phase(FORWARD)
        x = output[0] if isinstance(output, tuple) else output
        if x.requires_grad:
            finished = blocks[layer + 1] if layer + 1 < len(blocks) else model.head
            x.register_hook(enter(Phase(BACKWARD, layer), finished))

    blocks = [*model.blocks]
    for i, block in enumerate(blocks):
        block.register_forward_pre_hook(lambda module, args, i=i: before(i, args))
        block.register_forward_hook(lambda module, args, output, i=i: after(i, output))

    def loss(*args: Any, **options: Any) -> Tensor:
        recorder.phase = Phase(HEAD)
        return compute_loss(*args, **options)

    if model.config.head is not None:
        model.head.register_forward_pre_hook(lambda module, args: setattr(recorder, "phase", Phase(HEAD)))
    else:
        compute_loss, model.lm_head.loss = model.lm_head.loss, loss  # type: ignore[method-assign]
    for parameter in model.parameters() if in_backward else ():
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))


class _Segment(NamedTuple):
    """Consecutive changes in one phase: the last block that began, and the live bytes at its start and its peak."""

    stage: str
    layer: int
    start: int
    peak: int


def _memory(recorder: Recorder, counts: list[int]) -> StepMemory:
    """Add the layers that are not in the trace. They hold as much as the one that was traced of their kind."""
    held, layer = Held(), 0
    starts: dict[str, Held] = {}  # ``held`` at the start of each stage
    segments = []
    for phase, changes in groupby(recorder.changes, lambda change: change[2]):
        starts.setdefault(phase.stage, held.copy())
        peak = start = held.total()
        for storage, change, _ in changes:
            if storage.kind != WEIGHTS:
                held[storage.made_in, storage.kind == CASTS] += change
                peak = max(peak, held.total())
        if phase.layer is not None:
            layer = phase.layer
        segments.append(_Segment(phase.stage, layer, start, peak))

    def others(held: Held, stage: str, layers: range, kinds: Iterable[bool] = (False, True)) -> int:
        """Return what the other layers of the kinds of ``layers`` hold that they allocated in a stage."""
        return sum((counts[i] - 1) * held[Phase(stage, i), kind] for i in layers for kind in kinds)

    all_layers = range(len(counts))
    before, after = starts[HEAD], starts[HEAD_BACKWARD]
    saved = sum(size for (phase, is_cast), size in after.items() if phase.stage in (START, FORWARD) and not is_cast)
    saved += others(after, FORWARD, all_layers, [False])
    casts = sum(size for (_, is_cast), size in before.items() if is_cast) + others(before, FORWARD, all_layers, [True])
    added = {
        START: 0,
        HEAD: others(before, FORWARD, all_layers),
        HEAD_BACKWARD: others(after, FORWARD, all_layers),
        END: others(held, BACKWARD, all_layers),
    }
    peaks = Counter[str]()
    backward, recomputed = [], [0.0]
    for stage, layer, start, peak in segments:
        same = range(layer, layer + 1)
        if stage == BACKWARD:
            base = peak + others(after, FORWARD, range(layer)) + others(held, BACKWARD, range(layer + 1, len(counts)))
            first = sum(counts[:layer])
            backward.append((first + counts[layer] - 1, base + others(after, FORWARD, same)))
            backward.append((first, base + others(held, BACKWARD, same)))
            recomputed.append(peak - start)
        else:
            more = others(before, FORWARD, range(layer + 1)) if stage == FORWARD else added[stage]
            peaks[stage] = max(peaks[stage], peak + more)
    kept = sum(size for (phase, is_cast), size in after.items() if phase.stage == HEAD and not is_cast)
    return StepMemory(
        saved,
        casts,
        max(peaks[HEAD], peaks[HEAD_BACKWARD]) - saved - casts,
        kept,
        peaks[START],
        peaks[FORWARD],
        tuple(backward),
        peaks[END],
        max(recomputed),
    )
